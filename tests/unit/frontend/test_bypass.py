"""Deltas that go past a reader who waits: in order, byte for byte as through it. What goes wrong on
the way is raised where it is read."""

import asyncio
import gc
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from flare_ray.contracts.messages import Admitted, Delta, Failed, Finished, Heartbeat
from flare_ray.frontend.sse import Outlet
from flare_ray.frontend.stream import StreamTable
from tests.support.fake_engine_client import byte_tokens
from tests.unit.frontend.conftest import chat_body
from tests.unit.frontend.test_disconnect import Connection, bodies
from tests.unit.frontend.test_plain_frames import deltas
from tests.unit.frontend.test_remote_client import REQUEST, run, shape, short_waits

fast = short_waits
"""The remote client's own waits, shortened."""
LIMIT_S = 5.0


class Reader:
    """An inbox with a reader that keeps what it is given."""

    def __init__(self, bypass: Callable[[Delta], bool] | None) -> None:
        self.table = StreamTable()
        self.inbox = self.table.register("r")
        self.inbox.bypass = bypass
        self.read = []
        self.task = asyncio.create_task(self._run())

    async def _run(self):
        while True:
            self.read.append(await self.inbox.take())

    async def put(self, *items):
        self.table.deliver(items)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def delta(token):
    return Delta("r", (token,))


def reading(bypass, scenario):
    async def main():
        reader = Reader(bypass)
        await asyncio.sleep(0)
        try:
            await scenario(reader)
        finally:
            reader.task.cancel()
            await asyncio.gather(reader.task, return_exceptions=True)
        return reader

    return asyncio.run(main())


def test_deltas_go_past_a_reader_that_waits_and_everything_else_reaches_it():
    passed = []

    async def scenario(reader):
        await reader.put(Admitted("r"), Heartbeat(1))
        await reader.put(delta(1))
        await reader.put(delta(2))
        await reader.put(Finished("r", "stop", 1, 2))

    reader = reading(lambda item: passed.append(item) or True, scenario)
    assert passed == [delta(1), delta(2)]
    assert reader.read == [[Admitted("r")], [Finished("r", "stop", 1, 2)]]
    assert reader.inbox.bypassed


def test_no_delta_overtakes_what_the_reader_has_not_read():
    passed = []

    async def scenario(reader):
        await reader.put(Admitted("r"), delta(1), delta(2))
        await reader.put(delta(3))

    reader = reading(lambda item: passed.append(item) or True, scenario)
    assert reader.read == [[Admitted("r"), Delta("r", (1, 2))]]
    assert passed == [delta(3)]


def test_what_is_not_taken_reaches_the_reader():
    async def scenario(reader):
        await reader.put(delta(1))
        await reader.put(delta(2))

    reader = reading(lambda item: False, scenario)
    assert reader.read == [[delta(1)], [delta(2)]]
    assert not reader.inbox.bypassed


def test_a_fault_on_the_short_way_is_the_readers_and_nobody_elses():
    def broken(item):
        raise ZeroDivisionError

    async def scenario(reader):
        other = reader.table.register("other")
        reader.table.deliver((delta(1), Delta("other", (7,))))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(reader.task, LIMIT_S)
        assert await other.take() == [Delta("other", (7,))]

    reading(broken, scenario)


