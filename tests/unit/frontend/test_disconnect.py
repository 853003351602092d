"""A request nobody reads any more is cancelled (known fault H-18), and first text never waits."""

import asyncio
import json

import pytest

from flare_ray.contracts.messages import Delta, Finished
from flare_ray.frontend.api import build_api
from tests.support.fake_engine_client import answer, byte_tokens
from tests.unit.frontend.conftest import chat_body

PATIENCE_S = 5.0


class Connection:
    """One ASGI request whose client can leave at any moment."""

    def __init__(self, api, body):
        self._app = build_api(api.client, api.settings)
        self._body = json.dumps(body).encode()
        self._left = asyncio.Event()
        self._asked = False
        self.sent = []
        self.arrived = asyncio.Condition()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.task = asyncio.create_task(self._app(scope, self._receive, self._send))

    async def _receive(self):
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        async with self.arrived:
            self.sent.append(message)
            self.arrived.notify_all()

    async def wait_for(self, done):
        async with self.arrived:
            await asyncio.wait_for(self.arrived.wait_for(lambda: done(self.sent)), PATIENCE_S)

    async def leave(self):
        self._left.set()
        await asyncio.wait_for(self.task, PATIENCE_S)


def bodies(sent):
    return b"".join(m["body"] for m in sent if m["type"] == "http.response.body")


def endless(request):
    return [Delta(request.request_id, byte_tokens("</think>a")), 3600.0]


@pytest.mark.parametrize("stream", [False, True])
def test_h18_client_that_leaves_in_the_middle_cancels_its_request(make_api, stream):
    api = make_api(endless)

    async def scenario():
        connection = Connection(api, chat_body(stream=stream))
        if stream:
            await connection.wait_for(lambda sent: b'"a"' in bodies(sent))
        else:
            while not api.client.running:
                await asyncio.sleep(0)
        await connection.leave()

    asyncio.run(scenario())
    assert not api.client.running
    assert api.client.cancelled == [api.client.requests[0].request_id]


def test_client_that_leaves_before_the_stream_begins_cancels_its_request(make_api):
    api = make_api(endless)
    opened = asyncio.Event()
    admit = api.client.open

    async def slow_open(request):
        stream = await admit(request)
        opened.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        return stream

    api.client.open = slow_open

    async def scenario():
        connection = Connection(api, chat_body(stream=True))
        await asyncio.wait_for(opened.wait(), PATIENCE_S)
        await connection.leave()

    asyncio.run(scenario())
    assert not api.client.running


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_handler_cancels_its_request(make_api, stream):
    """Serve's default proxy cancels the handler instead of reporting a disconnect."""
    api = make_api(endless)

    async def scenario():
        connection = Connection(api, chat_body(stream=stream))
        while not api.client.running:
            await asyncio.sleep(0)
        connection.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(connection.task, PATIENCE_S)

    asyncio.run(scenario())
    assert not api.client.running
    assert len(api.client.cancelled) == 1


def test_first_delta_is_sent_before_the_second_exists(make_api):
    proceed = asyncio.Event()

    def script(request):
        tokens = byte_tokens("</think>a")
        return [
            Delta(request.request_id, tokens),
            proceed,
            Delta(request.request_id, byte_tokens("b")),
            Finished(request.request_id, "stop", 1, 3),
        ]

    api = make_api(script)

    async def scenario():
        connection = Connection(api, chat_body(stream=True))
        await connection.wait_for(lambda sent: b'"a"' in bodies(sent))
        assert connection.sent[0]["type"] == "http.response.start"
        assert b'"b"' not in bodies(connection.sent)
        proceed.set()
        await asyncio.wait_for(connection.task, PATIENCE_S)
        return bodies(connection.sent)

    assert asyncio.run(scenario()).endswith(b"data: [DONE]\n\n")


def test_client_that_stays_gets_the_end_of_the_body(make_api):
    api = make_api(answer("</think>x"))

    async def scenario():
        connection = Connection(api, chat_body(stream=True))
        await asyncio.wait_for(connection.task, PATIENCE_S)
        return connection.sent

    sent = asyncio.run(scenario())
    assert [m.get("more_body") for m in sent[-1:]] == [False]
    assert not api.client.cancelled
