"""Tiers of an engine on Ray: moves through sockets, restart on the same disk, administration."""

import asyncio

import pytest
import ray

from flare_ray.actors.directory import EngineDirectory
from flare_ray.actors.launch import launch_engine
from flare_ray.contracts.tiers import Tier
from flare_ray.frontend.router import EngineFinder
from tests.actors.ray_support import Listener, wait_until
from tests.actors.test_ray_engine import answer, submit
from tests.support.scripted_engine import scripted_checkpoint, scripted_deployment

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

APPLICATION = "tiers"
LONG = "a prefix of more than one page, " * 5


@pytest.fixture
def listener(cluster):
    with_stream = Listener(APPLICATION)
    yield with_stream
    with_stream.close()


def tiers_of(finder: EngineFinder) -> dict[str, object]:
    reports = asyncio.run(finder.cache())
    return {tier.tier: tier for report in reports for tier in report.tiers}


def test_reset_reaches_the_engine_and_prefixes_come_back_from_disk(cluster, listener, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    checkpoint = scripted_checkpoint(tmp_path / "checkpoint")
    cache = {"host_bytes": 4 << 20, "disk_path": str(tmp_path / "cache")}
    config = scripted_deployment(checkpoint, tensor_parallel_size=2, prefix_cache=cache)
    finder = EngineFinder(APPLICATION, config)
    first = launch_engine(config, application=APPLICATION)
    try:
        answer(submit(first, listener, LONG, max_tokens=2))
        wait_until(
            lambda: getattr(tiers_of(finder).get("disk"), "snapshots", 0) > 0,
            timeout_s=60.0,
            what="a snapshot on disk",
        )
        [reset] = asyncio.run(finder.reset_cache(frozenset({Tier.DEVICE, Tier.HOST})))
        assert reset.dropped["host"] > 0
        again = answer(submit(first, listener, LONG + "1", max_tokens=2))
        assert again.cached_tokens >= 64
    finally:
        first.close()
    wait_until(lambda: not EngineDirectory(APPLICATION).engines(), timeout_s=60.0, what="its end")
    second = launch_engine(config, application=APPLICATION)
    try:
        later = answer(submit(second, listener, LONG + "2", max_tokens=2))
        assert later.cached_tokens >= 64
    finally:
        second.close()
    assert ray.is_initialized()
