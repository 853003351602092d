"""Server-sent events over ASGI, and noticing that the client has gone.

Starlette's own streaming response watches for a disconnect only under some servers; here both the
stream and the whole answer watch under every server, since a request nobody reads must not run on
(known fault H-18).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
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


def event(value: msgspec.Struct) -> bytes:
    """One server-sent event, named after the record's type tag."""
    name = str(value.__struct_config__.tag)
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


class EventStream(Response):
    """A 200 response whose body is a stream of ready-made frames.

    Args:
        frames: pieces of the body.
        close: called once when the stream ends for whatever reason, also if it never began.
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        *,
        close: Callable[[], Awaitable[None]],
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status_code=200, headers={**SSE_HEADERS, **(headers or {})})
        del self.headers["content-length"]  # set by the base class for its empty body
        self._frames = frames
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers at once, then every frame as it comes."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await until_gone(self._pump(send), receive)
        except ClientGone:
            pass  # nobody is left to be told; `close` cancels the request
        finally:
            await self._close()

    async def _pump(self, send: Send) -> None:
        async for piece in self._frames:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
