"""The HTTP routes over any `EngineClient`; knows nothing of Ray (contract: A3).

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /v1/models/{model}
    POST /v1/responses
    POST /v1/messages           POST /v1/messages/count_tokens
    POST /tokenize              POST /detokenize
    GET /health   ready: 200, or 503 until an engine is     GET /health/live   this process answers
    GET /metrics  Prometheus text of all engines            /admin/...   see `admin.py`
    GET /openapi.json
    GET /ui/      the page of `page/`, unless `ingress.page` is off

Other routes of these APIs are refused by name (`openai/refused.py`). Health and metrics need no API
key: probes and scrapers have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from flare_ray.frontend.admin import AdminRoutes
from flare_ray.frontend.anthropic.prepare import check_version, count_tokens, prepare_message
from flare_ray.frontend.client import EngineClient, EngineInfo
from flare_ray.frontend.generation import AnswerWriter, Generator
from flare_ray.frontend.guard import error_response, guarded
from flare_ray.frontend.openai.answer import CHAT, COMPLETION, Answer
from flare_ray.frontend.openai.errors import ErrorDetail, HttpError
from flare_ray.frontend.openai.prepare import (
    Prepared,
    check_served,
    prepare_chat,
    prepare_completion,
)
from flare_ray.frontend.openai.refused import REFUSED, refusal
from flare_ray.frontend.openai.responses import ModelEntry, ModelList, encode
from flare_ray.frontend.openai.tokens import detokenize, tokenize
from flare_ray.frontend.openapi import document
from flare_ray.frontend.page import page_routes
from flare_ray.frontend.responses.prepare import prepare_response
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.sse import SERVER_SEND

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
EVERY_METHOD = ("GET", "POST", "PUT", "PATCH", "DELETE")


class _Api(FastAPI):
    """The framework's application, which remembers what it was called with."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SERVER_SEND] = send
        await super().__call__(scope, receive, send)


def build_api(client: EngineClient, settings: ApiSettings) -> FastAPI:
    """The application."""
    app = _Api(title="flare_ray", docs_url=None, redoc_url=None, openapi_url=None)
    routes = _Routes(client, settings)
    for path, method, handler in (
        ("/v1/chat/completions", "POST", routes.chat),
        ("/v1/completions", "POST", routes.completion),
        ("/v1/models", "GET", routes.models),
        ("/v1/models/{model:path}", "GET", routes.model),
        ("/v1/responses", "POST", routes.response),
        ("/v1/messages", "POST", routes.message),
        ("/v1/messages/count_tokens", "POST", routes.count_tokens),
        ("/tokenize", "POST", routes.tokenize),
        ("/v1/tokenize", "POST", routes.tokenize),
        ("/detokenize", "POST", routes.detokenize),
        ("/v1/detokenize", "POST", routes.detokenize),
    ):
        app.add_route(path, guarded(handler, settings.access), methods=[method])
    for path, handler in (
        ("/health", routes.health),
        ("/health/live", routes.live),
        ("/metrics", routes.metrics),
        ("/openapi.json", routes.openapi),
    ):
        app.add_route(path, guarded(handler), methods=["GET"])
    admin = AdminRoutes(client)
    app.add_route("/admin/cache", guarded(admin.cache), methods=["GET"])
    app.add_route("/admin/cache/reset", guarded(admin.reset), methods=["POST"])
    for path, file in page_routes() if settings.page else ():
        app.add_route(path, guarded(file), methods=["GET"])
    for name in REFUSED:
        for path in (f"/v1/{name}", f"/v1/{name}/{{rest:path}}"):
            app.add_route(path, guarded(_refused), methods=list(EVERY_METHOD))
    app.add_exception_handler(HTTPException, _framework_error)
    return app


class _Routes:
    def __init__(self, client: EngineClient, settings: ApiSettings) -> None:
        self._client = client
        self._settings = settings
        self._generator = Generator(client, settings)
        self._document: bytes | None = None

    async def chat(self, request: Request) -> Response:
        return await self._generator.answer(request, _chat)

    async def completion(self, request: Request) -> Response:
        return await self._generator.answer(request, _completion)

    async def response(self, request: Request) -> Response:
        return await self._generator.answer(request, prepare_response)

    async def message(self, request: Request) -> Response:
        check_version(request)
        return await self._generator.answer(request, prepare_message)

    async def count_tokens(self, request: Request) -> Response:
        check_version(request)
        body, info = await self._generator.read(request)
        return _json(await count_tokens(self._settings, info, body))

    async def tokenize(self, request: Request) -> Response:
        body, info = await self._generator.read(request)
        return _json(await tokenize(self._settings, info, body))

    async def detokenize(self, request: Request) -> Response:
        body, info = await self._generator.read(request)
        return _json(await detokenize(self._settings, info, body))

    async def models(self, request: Request) -> Response:
        return _json(encode(ModelList(data=[self._entry(await self._client.info())])))

    async def model(self, request: Request) -> Response:
        check_served(self._settings, request.path_params["model"])
        return _json(encode(self._entry(await self._client.info())))

    async def health(self, request: Request) -> Response:
        info = await self._client.info()
        return _json(b'{"status":"ready","engine":"' + info.engine_id.encode() + b'"}')

    async def live(self, request: Request) -> Response:
        return _json(b'{"status":"live"}')

    async def metrics(self, request: Request) -> Response:
        return Response(await self._client.metrics(), headers={"content-type": METRICS_TYPE})

    async def openapi(self, request: Request) -> Response:
        if self._document is None:
            self._document = msgspec.json.encode(document())
        return _json(self._document)

    def _entry(self, info: EngineInfo) -> ModelEntry:
        return ModelEntry(
            id=self._settings.model_name,
            created=self._settings.created_s,
            owned_by="flare_ray",
            max_model_len=info.context_tokens,
        )


async def _chat(
    settings: ApiSettings, info: EngineInfo, body: Mapping[str, Any], *, unique_id: str
) -> tuple[Prepared, AnswerWriter]:
    prepared = await prepare_chat(settings, info, body, unique_id=unique_id)
    return prepared, Answer(settings, prepared, CHAT)


async def _completion(
    settings: ApiSettings, info: EngineInfo, body: Mapping[str, Any], *, unique_id: str
) -> tuple[Prepared, AnswerWriter]:
    prepared = await prepare_completion(settings, info, body, unique_id=unique_id)
    return prepared, Answer(settings, prepared, COMPLETION)


async def _refused(request: Request) -> Response:
    raise refusal(request.url.path)


async def _framework_error(request: Request, error: Exception) -> Response:
    """Unknown path and wrong method, in the same shape."""
    assert isinstance(error, HTTPException)
    detail = ErrorDetail(
        message=f"{request.method} {request.url.path}: {error.detail}",
        type="not_found_error" if error.status_code == 404 else "invalid_request_error",
        code="not_found" if error.status_code == 404 else "method_not_allowed",
    )
    failure = HttpError(status=error.status_code, detail=detail)
    return error_response(request, failure, headers=error.headers)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
