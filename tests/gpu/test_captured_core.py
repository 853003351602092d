"""A core that was prepared on a device is taken over by a captured start (contract: G7)."""

from __future__ import annotations

import time

import pytest

from flare_ray.cli.prepare import prepare_core
from tests.gpu.captured import config_of, rank_of
from tests.support.served_glm import served_glm

pytestmark = pytest.mark.gpu


def test_captured_start_takes_prices_and_pool_of_its_core(tmp_path):
    folder = served_glm(tmp_path / "glm")
    core = tmp_path / "core"
    print(prepare_core(config_of(folder), core))
    started = time.perf_counter()
    rank = rank_of(folder, core=str(core))
    print(f"start from the core {time.perf_counter() - started:.1f} s")
    assert rank.manifest.prices
    assert rank.manifest.budget.graph_pool_bytes == rank.backend.pool_bytes
