"""`benchmarks.serving.history` at its smallest, on a checkpoint of a few thousand weights."""

from dataclasses import replace

import msgspec
import pytest
import torch
from rich.console import Console

from benchmarks.serving.history import (
    BOUNDS,
    OFFICIAL,
    SMALL,
    history_metrics,
    lookup_us,
    run_part,
    state_bytes_ratio,
)
from benchmarks.support.results import metric_at, write_result
from benchmarks.workload.arms import ADAPTIVE, ALONE, OFF, TEXT
from benchmarks.workload.tests.test_workload import ENGINE
from flare_ray.workload.runner import blocks_of
from flare_ray.workload.source import load_workload
from tests.support.served_glm import served_glm


@pytest.fixture
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_arms_write_equal_texts_and_give_every_metric(tmp_path, keep_threads):
    """One category stands for the others, too."""
    checkpoint = served_glm(tmp_path / "glm")
    part = replace(
        SMALL.parts[0],
        arms=(OFF, ADAPTIVE, TEXT, ALONE),
        settings=msgspec.structs.replace(
            SMALL.parts[0].settings, sessions=1, warm=0, max_tokens=12
        ),
    )
    size = replace(SMALL, engine={**ENGINE, "context_tokens": 1024, "concurrency": 1})
    run = run_part(part, size, checkpoint, tmp_path / "run", Console(quiet=True))
    metrics = history_metrics(run, run)
    assert metrics["unequal_requests"] == metrics["failed_requests"] == 0
    metrics |= {"lookup_us": lookup_us(50), "state_bytes_ratio": state_bytes_ratio()}
    written = write_result("history", metrics, BOUNDS, folder=tmp_path / "results")
    assert len(written.targets) == len(BOUNDS)
    alone = metric_at(metrics, f"edits.{ALONE}.requests")
    assert alone == metric_at(metrics, f"edits.{OFF}.requests") == 1


def test_official_size_fits_the_frozen_workload():
    items = load_workload().items
    for part in OFFICIAL.parts:
        found = {block.category for block in blocks_of(items, part.settings)}
        assert found == set(part.settings.categories)


def test_a_saved_column_is_95_times_a_record():
    assert round(state_bytes_ratio()) == 95
