"""The client of remote engines: admission, retry, cancellation, over a scripted call."""

import asyncio
from collections.abc import Callable

import pytest

from flare_ray.contracts.messages import Admitted, Delta, Failed, Finished
from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from flare_ray.errors import InvalidRequest, Overloaded, RankFailure
from flare_ray.frontend import remote
from flare_ray.frontend.remote import RemoteClient
from flare_ray.frontend.stream import StreamTable
from tests.support.fake_engine_client import INFO

TEST_LIMIT_S = 10.0
SAMPLING = SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
REQUEST = GenerationRequest(request_id="r", prompt_tokens=(1, 2), sampling=SAMPLING, max_tokens=8)
DEAD = "rank_failure"


class Call:
    """One call; the test ends it with `end`."""

    def __init__(self, cluster: "Cluster", request: GenerationRequest) -> None:
        self.cluster = cluster
        self.request = request
        self.cancelled = False
        self.future: asyncio.Future = asyncio.get_running_loop().create_future()

    async def result(self):
        return await self.future

    def cancel(self) -> None:
        self.cancelled = True

    def end(self, item) -> None:
        if not self.future.done():
            self.future.set_result(item)

    def stream(self, *items) -> None:
        """Items arrive on the output stream, if the receiver still expects them."""
        if self.request.request_id in self.cluster.expected:
            self.cluster.table.deliver(items)

    def admit(self) -> None:
        self.stream(Admitted(self.request.request_id))

    def delta(self, *tokens: int) -> None:
        self.stream(Delta(self.request.request_id, tokens))

    def finish(self) -> None:
        item = Finished(self.request.request_id, "stop", 2, 3)
        self.stream(item)
        self.end(item)

    def fail(self, code: str = DEAD, *, on_stream: bool, status: int = 503) -> None:
        item = Failed(self.request.request_id, code, f"{code} happened", status=status)
        if on_stream:
            self.stream(item)
        self.end(item)


class Cluster:
    """Engines as the client sees them; `behave` is told of each call and its number."""

    address = "tcp://here:1"

    def __init__(self, behave: Callable[[Call, int], None]) -> None:
        self.table = StreamTable()
        self.expected: set[str] = set()
        self.calls: list[Call] = []
        self.ready = True
        self.behave = behave
        self.client = RemoteClient(
            submit=self.submit,
            outputs=self,
            table=self.table,
            find=self.find,
            metrics=self.metrics,
        )

    def expect(self, request_id: str) -> None:
        assert request_id not in self.expected
        self.expected.add(request_id)

    def forget(self, request_id: str) -> None:
        self.expected.discard(request_id)

    def submit(self, request: GenerationRequest) -> Call:
        call = Call(self, request)
        self.calls.append(call)
        asyncio.get_running_loop().call_soon(self.behave, call, len(self.calls) - 1)
        return call

    async def find(self):
        return INFO if self.ready else None

    async def metrics(self) -> str:
        return ""

    @property
    def quiet(self) -> bool:
        """Nothing is left of any request."""
        client = self.client
        return not (self.expected or len(self.table) or client.calls or client.streams)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(remote, "RETRY_PAUSE_S", 0.005)
    monkeypatch.setattr(remote, "INFO_AGE_S", 0.0)
    monkeypatch.setattr(remote, "OPEN_LIMIT_S", 2.0)
    monkeypatch.setattr(remote, "CALL_GRACE_S", 0.02)
    monkeypatch.setattr(remote, "LATE_LIMIT_S", 0.05)


def run(behave, scenario):
    """Run `scenario(cluster)` over engines that `behave`, and see that nothing is left."""

    async def main():
        cluster = Cluster(behave)
        result = await asyncio.wait_for(scenario(cluster), TEST_LIMIT_S)
        await asyncio.sleep(0.03)
        assert cluster.quiet, (cluster.expected, cluster.client.calls)
        return result, cluster

    return asyncio.run(main())


async def collect(cluster):
    stream = await cluster.client.open(REQUEST)
    try:
        return [event async for event in stream]
    finally:
        await stream.aclose()


def shape(events):
    return [e.tokens if isinstance(e, Delta) else type(e).__name__ for e in events]


def test_request_carries_the_replicas_address_and_streams_to_its_end():
    def behave(call, _):
        call.admit()
        call.delta(1)
        call.delta(2)
        call.finish()

    events, cluster = run(behave, collect)
    assert shape(events) == [(1, 2), "Finished"]
    assert cluster.calls[0].request.reply_to == "tcp://here:1"
    assert not cluster.calls[0].cancelled


