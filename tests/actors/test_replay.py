"""One recorded plan log gives byte-equal records in every kind of engine (contract: T5, S6)."""

import msgspec
import pytest

from flare_ray.actors import inprocess
from flare_ray.actors.channel import SocketChannel
from flare_ray.actors.inprocess import prepare_threads, start_inprocess
from flare_ray.actors.listener import RankListener
from flare_ray.actors.thread_channel import ThreadChannel
from tests.actors.test_core import Consumer
from tests.support.scripted_engine import make_request, scripted_config
from tests.support.scripted_rank_process import start_scripted_rank

ROUND_LIMIT_S = 60.0


class RecordingChannel(ThreadChannel):
    """Keeps what passes; the instance made last is the one recorded."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        type(self).latest = self
        self.plans: list = []
        self.results: list = []

    def submit(self, plan) -> None:
        super().submit(plan)
        self.plans.append(plan)

    def receive(self, timeout_s: float):
        result = super().receive(timeout_s)
        if result is not None:
            self.results.append(result)
        return result


@pytest.fixture(scope="module")
def recorded(checkpoint) -> RecordingChannel:
    """A run with prompts of several chunks, both temperatures, a cancellation, a reused slot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inprocess, "ThreadChannel", RecordingChannel)
        core = start_inprocess(scripted_config(checkpoint, queue_depth=2))
        consumers = [Consumer() for _ in range(5)]
        for place, consumer in enumerate(consumers):
            name = f"{place} " + "a longer prompt " * (3 * place)
            temperature = 0.5 + place / 2
            core.submit(make_request(name, max_tokens=50, temperature=temperature), consumer)
        core.cancel("0 ")
        for consumer in consumers:
            consumer.end()
        core.shutdown(0.0)
    channel = RecordingChannel.latest
    # A round queued behind the last end is never harvested.
    channel.plans = channel.plans[: len(channel.results)]
    return channel


def replay(channel, plans) -> list:
    results = []
    for plan in plans:
        channel.submit(plan)
        results.append(channel.receive(ROUND_LIMIT_S))
    return [(result.round_id, result.lanes) for result in results]


def expected_of(recorded: RecordingChannel) -> list:
    return [(result.round_id, result.lanes) for result in recorded.results]


def test_recorded_run_covers_prefill_and_accepted_drafts(recorded):
    assert len(recorded.results) > 20
    assert any(len(plan.prefill) for plan in recorded.plans)
    assert any(lane.accepted > 0 for result in recorded.results for lane in result.lanes)


@pytest.mark.parametrize("world_size", [1, 2])
def test_replay_on_threads_gives_equal_records(recorded, checkpoint, world_size):
    threads = prepare_threads(scripted_config(checkpoint, tensor_parallel_size=world_size))
    try:
        channel = ThreadChannel(threads, ROUND_LIMIT_S)
        assert replay(channel, recorded.plans) == expected_of(recorded)
    finally:
        threads.stop()


def test_replay_on_two_processes_gives_equal_records(recorded, checkpoint, free_port):
    config = scripted_config(checkpoint, tensor_parallel_size=2)
    listener, port = RankListener(2), free_port()
    processes = [start_scripted_rank(config, listener.address, rank, port) for rank in range(2)]
    channel = SocketChannel(listener.accept(timeout_s=ROUND_LIMIT_S), ROUND_LIMIT_S)
    try:
        assert replay(channel, recorded.plans) == expected_of(recorded)
    finally:
        channel.close()
        for process in processes:
            process.wait(10)


def test_replay_notices_one_changed_seed(recorded, checkpoint):
    """Negative control."""
    changed = [
        msgspec.structs.replace(
            plan, inits=tuple(msgspec.structs.replace(i, seed=i.seed + 1) for i in plan.inits)
        )
        for plan in recorded.plans
    ]
    threads = prepare_threads(scripted_config(checkpoint))
    try:
        channel = ThreadChannel(threads, ROUND_LIMIT_S)
        equal = 0
        for plan, expected in zip(changed, expected_of(recorded), strict=True):
            # Plan by plan: after the first other token the rest assumes positions that are wrong.
            if replay(channel, [plan]) != [expected]:
                break
            equal += 1
        assert equal < len(changed)
    finally:
        threads.stop()
