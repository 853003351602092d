"""The engine without Ray over a scripted channel: delivery, readiness, health, shutdown."""

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from flare_ray.actors.core import EngineCore, EngineParts
from flare_ray.config import EngineConfig
from flare_ray.contracts.messages import Admitted, Delta, Failed, Finished
from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from flare_ray.errors import ConfigError, InvalidRequest, Overloaded, RankFailure
from tests.support.fake_channel import FakeChannel, hashed_accepts, hashed_script, make_manifest

LIMIT_S = 10.0
MANIFEST = make_manifest(slots=2)
SCRIPT = hashed_script(MANIFEST.vocab_size, first_token=1)
TOKEN_BYTES = [bytes([n]) for n in range(256)]


def make_request(name: str, *, max_tokens: int = 20, reply_to: str = "", **fields):
    sampling = SamplingSpec(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed=1)
    return GenerationRequest(
        request_id=name,
        prompt_tokens=tuple(name.encode()),
        sampling=sampling,
        max_tokens=max_tokens,
        reply_to=reply_to,
        **fields,
    )


class Consumer:
    """Keeps the items of one request."""

    def __init__(self) -> None:
        self.items: list = []
        self._ended: queue.SimpleQueue = queue.SimpleQueue()

    def __call__(self, item) -> None:
        self.items.append(item)
        if isinstance(item, Finished | Failed):
            self._ended.put(item)

    def end(self):
        return self._ended.get(timeout=LIMIT_S)

    @property
    def tokens(self) -> list[int]:
        return [t for item in self.items if isinstance(item, Delta) for t in item.tokens]