def test_draining_client_refuses_new_requests_and_finishes_open_ones():
    def behave(call, _):
        call.admit()
        call.delta(1)

    async def scenario(cluster):
        stream = await cluster.client.open(REQUEST)
        cluster.client.draining = True
        with pytest.raises(Overloaded, match="shutting down") as refusal:
            await cluster.client.info()
        assert refusal.value.status == 503 and refusal.value.retry_after_s > 0
        assert len(cluster.client.streams) == 1
        cluster.calls[0].finish()
        events = [event async for event in stream]
        await stream.aclose()
        return events

    events, cluster = run(behave, scenario)
    assert shape(events) == [(1,), "Finished"]
    cluster.client.draining = False
    assert asyncio.run(cluster.client.info()) == INFO


def test_request_still_open_when_the_service_stops_ends_with_an_error_in_its_stream():
    def behave(call, _):
        call.admit()
        call.delta(1)

    async def scenario(cluster):
        stream = await cluster.client.open(REQUEST)
        cluster.client.draining = True
        cluster.client.end_all()
        cluster.client.end_all()
        events = [event async for event in stream]
        await stream.aclose()
        assert cluster.calls[0].cancelled
        return events

    events, _ = run(behave, scenario)
    assert shape(events) == [(1,), "Failed"]
    assert events[-1].status == 503 and "shutting down" in events[-1].message


def test_request_that_waits_for_an_engine_when_the_service_stops_is_refused():
    async def scenario(cluster):
        opening = asyncio.create_task(cluster.client.open(REQUEST))
        await asyncio.sleep(0.02)
        cluster.client.end_all()
        with pytest.raises(Overloaded, match="shutting down") as refusal:
            await opening
        assert refusal.value.status == 503
        await asyncio.sleep(0.01)

    run(lambda call, _: None, scenario)


def test_request_that_lost_its_engine_is_run_again_while_the_client_drains():
    def behave(call, number):
        if number == 0:
            call.admit()
            call.end(Failed("r", "rank_failure", "gone", status=503))
        else:
            call.admit()
            call.finish()

    async def scenario(cluster):
        stream = await cluster.client.open(REQUEST)
        cluster.client.draining = True
        try:
            return [event async for event in stream]
        finally:
            await stream.aclose()

    events, cluster = run(behave, scenario)
    assert shape(events) == ["Finished"] and len(cluster.calls) == 2


def test_finish_on_the_call_does_not_cut_off_what_is_still_on_the_stream():
    def behave(call, _):
        call.admit()
        call.end(Finished("r", "stop", 2, 3))
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, call.delta, 1)
        loop.call_later(0.06, call.finish)

    events, _ = run(behave, collect)
    assert shape(events) == [(1,), "Finished"]


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("invalid_request_error", 400, InvalidRequest),
        ("duplicate_request_id", 409, InvalidRequest),
        ("overloaded", 429, Overloaded),
        ("overloaded", 503, Overloaded),
    ],
)
@pytest.mark.parametrize("on_stream", [False, True])
def test_refusal_is_raised_at_once_and_not_retried(code, status, error, on_stream):
    async def scenario(cluster):
        with pytest.raises(error):
            await cluster.client.open(REQUEST)

    def behave(call, _):
        call.fail(code, on_stream=on_stream, status=status)

    _, cluster = run(behave, scenario)
    assert len(cluster.calls) == 1


@pytest.mark.parametrize("on_stream", [False, True])
@pytest.mark.parametrize("admitted", [False, True])
def test_engine_that_dies_before_output_is_replaced_once_and_the_client_sees_nothing(
    admitted, on_stream
):
    def behave(call, number):
        if admitted or number:
            call.admit()
        if number == 0:
            call.fail(on_stream=on_stream)
            return
        call.delta(7)
        call.finish()

    events, cluster = run(behave, collect)
    assert shape(events) == [(7,), "Finished"]
    assert [call.request.request_id for call in cluster.calls] == ["r", "r~1"]


def test_late_output_of_the_dead_engine_is_not_taken_for_the_new_ones():
    def behave(call, number):
        call.admit()
        if number == 0:
            call.fail(on_stream=False)
            return
        call.cluster.table.deliver((Delta("r", (666,)),))
        call.delta(7)
        call.finish()

    events, _ = run(behave, collect)
    assert shape(events) == [(7,), "Finished"]


def test_engine_that_dies_after_output_ends_the_stream_with_the_failure():
    def behave(call, _):
        call.admit()
        call.delta(7)
        call.fail(on_stream=False)

    events, cluster = run(behave, collect)
    assert shape(events) == [(7,), "Failed"]
    assert len(cluster.calls) == 1


def test_second_death_after_admission_is_final():
    def behave(call, _):
        call.admit()
        call.fail(on_stream=True)

    events, cluster = run(behave, collect)
    assert shape(events) == ["Failed"]
    assert len(cluster.calls) == 2


def test_other_failures_are_not_retried():
    def behave(call, _):
        call.admit()
        call.fail("nonfinite_logits", on_stream=True, status=500)

    events, cluster = run(behave, collect)
    assert events[0].code == "nonfinite_logits"
    assert len(cluster.calls) == 1


