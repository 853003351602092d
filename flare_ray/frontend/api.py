"""The HTTP routes over any `EngineClient`; knows nothing of Ray (contract: A3).

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /v1/models/{model}
    GET /health   ready: 200, or 503 until an engine is     GET /health/live   this process answers
    GET /metrics  Prometheus text of all engines

A generation request passes these stages: 1. read the body, bounded; 2. ask what the engine can do;
3. check, render, tokenise; 4. open: wait for admission; 5. only now begin the response. Everything
up to 4 fails with a proper status; a client that leaves at any stage cancels its request.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from flare_ray.errors import FlareError, InvalidRequest
from flare_ray.frontend.client import EngineClient, EngineInfo, RequestStream
from flare_ray.frontend.openai.answer import CHAT, COMPLETION, Answer, AnswerFormat
from flare_ray.frontend.openai.errors import ErrorDetail, HttpError, http_error
from flare_ray.frontend.openai.prepare import (
    Prepared,
    check_served,
    prepare_chat,
    prepare_completion,
)
from flare_ray.frontend.openai.requests import decode_json
from flare_ray.frontend.openai.responses import ModelEntry, ModelList, encode
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.sse import ClientGone, EventStream, until_gone

logger = logging.getLogger("ray.serve.flare")
"""Below `ray.serve`, whose handlers a Serve replica configures; an ordinary logger elsewhere."""

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_CLOSED_STATUS = 499
"""Logged, never seen by anyone: the client has gone (the code other servers use)."""

Handler = Callable[[Request], Awaitable[Response]]
Prepare = Callable[..., Awaitable[Prepared]]


def build_api(client: EngineClient, settings: ApiSettings) -> FastAPI:
    """The application."""
    app = FastAPI(title="flare_ray", docs_url=None, redoc_url=None, openapi_url=None)
    routes = _Routes(client, settings)
    for path, method, handler in (
        ("/v1/chat/completions", "POST", routes.chat),
        ("/v1/completions", "POST", routes.completion),
        ("/v1/models", "GET", routes.models),
        ("/v1/models/{model:path}", "GET", routes.model),
        ("/health", "GET", routes.health),
        ("/health/live", "GET", routes.live),
        ("/metrics", "GET", routes.metrics),
    ):
        app.add_route(path, _guarded(handler), methods=[method])
    app.add_exception_handler(HTTPException, _framework_error)
    return app


class _Routes:
    def __init__(self, client: EngineClient, settings: ApiSettings) -> None:
        self._client = client
        self._settings = settings

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, prepare_chat, CHAT)

    async def completion(self, request: Request) -> Response:
        return await self._generate(request, prepare_completion, COMPLETION)

    async def models(self, request: Request) -> Response:
        return _json(ModelList(data=[self._entry(await self._client.info())]))

    async def model(self, request: Request) -> Response:
        check_served(self._settings, request.path_params["model"])
        return _json(self._entry(await self._client.info()))

    async def health(self, request: Request) -> Response:
        info = await self._client.info()
        return Response(
            b'{"status":"ready","engine":"' + info.engine_id.encode() + b'"}',
            media_type="application/json",
        )

    async def live(self, request: Request) -> Response:
        return Response(b'{"status":"live"}', media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        return Response(await self._client.metrics(), headers={"content-type": METRICS_TYPE})

    def _entry(self, info: EngineInfo) -> ModelEntry:
        return ModelEntry(
            id=self._settings.model_name,
            created=self._settings.created_s,
            owned_by="flare_ray",
            max_model_len=info.context_tokens,
        )

    async def _generate(self, request: Request, prepare: Prepare, style: AnswerFormat) -> Response:
        unique_id = _request_id(request)
        body = decode_json(await _read_body(request, self._settings.max_body_bytes))
        info = await self._client.request_info()
        prepared = await prepare(self._settings, info, body, unique_id=unique_id)
        answer = Answer(self._settings, prepared, style)
        if not prepared.stream:
            work = self._whole(prepared, answer)
            return Response(await until_gone(work, request.receive), media_type="application/json")
        streams: list[RequestStream] = []

        async def close() -> None:
            await _close_all(streams)

        try:
            await until_gone(self._open(prepared, streams), request.receive)
        except BaseException:
            await close()
            raise
        return EventStream(answer.frames(streams), close=close)

    async def _whole(self, prepared: Prepared, answer: Answer) -> bytes:
        streams: list[RequestStream] = []
        try:
            await self._open(prepared, streams)
            return await answer.whole(streams)
        finally:
            await _close_all(streams)

    async def _open(self, prepared: Prepared, streams: list[RequestStream]) -> None:
        """Open all generations of one request into `streams`, which the caller closes: a result
        handed back would be lost if the caller is cancelled in the very moment it is ready."""
        for generation in prepared.requests:
            streams.append(await self._client.open(generation))
        logger.info(
            "request %s: %d choice(s), %d prompt tokens, user %s",
            prepared.response_id,
            len(prepared.prompt_tokens),
            sum(prepared.prompt_tokens),
            prepared.user or "-",
        )


def _guarded(handler: Handler) -> Handler:
    """Turn every failure of `handler` into an OpenAI error, and log our own ones."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED_STATUS)
        except InvalidRequest as error:
            return _error(http_error(error))
        except FlareError as error:
            # Probes ask every few seconds while an engine starts; that is no event.
            level = logging.WARNING if request.method == "POST" else logging.DEBUG
            logger.log(level, "%s %s: %s", request.method, request.url.path, error)
            return _error(http_error(error))
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            detail = ErrorDetail(
                message="internal error; the server's log has its cause",
                type="server_error",
                code="internal_error",
            )
            return _error(HttpError(status=500, detail=detail))

    return guarded


