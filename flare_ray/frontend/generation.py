"""One generation request, whatever API it speaks.

Stages: 1. read the body, bounded; 2. ask what the engine can do; 3. check, render, tokenise, in the
words of the API; 4. open: wait for admission; 5. only now begin the response. Everything up to 4
fails with a proper status; a client that leaves at any stage cancels its request.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from flare_ray.contracts.messages import Delta, Finished
from flare_ray.errors import InvalidRequest
from flare_ray.frontend.access import Caller
from flare_ray.frontend.client import EngineClient, EngineInfo, RequestStream, StreamEvent
from flare_ray.frontend.guard import caller_of, request_id_of
from flare_ray.frontend.openai.prepare import Prepared
from flare_ray.frontend.openai.requests import decode_json
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.sse import EventStream, Outlet, until_gone

logger = logging.getLogger("ray.serve.flare")

MAX_SESSION_CHARACTERS = 256
"""Longest name of a session: twice a request id's."""


class AnswerWriter(Protocol):
    """Output items in, one API's bytes out."""

    async def whole(self, streams: Sequence[RequestStream]) -> bytes:
        """The body of an answer that is not streamed; raises FlareError if the request failed."""

    def frames(self, streams: Sequence[RequestStream]) -> AsyncIterator[bytes]:
        """Server-sent events; a failure is the last of them."""

    @property
    def more(self) -> Callable[[Delta], bytes] | None:
        """What `frames` would make of a delta of its only stream, b"" for one that shows nothing
        yet; used in its place while it waits for one. None = `frames` must see every delta."""


Prepare = Callable[..., Awaitable[tuple[Prepared, AnswerWriter]]]
"""(settings, info, body, *, unique_id) -> a request ready to be opened, and who writes its answer;
raises InvalidRequest for whatever is wrong with the body."""


class Generator:
    """Runs requests on an engine."""

    def __init__(self, client: EngineClient, settings: ApiSettings) -> None:
        self._client = client
        self._settings = settings

    async def read(self, request: Request) -> tuple[dict[str, Any], EngineInfo]:
        """The body, and what the engine can do."""
        body = decode_json(await read_body(request, self._settings.max_body_bytes))
        return body, await self._client.request_info()

    async def answer(self, request: Request, prepare: Prepare) -> Response:
        """The response to one request."""
        body, info = await self.read(request)
        unique_id, caller = request_id_of(request), caller_of(request)
        prepared, writer = await prepare(self._settings, info, body, unique_id=unique_id)
        session = session_of(request.headers, self._settings.session_header)
        prepared = _as_allowed(prepared, caller, session)
        await caller.book(tokens=sum(prepared.prompt_tokens[:: prepared.choices_per_prompt]))
        if not prepared.stream:
            work = self._whole(prepared, writer, caller, request.headers)
            return Response(await until_gone(work, request.receive), media_type="application/json")
        streams: list[RequestStream] = []

        async def close() -> None:
            await close_all(streams)

        try:
            opening = self._open(prepared, streams, caller, request.headers)
            await until_gone(opening, request.receive)
        except BaseException:
            await close()
            raise
        outlet = Outlet(writer.frames(streams))
        if writer.more is not None and len(streams) == 1:
            streams[0].divert(_bypass(writer.more, outlet))
        return EventStream(outlet, close=close)

    async def _whole(
        self,
        prepared: Prepared,
        writer: AnswerWriter,
        caller: Caller,
        headers: Mapping[str, str],
    ) -> bytes:
        streams: list[RequestStream] = []
        try:
            await self._open(prepared, streams, caller, headers)
            return await writer.whole(streams)
        finally:
            await close_all(streams)

    async def _open(
        self,
        prepared: Prepared,
        streams: list[RequestStream],
        caller: Caller,
        headers: Mapping[str, str],
    ) -> None:
        """Open all generations of one request into `streams`, which the caller closes: a result
        handed back would be lost if the caller is cancelled in the very moment it is ready."""
        for generation in prepared.requests:
            stream = await self._client.open(generation)
            stream = self._settings.tracing.follow(stream, generation, headers)
            streams.append(MeteredStream(stream, caller) if caller.counts_tokens else stream)
        logger.info(
            "request %s: key %s, %d choice(s), %d prompt tokens, user %s",
            prepared.response_id,
            caller.name,
            len(prepared.prompt_tokens),
            sum(prepared.prompt_tokens),
            prepared.user or "-",
        )


class MeteredStream:
    """A stream whose tokens are booked on its caller once it ends, however it ends."""

    def __init__(self, stream: RequestStream, caller: Caller) -> None:
        self._stream = stream
        self._caller = caller
        self._tokens = 0

    def divert(self, bypass: Callable[[Delta], bool]) -> None:
        """See `RequestStream.divert`."""

        def metered(delta: Delta) -> bool:
            taken = bypass(delta)
            if taken:
                self._tokens += len(delta.tokens)
            return taken

        self._stream.divert(metered)

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        async for event in self._stream:
            if isinstance(event, Delta):
                self._tokens += len(event.tokens)
            elif isinstance(event, Finished):
                # Also counts what a stop string hid.
                self._tokens = event.completion_tokens
            yield event

    async def aclose(self) -> None:
        """See `RequestStream.aclose`."""
        tokens, self._tokens = self._tokens, 0
        await self._stream.aclose()
        await self._caller.spend(tokens)


def _bypass(more: Callable[[Delta], bytes], outlet: Outlet) -> Callable[[Delta], bool]:
    """The short way of a delta: written by who brings it. Not while the client is behind: what
    arrives then is joined (`Inbox`)."""

    def bypass(delta: Delta) -> bool:
        if not outlet.ready:
            return False
        piece = more(delta)
        if piece:
            outlet.write(piece)
        return True

    return bypass


def session_of(headers: Mapping[str, str], name: str) -> str:
    """The session that a request names in the header `name`; "" = none, or no header means one.

    Raises:
        InvalidRequest: it is longer than MAX_SESSION_CHARACTERS.
    """
    session = headers.get(name, "") if name else ""
    if len(session) > MAX_SESSION_CHARACTERS:
        raise InvalidRequest(
            f"{name}: at most {MAX_SESSION_CHARACTERS} characters, got {len(session)}", param=name
        )
    return session


def _as_allowed(prepared: Prepared, caller: Caller, session: str) -> Prepared:
    """The request with its session, and the priority, share and cache salt that its caller may
    have.

    Raises:
        InvalidRequest: status 403: it asks for another priority.
    """
    priority = caller.priority(prepared.priority)
    salt = caller.cache_salt(prepared.cache_salt)
    tenant, weight = caller.share
    if not priority and not salt and not tenant and not session:
        return prepared
    requests = tuple(
        msgspec.structs.replace(
            request,
            priority=priority,
            cache_salt=salt,
            tenant=tenant,
            weight=weight,
            session=session,
        )
        for request in prepared.requests
    )
    return replace(prepared, requests=requests)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, never more than `limit` bytes of it in memory.

    Raises:
        InvalidRequest: status 413: it is larger.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit, f"{declared[:20]} bytes")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise _too_large(limit, "more")
    return bytes(data)


async def close_all(streams: Sequence[RequestStream]) -> None:
    """Close every stream."""
    for stream in streams:
        await stream.aclose()


def _too_large(limit: int, got: str) -> InvalidRequest:
    return InvalidRequest(
        f"the request body may have {limit} bytes, got {got}; raise ingress.max_body_bytes or send "
        "less",
        code="request_too_large",
        status=413,
    )