def test_dead_engine_that_still_answers_is_asked_again_until_another_is_there():
    """Serve routes to a dead engine until its health checks have failed three times."""

    def behave(call, number):
        if number < 5:
            call.fail(on_stream=False)
            return
        call.admit()
        call.delta(7)
        call.finish()

    events, cluster = run(behave, collect)
    assert shape(events) == [(7,), "Finished"]
    assert len(cluster.calls) == 6


def test_restarting_engine_that_refuses_with_503_is_waited_out_after_a_death():
    def behave(call, number):
        if number == 0:
            call.fail(on_stream=False)
        elif number == 1:
            call.fail("overloaded", on_stream=False, status=503)
        else:
            call.admit()
            call.finish()

    events, _ = run(behave, collect)
    assert shape(events) == ["Finished"]


def test_waiting_for_an_engine_ends_with_an_error():
    async def scenario(cluster):
        with pytest.raises(RankFailure, match="happened"):
            await cluster.client.open(REQUEST)

    run(lambda call, _: call.fail(on_stream=False), scenario)


def test_receiver_that_loses_patience_does_not_end_a_call_that_waits_for_an_engine():
    """While an engine is rebuilt, the router holds the call longer than the receiver waits."""

    async def rebuild(call):
        for _ in range(2):
            while "r" not in call.cluster.expected:
                await asyncio.sleep(0.001)
            call.cluster.forget("r")
            call.cluster.table.deliver((Failed("r", DEAD, "nobody acknowledged", status=503),))
        while "r" not in call.cluster.expected:
            await asyncio.sleep(0.001)
        call.admit()
        call.finish()

    def behave(call, _):
        call.rebuilding = asyncio.create_task(rebuild(call))

    events, cluster = run(behave, collect)
    assert shape(events) == ["Finished"]
    assert len(cluster.calls) == 1


def test_call_that_nobody_ever_takes_is_given_up_and_cancelled():
    def behave(call, _):
        def lose_patience():
            if "r" in call.cluster.expected:
                call.cluster.forget("r")
                call.cluster.table.deliver((Failed("r", DEAD, "nobody acknowledged", status=503),))
            asyncio.get_running_loop().call_later(0.05, lose_patience)

        lose_patience()

    async def scenario(cluster):
        with pytest.raises(RankFailure, match="nobody acknowledged"):
            await cluster.client.open(REQUEST)

    _, cluster = run(behave, scenario)
    assert cluster.calls[0].cancelled


def test_closing_a_running_stream_cancels_its_call():
    def behave(call, _):
        call.admit()
        call.delta(1)

    async def scenario(cluster):
        stream = await cluster.client.open(REQUEST)
        async for _ in stream:
            break
        await stream.aclose()
        await stream.aclose()

    _, cluster = run(behave, scenario)
    assert cluster.calls[0].cancelled


def test_cancelling_open_cancels_its_call():
    async def scenario(cluster):
        task = asyncio.create_task(cluster.client.open(REQUEST))
        while not cluster.calls:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    _, cluster = run(lambda call, _: None, scenario)
    assert cluster.calls[0].cancelled


def test_second_live_request_with_the_same_id_is_refused_and_leaves_the_first_alone():
    def behave(call, _):
        call.admit()

    async def scenario(cluster):
        first = await cluster.client.open(REQUEST)
        with pytest.raises(InvalidRequest) as refusal:
            await cluster.client.open(REQUEST)
        assert refusal.value.status == 409
        cluster.calls[0].finish()
        events = [event async for event in first]
        await first.aclose()
        return shape(events)

    events, _ = run(behave, scenario)
    assert events == ["Finished"]


def test_info_is_503_while_no_engine_is_ready():
    async def scenario(cluster):
        assert await cluster.client.info() == INFO
        cluster.ready = False
        with pytest.raises(Overloaded) as refusal:
            await cluster.client.info()
        assert refusal.value.status == 503

    run(lambda call, _: None, scenario)


def test_request_is_prepared_and_waits_while_an_engine_that_was_ready_reports_late(monkeypatch):
    def behave(call, _):
        call.admit()
        call.finish()

    async def scenario(cluster):
        with pytest.raises(Overloaded):
            cluster.ready = False
            await cluster.client.request_info()
        cluster.ready = True
        assert await cluster.client.request_info() == INFO
        cluster.ready = False
        assert await cluster.client.request_info() == INFO
        events = await collect(cluster)
        monkeypatch.setattr(remote, "OPEN_LIMIT_S", 0.0)
        with pytest.raises(Overloaded) as refusal:
            await cluster.client.request_info()
        assert refusal.value.status == 503
        return shape(events)

    events, _ = run(behave, scenario)
    assert events == ["Finished"]


def test_first_request_waits_a_moment_for_the_first_sight_of_an_engine():
    async def scenario(cluster):
        cluster.ready = False
        asyncio.get_running_loop().call_later(0.01, setattr, cluster, "ready", True)
        return await cluster.client.request_info()

    info, _ = run(lambda call, _: None, scenario)
    assert info == INFO