async def _framework_error(request: Request, error: Exception) -> Response:
    """Unknown path and wrong method, in the same shape."""
    assert isinstance(error, HTTPException)
    detail = ErrorDetail(
        message=f"{request.method} {request.url.path}: {error.detail}",
        type="not_found_error" if error.status_code == 404 else "invalid_request_error",
        code="not_found" if error.status_code == 404 else "method_not_allowed",
    )
    return _error(HttpError(status=error.status_code, detail=detail), error.headers)


async def _read_body(request: Request, limit: int) -> bytes:
    """The body, never more than `limit` bytes of it in memory.

    Raises:
        InvalidRequest: status 413: it is larger.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit, f"{declared} bytes")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise _too_large(limit, "more")
    return bytes(data)


def _too_large(limit: int, got: str) -> InvalidRequest:
    return InvalidRequest(
        f"the request body may have {limit} bytes, got {got}; raise ingress.max_body_bytes or send "
        "less",
        code="request_too_large",
        status=413,
    )


def _request_id(request: Request) -> str:
    """The client's X-Request-ID, else a fresh one; part of the response's id.

    Raises:
        InvalidRequest: the header holds something that is no identifier.
    """
    given = request.headers.get(REQUEST_ID_HEADER)
    if given is None:
        return uuid.uuid4().hex
    if REQUEST_ID.fullmatch(given) is None:
        raise InvalidRequest(
            "X-Request-ID: 1 to 128 letters, digits, '.', '_', ':' or '-'", param="X-Request-ID"
        )
    return given


async def _close_all(streams: list[RequestStream]) -> None:
    for stream in streams:
        await stream.aclose()


def _json(value: ModelList | ModelEntry) -> Response:
    return Response(encode(value), media_type="application/json")


def _error(error: HttpError, headers: Mapping[str, Any] | None = None) -> Response:
    extra = dict(headers or {})
    if error.retry_after_s:
        extra["retry-after"] = str(error.retry_after_s)
    if error.status == 413:
        extra["connection"] = "close"  # the rest of the body is not read
    return Response(
        error.body(), status_code=error.status, headers=extra, media_type="application/json"
    )
