"""The engine of one process: rank threads, real rounds of the scripted recipe."""

import threading
import time

import msgspec
import pytest

from flare_ray.actors.inprocess import start_inprocess
from flare_ray.actors.thread_channel import RankThreads, ThreadChannel
from flare_ray.contracts.record import RoundReply
from flare_ray.errors import CheckpointError, ConfigError, RankFailure
from tests.actors.test_core import Consumer
from tests.support.fake_channel import make_manifest
from tests.support.plans import prefill_plan
from tests.support.scripted_engine import make_request, scripted_config
from tests.support.stand_in import StandInExecutor

MANIFEST = make_manifest()


def generate(config, names=("one", "two", "three")) -> dict[str, list[int]]:
    """Tokens of sampled requests that share the engine."""
    core = start_inprocess(config)
    try:
        consumers = {name: Consumer() for name in names}
        for name, consumer in consumers.items():
            core.submit(make_request(name), consumer)
        for consumer in consumers.values():
            assert consumer.end().reason == "length"
        return {name: consumer.tokens for name, consumer in consumers.items()}
    finally:
        core.shutdown(0.0)


def test_tokens_are_equal_for_one_and_two_ranks_and_both_queue_depths(checkpoint):
    expected = generate(scripted_config(checkpoint, speculation={"policy": "fixed"}))
    assert {len(tokens) for tokens in expected.values()} == {40}
    for fields in ({"tensor_parallel_size": 2}, {"queue_depth": 2}):
        config = scripted_config(checkpoint, speculation={"policy": "fixed"}, **fields)
        assert generate(config) == expected


def test_several_ranks_on_cuda_are_refused_in_one_process(checkpoint):
    config = scripted_config(checkpoint, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="process per GPU"):
        start_inprocess(config.model_copy(update={"device": "cuda"}))


def test_missing_checkpoint_is_reported_and_no_thread_is_left(tmp_path):
    before = threading.active_count()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        start_inprocess(scripted_config(str(tmp_path), tensor_parallel_size=2))
    assert threading.active_count() == before


def test_shutdown_leaves_no_thread(checkpoint):
    before = threading.active_count()
    generate(scripted_config(checkpoint, tensor_parallel_size=2))
    assert threading.active_count() == before


class Ranks:
    """Stand-in executors on threads; a rank may misbehave in one round."""

    def __init__(self, world_size: int = 2, **faults) -> None:
        self.faults = faults
        self.broken = threading.Event()
        self.threads = RankThreads(world_size, self._make, abort=lambda *_: self.broken.set())
        self.channel = ThreadChannel(self.threads, rank_timeout_s=0.3)

    def _make(self, rank: int) -> StandInExecutor:
        executor = StandInExecutor(MANIFEST, rank=rank)
        if rank == 1:
            play = executor.execute
            executor.execute = lambda plan, masks=None: self._misbehave(play, plan)
        return executor

    def _misbehave(self, play, plan) -> RoundReply:
        if plan.round_id == self.faults.get("raises_in"):
            raise ValueError("no luck")
        if plan.round_id == self.faults.get("hangs_in"):
            self.broken.wait(5.0)
        reply = play(plan)
        if plan.round_id == self.faults.get("lies_in"):
            return msgspec.structs.replace(reply, checksum=reply.checksum + 1)
        return reply


@pytest.mark.parametrize(
    ("faults", "rank", "text"),
    [
        ({"raises_in": 2}, 1, "ValueError: no luck"),
        ({"hangs_in": 2}, 1, "hung in round 2"),
        ({"lies_in": 2}, -1, "ranks disagree in round 2"),
    ],
)
def test_thread_ranks_fail_as_processes_do(faults, rank, text):
    ranks = Ranks(**faults)
    with pytest.raises(RankFailure, match=text) as caught:
        for round_id in range(3):
            ranks.channel.submit(prefill_plan(MANIFEST, round_id))
            ranks.channel.receive(5.0)
    assert (caught.value.rank, caught.value.round_id) == (rank, 2)
    with pytest.raises(RankFailure, match=text):
        ranks.channel.receive(0.0)
    ranks.broken.set()
    ranks.threads.stop()


def test_wake_ends_a_blocked_receive():
    ranks = Ranks()
    threading.Timer(0.05, ranks.channel.wake).start()
    start = time.monotonic()
    assert ranks.channel.receive(5.0) is None
    assert time.monotonic() - start < 1.0
    ranks.threads.stop()
