"""Server-sent events over ASGI, and noticing that the client has gone.

Starlette's own streaming response watches for a disconnect only under some servers; here both the
stream and the whole answer watch under every server, since a request nobody reads must not run on
(known fault H-18).

Pieces leave in two ways, in one order: the response's own task writes what it reads, and while that
waits for more, whoever has a piece may write it at once (`Outlet.write`), without waking the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import closing
from types import coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from flare_ray.frontend.openai.responses import encode

Result = TypeVar("Result")

SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies of the nginx family would otherwise collect events
}


SERVER_SEND = "flare.send"
"""Where an application keeps the server's own `send` in a scope. Pieces of a body are given to it
directly: the framework's layers each wrap it, to learn whether the response has begun."""


def event(value: msgspec.Struct) -> bytes:
    """One server-sent event, named after the record's type tag."""
    name = str(value.__struct_config__.tag)
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


class Outlet:
    """The body of one response on its way to the server.

    Args:
        frames: pieces of the body.

    Attributes:
        ready: a piece may be written now: the response has begun and the client takes what it gets.
    """

    _send: Send
    """The server's; there once the response has begun."""

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        self.ready = False
        self._frames = frames
        self._late: asyncio.Task[None] | None = None

    async def pump(self, send: Send) -> None:
        """Write every piece as it comes, and end the body."""
        self._send, self.ready = send, True
        async for piece in self._frames:
            await self._settled()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._settled()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def write(self, piece: bytes) -> None:
        """Write a piece at once; only while `ready`, and while `pump` waits for its next one.

        A server that has to wait, for a client that reads slowly, goes on in a task.
        """
        sending = self._send({"type": "http.response.body", "body": piece, "more_body": True})
        step = sending.__await__()
        try:
            waits_for = next(step)
        except StopIteration:
            return
        self.ready = False
        self._late = asyncio.ensure_future(_rest(step, waits_for))

    async def close(self) -> None:
        """Give up what the client has not taken; idempotent."""
        self.ready = False
        if self._late is not None:
            self._late.cancel()
            # Whatever it failed of, nobody is left to be told.
            await asyncio.gather(self._late, return_exceptions=True)

    async def _settled(self) -> None:
        """Return once the server has taken all that was written; raises what kept it from that."""
        if self._late is not None:
            await self._late
            self._late, self.ready = None, True


@coroutine
def _rest(step: Generator[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """An awaitable's way from its first pause on, as a task may take it."""
    with closing(step):
        yield waits_for
        yield from step


class EventStream(Response):
    """A 200 response whose body is a stream of ready-made frames.

    Args:
        outlet: the body.
        close: called once when the stream ends for whatever reason, also if it never began.
    """

    def __init__(
        self,
        outlet: Outlet,
        *,
        close: Callable[[], Awaitable[None]],
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status_code=200, headers={**SSE_HEADERS, **(headers or {})})
        del self.headers["content-length"]  # set by the base class for its empty body
        self._outlet = outlet
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers at once, then every frame as it comes."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await until_gone(self._outlet.pump(scope.get(SERVER_SEND, send)), receive)
        except ClientGone:
            pass  # nobody is left to be told; `close` cancels the request
        finally:
            await self._outlet.close()
            await self._close()


async def until_gone(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The result of `work`, which is cancelled as soon as the client disconnects.

    Call only after the request body has been read.

    Raises:
        ClientGone: the client disconnected first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
