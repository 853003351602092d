"""The prefix benchmark at its smallest size, on a tiny checkpoint with a tokeniser."""

import math

from benchmarks.serving.prefix import BOUNDS, QUICK, run
from benchmarks.support.results import metric_at
from tests.support.served_glm import engine_settings, served_glm


def test_smallest_run_measures_every_target(tmp_path):
    section = engine_settings(served_glm(tmp_path / "checkpoint"), threads_per_rank=1)
    metrics = run(section, QUICK, tmp_path)
    assert all(math.isfinite(metric_at(metrics, bound.metric)) for bound in BOUNDS)
    assert 0 < metrics["chats"]["hit_rate"] <= metrics["chats"]["hit_rate_of_an_endless_device"]
    tiers = metrics["chats"]["tiers"]
    assert set(tiers) == {"device", "host", "disk"}
    assert tiers["device"]["restored_tokens"] and tiers["disk"]["used_bytes"]
    assert set(metrics["ttft_s"]) == {"cold", "device", "host", "disk"}
