"""Offline generation over an engine that plays scripts: throttling, order, errors, cancellation."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from flare_ray.cli.runner import Job, Room, Runner
from flare_ray.config import EngineConfig
from flare_ray.contracts.messages import Admitted, Delta, Failed, Finished, StreamItem
from flare_ray.contracts.request import GenerationRequest, SamplingParams
from flare_ray.errors import FlareError, InvalidRequest, Overloaded, RankFailure
from tests.support.fake_channel import make_manifest

WAIT_S = 5.0
TOKEN_BYTES = [bytes([token]) for token in range(256)]


class ScriptedEngine:
    """Each request echoes its prompt token by token, on one thread, `ticks` after another.

    A request whose first prompt token is in `failures` gets that item instead of its second token;
    one in `refusals` makes `submit` raise the listed error, once per entry. `hold` stops all output
    until it is released. Attributes: `most` requests were ever in flight.
    """

    def __init__(self, *, slots: int = 2) -> None:
        self.manifest = make_manifest(slots=slots, context_tokens=64)
        self.failures: dict[int, Failed] = {}
        self.refusals: dict[int, list[FlareError]] = {}
        self.hold = threading.Event()
        self.hold.set()
        self.submitted: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.most = 0
        self._slots = slots
        self._live: dict[str, tuple[GenerationRequest, Callable, list[int]]] = {}
        self._lock = threading.Condition()
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, on_item: Callable[[StreamItem], None]) -> None:
        first = request.prompt_tokens[0]
        with self._lock:
            self.submitted.append(request)
            if self.refusals.get(first):
                raise self.refusals[first].pop(0)
            self._live[request.request_id] = (request, on_item, [])
            self.most = max(self.most, len(self._live))
            self._lock.notify()
        on_item(Admitted(request.request_id))

    def cancel(self, request_id: str) -> None:
        with self._lock:
            self.cancelled.append(request_id)
            entry = self._live.pop(request_id, None)
        if entry is not None:
            entry[1](Failed(request_id, "cancelled", "cancelled"))

    def shutdown(self, drain_s: float = 0.0) -> None:
        with self._lock:
            self._running = False
            self._lock.notify()
        self.hold.set()
        self._thread.join(WAIT_S)

    @property
    def live(self) -> int:
        return len(self._live)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._live or not self._running)
                if not self._running:
                    return
            self.hold.wait()
            for request_id in list(self._live)[: self._slots]:
                with self._lock:
                    entry = self._live.get(request_id)
                if entry is not None:
                    self._advance(*entry)

    def _advance(self, request: GenerationRequest, on_item: Callable, done: list[int]) -> None:
        failure = self.failures.get(request.prompt_tokens[0])
        limit = min(request.max_tokens, len(request.prompt_tokens))
        if failure is not None and done:
            end: StreamItem = Failed(
                request.request_id, failure.code, failure.message, status=failure.status
            )
        elif len(done) < limit:
            done.append(request.prompt_tokens[len(done)])
            on_item(Delta(request.request_id, (done[-1],)))
            return
        else:
            end = Finished(
                request.request_id,
                "length",
                prompt_tokens=len(request.prompt_tokens),
                completion_tokens=len(done),
                drafts_offered=4,
                drafts_accepted=3,
                rounds=2,
            )
        with self._lock:
            if self._live.pop(request.request_id, None) is None:
                return
        on_item(end)


@pytest.fixture
def engine():
    engine = ScriptedEngine()
    yield engine
    engine.shutdown()


def make_runner(engine: ScriptedEngine, **settings) -> Runner:
    config = EngineConfig(checkpoint="none", concurrency=2, context_tokens=64, **settings)
    return Runner(engine, TOKEN_BYTES, config=config)


def jobs_of(runner: Runner, prompts: Sequence[str], **params) -> list[Job]:
    sampling = SamplingParams(**params)
    return [runner.job(prompt, list(prompt.encode()), sampling) for prompt in prompts]


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list]:
    """Run `work` on a thread; its result or exception is appended to the list."""
    result: list = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # handed to the test, which asserts on it
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def test_outputs_come_in_the_order_of_prompts_whatever_ends_first(engine):
    runner = make_runner(engine)
    prompts = ["a long one", "b", "cc", "ddd", "e"]
    outputs = runner.run(jobs_of(runner, prompts))
    assert [output.text for output in outputs] == prompts
    assert [output.prompt for output in outputs] == prompts


def test_output_carries_tokens_reason_usage_and_speculation(engine):
    runner = make_runner(engine)
    [output] = runner.run(jobs_of(runner, ["abc"], max_tokens=2))
    assert output.token_ids == (97, 98) and output.prompt_token_ids == (97, 98, 99)
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert (output.usage.completion_tokens, output.usage.total_tokens) == (2, 5)
    assert output.speculation.acceptance_ratio == 0.75 and output.speculation.rounds == 2


def test_character_spread_over_tokens_is_one_character(engine):
    runner = make_runner(engine)
    parts = list(runner.stream(*jobs_of(runner, ["€!"])))
    assert "".join(part.text for part in parts) == "€!" == parts[-1].finished.text
    assert "\ufffd" not in parts[0].text


def test_stop_inside_a_token_trims_its_bytes():
    runner = make_runner(engine := ScriptedEngine())
    engine.shutdown()
    items = [
        Delta("offline-0", (1,), trim_bytes=4),
        Finished("offline-0", "stop", 1, 1, stop_reason=";bar"),
    ]
    engine.submit = lambda request, on_item: [on_item(item) for item in items]
    runner.token_bytes = [b"", b"foo;bar"]
    [output] = runner.run([runner.job(None, [1], SamplingParams())])
    assert (output.text, output.stop_reason, output.prompt) == ("foo", ";bar", None)


def test_requests_in_flight_are_bounded_by_slots_and_queue(engine):
    runner = make_runner(engine, admission={"max_waiting": 1})
    runner.run(jobs_of(runner, ["abcd"] * 12))
    assert engine.most == 3


def test_overloaded_request_is_offered_again_and_loses_nothing(engine):
    busy = Overloaded("queue is full", retry_after_s=9.0)
    engine.refusals = {ord("b"): [busy, busy]}
    runner = make_runner(engine)
    prompts = ["abc", "bcd", "cde"]
    assert [o.text for o in runner.run(jobs_of(runner, prompts))] == prompts


def test_overload_told_by_an_item_is_offered_again(engine):
    runner = make_runner(engine)
    submit = engine.submit
    told = itertools.count()

    def busy_once(request, on_item):
        if next(told) == 0:
            on_item(Failed(request.request_id, "overloaded", "full", 429, retry_after_s=9.0))
        else:
            submit(request, on_item)

    engine.submit = busy_once
    assert [o.text for o in runner.run(jobs_of(runner, ["abc", "de"]))] == ["abc", "de"]


def test_engine_that_goes_away_is_an_error_not_a_wait(engine):
    engine.refusals = {ord("a"): [Overloaded("shutting down", retry_after_s=1.0, status=503)]}
    runner = make_runner(engine)
    with pytest.raises(Overloaded, match="shutting down"):
        runner.run(jobs_of(runner, ["abc"]))


def test_failed_request_raises_and_cancels_the_rest_of_its_call(engine):
    engine.failures = {ord("b"): Failed("", "rank_failure", "rank 1 died", status=503)}
    runner = make_runner(engine)
    jobs = jobs_of(runner, ["a" * 60, "bb", "c" * 60])
    with pytest.raises(RankFailure, match="rank 1 died"):
        runner.run(jobs)
    assert engine.live == 0 and jobs[0].request.request_id in engine.cancelled
    assert [o.text for o in runner.run(jobs_of(runner, ["xy"]))] == ["xy"]


def test_places_are_all_free_after_failures_and_cancellations(engine):
    engine.failures = {ord("b"): Failed("", "nonfinite_logits", "no finite logit")}
    runner = make_runner(engine, admission={"max_waiting": 0})
    for _ in range(5):
        with pytest.raises(FlareError, match="no finite logit"):
            runner.run(jobs_of(runner, ["a" * 60, "bb", "cc"]))
        stream = runner.stream(*jobs_of(runner, ["abc"]))
        next(stream)
        stream.close()
    wait_until(lambda: engine.live == 0)
    assert [runner.room.take(wait=False) for _ in range(3)] == [True, True, False]


def test_interrupt_cancels_what_is_in_flight(engine, monkeypatch):
    runner = make_runner(engine)
    engine.hold.clear()

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("flare_ray.cli.runner._Call._next_item", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.run(jobs_of(runner, ["abc", "def"]))
    assert len(engine.cancelled) == 2 and engine.live == 0


def test_stream_submits_nothing_before_it_is_read(engine):
    runner = make_runner(engine)
    stream = runner.stream(*jobs_of(runner, ["abc"]))
    assert engine.submitted == []
    assert next(stream).text == "a"


def test_closed_stream_cancels_its_request(engine):
    runner = make_runner(engine)
    stream = runner.stream(*jobs_of(runner, ["a" * 60]))
    next(stream)
    engine.hold.clear()
    stream.close()
    assert engine.cancelled == [engine.submitted[0].request_id]


def test_one_thread_reads_more_streams_in_turn_than_there_are_places(engine):
    runner = make_runner(engine, admission={"max_waiting": 0})
    streams = [runner.stream(job) for job in jobs_of(runner, ["abcd"] * 8)]
    thread, result = in_thread(lambda: [next(stream).text for stream in streams])
    thread.join(WAIT_S)
    assert result == [["a"] * 8]


def test_small_call_does_not_wait_for_a_large_one(engine):
    runner = make_runner(engine, admission={"max_waiting": 0})
    large, _ = in_thread(lambda: runner.run(jobs_of(runner, ["a" * 40] * 400)))
    wait_until(lambda: len(engine.submitted) > 4)
    small, result = in_thread(lambda: runner.run(jobs_of(runner, ["xyz"])))
    small.join(WAIT_S)
    assert result and result[0][0].text == "xyz"
    assert large.is_alive()
    engine.shutdown()


def test_calls_of_several_threads_keep_their_own_outputs(engine):
    runner = make_runner(engine)
    started = [
        (prompts, in_thread(lambda prompts=prompts: runner.run(jobs_of(runner, prompts))))
        for prompts in ([f"{letter}{n}" for n in range(6)] for letter in "pqrs")
    ]
    for prompts, (thread, result) in started:
        thread.join(WAIT_S)
        assert [output.text for output in result[0]] == prompts


def test_no_prompts_are_no_outputs(engine):
    assert make_runner(engine).run([]) == []


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], {}, "empty"),
        ([1] * 64, {}, "64 tokens and the context is 64"),
        ([1, 300], {}, r"0\.\.255, got 300"),
        ([-1], {}, "got -1"),
        ([1], {"temperature": -0.5}, "temperature"),
        ([1], {"max_tokens": 64}, "at most 63"),
    ],
)
def test_wrong_prompt_or_parameter_is_refused_before_anything_runs(engine, tokens, params, message):
    with pytest.raises(InvalidRequest, match=message):
        make_runner(engine).job(None, tokens, SamplingParams(**params))
    assert engine.submitted == []


def test_prompt_limit_of_the_settings_is_named_with_both_numbers(engine):
    runner = make_runner(engine, admission={"max_prompt_tokens": 3})
    with pytest.raises(InvalidRequest, match=r"4 tokens, admission\.max_prompt_tokens is 3"):
        runner.job(None, [1, 2, 3, 4], SamplingParams())


def test_interrupted_wait_for_a_place_lets_the_next_in_line_through(monkeypatch):
    room = Room(1)
    assert room.take(wait=False)

    def interrupted(_condition):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(room._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            room.take(wait=True)
    room.give()
    assert room.take(wait=False)