class Server:
    """A server's `send`, which waits while it is full."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.free.set()
        self.sent = []
        self.abandoned = 0

    async def send(self, message):
        try:
            await self.free.wait() if not self.free.is_set() else None
        except (asyncio.CancelledError, GeneratorExit):
            self.abandoned += 1
            raise
        if self.sent is None:
            raise OSError("the connection broke")
        self.sent.append(message["body"])


def pumping(scenario):
    """Run `scenario(outlet, server, put)` beside a pump; `put` hands it a piece."""

    async def main():
        queue, server = asyncio.Queue(), Server()

        async def frames():
            while (piece := await queue.get()) is not None:
                yield piece

        outlet = Outlet(frames())
        pump = asyncio.create_task(outlet.pump(server.send))
        await asyncio.sleep(0)
        await scenario(outlet, server, queue.put_nowait)
        queue.put_nowait(None)
        try:
            await asyncio.wait_for(pump, LIMIT_S)
        finally:
            await outlet.close()
        return server

    return asyncio.run(main())


def test_a_piece_is_with_the_server_when_write_returns():
    async def scenario(outlet, server, put):
        assert outlet.ready
        outlet.write(b"a")
        assert server.sent == [b"a"]
        put(b"b")
        await asyncio.sleep(0.001)
        outlet.write(b"c")

    assert pumping(scenario).sent == [b"a", b"b", b"c", b""]


def test_a_server_that_waits_holds_up_whoever_comes_next():
    async def scenario(outlet, server, put):
        server.free.clear()
        outlet.write(b"a")
        assert not outlet.ready
        put(b"b")
        await asyncio.sleep(0.001)
        assert server.sent == []
        server.free.set()
        put(b"c")
        await asyncio.sleep(0.001)
        assert outlet.ready

    assert pumping(scenario).sent == [b"a", b"b", b"c", b""]


def test_a_write_that_fails_while_it_waits_ends_the_response():
    async def scenario(outlet, server, put):
        server.free.clear()
        outlet.write(b"a")
        server.sent = None
        server.free.set()

    with pytest.raises(OSError, match="broke"):
        pumping(scenario)


def test_a_write_that_fails_at_once_is_raised_to_its_caller():
    async def scenario(outlet, server, put):
        server.sent = None
        with pytest.raises(OSError, match="broke"):
            outlet.write(b"a")
        server.sent = []

    pumping(scenario)


def test_what_a_client_has_not_taken_is_given_up_with_it():
    async def scenario():
        server = Server()

        async def frames():
            await asyncio.sleep(3600)
            yield b""

        outlet = Outlet(frames())
        pump = asyncio.create_task(outlet.pump(server.send))
        await asyncio.sleep(0)
        server.free.clear()
        outlet.write(b"a")
        await asyncio.sleep(0)
        pump.cancel()
        await asyncio.wait({pump})
        await asyncio.wait_for(outlet.close(), LIMIT_S)
        await asyncio.wait_for(outlet.close(), LIMIT_S)
        return server

    server = asyncio.run(scenario())
    assert server.sent == []
    assert server.abandoned == 1


@pytest.mark.parametrize("past_the_reader", [True, False])
def test_output_that_went_past_the_reader_counts_as_shown(past_the_reader):
    passed = []

    def bypass(delta):
        passed.append(delta.tokens)
        return past_the_reader

    def behave(call, number):
        call.admit()
        if number:
            call.delta(7)
            call.finish()

    async def scenario(cluster):
        stream = await cluster.client.open(REQUEST)
        stream.divert(bypass)
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0.01)
        (call,) = cluster.calls
        call.delta(1)
        await asyncio.sleep(0.01)
        call.fail(on_stream=True)
        return await reading

    async def read(stream):
        try:
            return [event async for event in stream]
        finally:
            await stream.aclose()

    events, cluster = run(behave, scenario)
    assert passed == [(1,)]
    assert shape(events) == [*([] if past_the_reader else [(1,)]), "Failed"]
    assert len(cluster.calls) == 1


def test_the_next_attempt_goes_past_the_reader_too():
    passed = []

    def behave(call, number):
        call.admit()
        if number == 0:
            call.fail(on_stream=True)

    async def scenario(cluster):
        stream = await cluster.client.open(REQUEST)
        stream.divert(lambda delta: passed.append(delta.tokens) or True)
        reading = asyncio.create_task(anext(aiter(stream)))
        while len(cluster.calls) < 2:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        cluster.calls[1].delta(7)
        cluster.calls[1].finish()
        end = await reading
        await stream.aclose()
        return end

    end, _ = run(behave, scenario)
    assert isinstance(end, Finished)
    assert passed == [(7,)]


@pytest.mark.slow
def test_a_stream_that_was_left_leaves_nothing_to_the_collector(make_api):
    """What lies in circles is only freed by the oldest generation, which many requests share."""
    settings = make_api().settings

    def behave(call, _):
        call.admit()
        call.delta(*byte_tokens("</think>a"))

    async def scenario(cluster):
        api = SimpleNamespace(client=cluster.client, settings=settings)
        connection = Connection(api, chat_body(stream=True))
        await connection.wait_for(lambda sent: b'"a"' in bodies(sent))
        (call,) = cluster.calls
        call.delta(*byte_tokens("b"))
        await connection.wait_for(lambda sent: b'"b"' in bodies(sent))
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await connection.leave()
            gc.collect()
            ours = {type(o) for o in gc.garbage if type(o).__module__.startswith("flare_ray.")}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        return ours, connection  # which holds what it was given

    (ours, _), _ = run(behave, scenario)
    assert ours == set(), ours


def paced(text, size, ended):
    """A script that waits before every delta, as an engine does."""

    def script(request):
        sources = request.token_sources
        for item in deltas(text, [size], sourced=sources):
            yield 0.0
            yield Delta(request.request_id, item.tokens, sources=item.sources)
        yield ended(request)

    return script


def stopped(request):
    return Finished(request.request_id, "stop", 1, 9)


def died(request):
    return Failed(request.request_id, "rank_failure", "rank 0 died", status=503)


TEXT = 'why "so"</think>né €\u2028<tool_call>look<arg_key>word</arg_key><arg_value>a</arg_value>'


@pytest.mark.parametrize("ended", [stopped, died], ids=["ends", "dies"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"return_token_sources": True}),
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/responses", {"input": "abc"}),
    ],
    ids=["chat", "sources", "usage", "completion", "response"],
)
def test_streams_past_a_waiting_reader_have_the_same_bytes(
    make_api, monkeypatch, path, fields, ended
):
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)
    body = {"model": "tiny", "stream": True, **fields}
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": "hi"}]
    found = []
    for bypassed in (True, False):
        api = make_api(paced(TEXT, 2, ended))
        if not bypassed:
            api.client.offers_bypass = False
        found.append(api.post(path, body, headers={"x-request-id": "same"}).content)
        assert bool(api.client.bypassed) == bypassed
    assert found[0] == found[1]
    assert found[0].count(b"data: ") > 10


def test_several_choices_of_one_stream_all_go_through_the_reader(make_api):
    api = make_api(paced("abcdef", 1, stopped))
    chunks = api.chunks(n=2)
    assert api.client.bypassed == 0
    texts_ = ["", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts_[choice["index"]] += choice["delta"].get("reasoning_content", "")
    assert texts_ == ["abcdef"] * 2


def test_messages_of_the_other_api_go_through_the_reader_which_sends_pings(make_api):
    api = make_api(paced("so</think>yes", 1, stopped))
    body = {
        "model": "tiny",
        "max_tokens": 9,
        "stream": True,
        "messages": [{"role": "user", "content": "hi"}],
    }
    assert b"message_stop" in api.post("/v1/messages", body).content
    assert api.client.bypassed == 0