class RecordingStream:
    """A `StreamPort` in memory."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, tuple]] = []
        self.on_lost = lambda reply_to: None
        self.closed = 0
        self.unreachable = ""

    def send(self, reply_to, items) -> None:
        if reply_to == self.unreachable:
            self.on_lost(reply_to)
        else:
            self.sent.append((reply_to, items))

    def close(self) -> None:
        self.closed += 1


class Engines:
    """Engines of one test."""

    def __init__(self) -> None:
        self.cores: list[EngineCore] = []
        self.released = threading.Event()

    def make(self, *, stream=None, latency_s: float = 0.0, channel=None, start=True, **config):
        channel = channel or FakeChannel(
            MANIFEST, SCRIPT, hashed_accepts(0.6), latency_s=lambda plan: latency_s
        )
        settings = EngineConfig(
            checkpoint="unused",
            device="cpu",
            dtype="float32",
            concurrency=2,
            context_tokens=1024,
            **config,
        )
        parts = EngineParts(
            manifest=MANIFEST,
            config=settings,
            channel=channel,
            token_bytes=TOKEN_BYTES,
            release_ranks=self.released.set,
            health_timeout_s=0.3,
        )
        core = EngineCore(parts, stream=stream)
        self.cores.append(core)
        if start:
            core.start(limit_s=LIMIT_S)
        return core


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    for core in made.cores:
        core.shutdown(0.0)


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_local_request_gets_all_items_in_order(engines, queue_depth):
    core = engines.make(queue_depth=queue_depth)
    consumer = Consumer()
    core.submit(make_request("abc"), consumer)
    end = consumer.end()
    assert consumer.items[0] == Admitted("abc") and consumer.items[-1] is end
    assert end.reason == "length" and end.completion_tokens == 20
    prompt = tuple(b"abc")
    assert consumer.tokens == [SCRIPT(prompt, index) for index in range(20)]


def test_streamed_request_gets_items_on_its_stream_and_only_its_end_here(engines):
    stream = RecordingStream()
    core = engines.make(stream=stream)
    consumer = Consumer()
    core.submit(make_request("abc", reply_to="tcp://a"), consumer)
    end = consumer.end()
    assert consumer.items == [end]
    sent = [item for address, items in stream.sent for item in items if address == "tcp://a"]
    assert sent[0] == Admitted("abc") and sent[-1] == end


def test_request_with_an_address_is_refused_where_no_stream_exists(engines):
    core = engines.make()
    with pytest.raises(InvalidRequest, match="its own process only"):
        core.submit(make_request("abc", reply_to="tcp://a"), Consumer())


def test_second_live_request_with_one_id_is_refused_and_the_first_goes_on(engines):
    core = engines.make(latency_s=0.01)
    first = Consumer()
    core.submit(make_request("abc"), first)
    with pytest.raises(InvalidRequest) as caught:
        core.submit(make_request("abc"), Consumer())
    assert caught.value.status == 409
    assert isinstance(first.end(), Finished)
    again = Consumer()
    core.submit(make_request("abc"), again)
    assert isinstance(again.end(), Finished)


def test_cancelled_request_ends_and_frees_its_pages(engines):
    core = engines.make(latency_s=0.01)
    consumer = Consumer()
    core.submit(make_request("abc", max_tokens=900), consumer)
    time.sleep(0.1)
    core.cancel("abc")
    end = consumer.end()
    assert isinstance(end, Failed) and end.code == "cancelled"
    wait_until(lambda: core.stats().free_pages == core.stats().total_pages)
    assert not core.stats().pending_work


def test_lost_stream_cancels_its_requests_only(engines):
    stream = RecordingStream()
    core = engines.make(stream=stream, latency_s=0.005)
    lost, kept = Consumer(), Consumer()
    core.submit(make_request("lost", max_tokens=900, reply_to="tcp://gone"), lost)
    core.submit(make_request("kept", max_tokens=30, reply_to="tcp://here"), kept)
    stream.unreachable = "tcp://gone"
    assert lost.end().code == "cancelled"
    assert isinstance(kept.end(), Finished)


def test_failing_consumer_does_not_stop_the_engine(engines):
    core = engines.make()

    def broken(item) -> None:
        raise ValueError("no")

    core.submit(make_request("broken"), broken)
    consumer = Consumer()
    core.submit(make_request("abc"), consumer)
    assert isinstance(consumer.end(), Finished)
    core.health()


def test_engine_is_ready_only_after_a_generation_and_not_after_a_fault(engines):
    channel = FakeChannel(MANIFEST, SCRIPT, hashed_accepts(0.6))
    core = engines.make(channel=channel, start=False)
    assert not core.ready
    core.start()
    assert core.ready and len(channel.plans) >= 2
    channel.kill_rank(1, "killed")
    wait_until(lambda: not core.ready)
    assert "rank 1" in core.fatal


def test_start_fails_with_the_cause_when_the_first_generation_fails(engines):
    channel = FakeChannel(MANIFEST, SCRIPT, hashed_accepts(0.6))
    channel.fail_at(1, rank=1, cause="no such kernel")
    with pytest.raises(RankFailure, match="no such kernel"):
        engines.make(channel=channel)
    assert engines.released.is_set() and channel.closed


def test_start_fails_when_the_first_generation_does_not_end(engines):
    core = engines.make(latency_s=60.0, start=False)
    with pytest.raises(RankFailure, match=r"no answer within 0\.2 s"):
        core.start(limit_s=0.2)


def test_dead_rank_ends_all_requests_within_a_second_naming_rank_and_round(engines):
    channel = FakeChannel(MANIFEST, SCRIPT, hashed_accepts(0.6), latency_s=lambda plan: 0.01)
    core = engines.make(channel=channel)
    consumers = [Consumer() for _ in range(4)]
    for place, consumer in enumerate(consumers):  # two hold slots, two wait
        core.submit(make_request(f"r{place}", max_tokens=900), consumer)
    time.sleep(0.1)
    start = time.monotonic()
    channel.kill_rank(1, "connection closed")
    ends = [consumer.end() for consumer in consumers]
    assert time.monotonic() - start < 1.0
    assert {end.code for end in ends} == {"rank_failure"}
    assert all("rank 1" in end.message and "round" in end.message for end in ends)
    assert engines.released.wait(LIMIT_S)
    with pytest.raises(RankFailure, match="rank 1"):
        core.health()
    with pytest.raises(RankFailure, match="rank 1"):
        core.submit(make_request("late"), Consumer())


def test_h20_health_waits_for_no_round_and_fails_on_pending_work_without_progress_alone(engines):
    slow = threading.Event()
    channel = FakeChannel(
        MANIFEST,
        SCRIPT,
        hashed_accepts(0.6),
        latency_s=lambda plan: 1.5 if slow.is_set() else 0.0,
    )
    core = engines.make(channel=channel)
    time.sleep(0.5)
    core.health()  # idle for longer than the limit
    slow.set()
    core.submit(make_request("abc", max_tokens=900), Consumer())
    time.sleep(0.6)
    start = time.monotonic()
    with pytest.raises(RankFailure, match="no round has finished"):
        core.health()
    assert time.monotonic() - start < 0.1  # never waits for a round


def test_shutdown_with_drain_lets_requests_finish_and_refuses_new_ones(engines):
    stream = RecordingStream()
    core = engines.make(latency_s=0.01, stream=stream)
    consumer = Consumer()
    core.submit(make_request("abc", max_tokens=40), consumer)
    stopper = threading.Thread(target=core.shutdown, args=(LIMIT_S,))
    stopper.start()
    wait_until(lambda: not core.ready)
    with pytest.raises(Overloaded) as caught:
        core.submit(make_request("late"), Consumer())
    assert caught.value.status == 503
    assert isinstance(consumer.end(), Finished)
    stopper.join(LIMIT_S)
    assert engines.released.is_set() and stream.closed == 1


def test_shutdown_without_drain_fails_what_runs(engines):
    core = engines.make(latency_s=0.01)
    consumer = Consumer()
    core.submit(make_request("abc", max_tokens=900), consumer)
    core.shutdown(0.0)
    end = consumer.end()
    assert isinstance(end, Failed) and end.status == 503


def test_drain_that_takes_too_long_is_cut(engines):
    core = engines.make(latency_s=0.02)
    consumer = Consumer()
    core.submit(make_request("abc", max_tokens=900), consumer)
    start = time.monotonic()
    core.shutdown(0.2)
    assert time.monotonic() - start < 2.0
    assert isinstance(consumer.end(), Failed)


def test_metrics_carry_the_engines_id(engines):
    core = engines.make()
    snapshot = core.snapshot()
    assert (snapshot.process, snapshot.identity) == ("engine", core.engine_id)
    assert snapshot.samples


def test_preparation_that_cannot_be_sent_is_refused_at_start(monkeypatch, engines):
    monkeypatch.setattr("flare_ray.actors.wire.MAX_MESSAGE_BYTES", 64)
    with pytest.raises(ConfigError, match="prefill_tokens"):
        engines.make()


def test_single_process_engine_loads_without_ray():
    code = (
        "import sys, flare_ray.actors.inprocess, flare_ray.actors.stream_receiver;"
        "sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def wait_until(condition) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
