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

ARMS = {"edit": (OFF, ADAPTIVE, TEXT, ALONE), "others": (ADAPTIVE, TEXT)}


@pytest.fixture
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_arms_write_equal_texts_and_give_every_metric(tmp_path, keep_threads):
    checkpoint = served_glm(tmp_path / "glm")
    runs = []
    for part in SMALL.parts:
        settings = msgspec.structs.replace(
            part.settings,
            categories=part.settings.categories[:1],
            sessions=1,
            warm=0,
            max_tokens=12,
        )
        small = replace(part, arms=ARMS[part.name], settings=settings)
        size = replace(SMALL, engine={**ENGINE, "context_tokens": 1024, "concurrency": 1})
        out = tmp_path / part.name
        runs.append(run_part(small, size, checkpoint, out, Console(quiet=True)))
    metrics = history_metrics(*runs)
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
