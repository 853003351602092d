"""What stands around every route: the request's id, failures in the shape of the route's API."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from flare_ray.errors import FlareError, InvalidRequest
from flare_ray.frontend.openai.errors import ErrorDetail, HttpError, http_error
from flare_ray.frontend.sse import ClientGone

logger = logging.getLogger("ray.serve.flare")
"""Below `ray.serve`, whose handlers a Serve replica configures; an ordinary logger elsewhere."""

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_HEADERS = (REQUEST_ID_HEADER, "request-id")
"""Of every response: the names of the two APIs."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
CLIENT_CLOSED_STATUS = 499
"""Logged, never seen by anyone: the client has gone (the code other servers use)."""

Handler = Callable[[Request], Awaitable[Response]]
ErrorShape = Callable[[HttpError, str], tuple[int, bytes]]
"""(failure, request id) -> status and body."""


def openai_shape(error: HttpError, request_id: str) -> tuple[int, bytes]:
    """`{"error": {...}}`."""
    return error.status, error.body()


def guarded(handler: Handler, shape: ErrorShape = openai_shape) -> Handler:
    """`handler`, whose failures become responses of `shape`; our own ones are logged."""

    async def guard(request: Request) -> Response:
        request.state.request_id = uuid.uuid4().hex
        try:
            request.state.request_id = _request_id(request)
            response = await handler(request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED_STATUS)
        except Exception as error:
            response = error_response(request, _failure(request, error), shape)
        for name in REQUEST_ID_HEADERS:
            response.headers[name] = request_id_of(request)
        return response

    return guard


def request_id_of(request: Request) -> str:
    """Id of a guarded request: the client's X-Request-ID, else a fresh one."""
    return str(request.state.request_id)


def error_response(
    request: Request,
    error: HttpError,
    shape: ErrorShape = openai_shape,
    *,
    headers: Mapping[str, Any] | None = None,
) -> Response:
    """A failure as a response."""
    extra = dict(headers or {})
    if error.retry_after_s:
        extra["retry-after"] = str(error.retry_after_s)
    if error.status == 413:
        extra["connection"] = "close"  # the rest of the body is not read
    status, body = shape(error, getattr(request.state, "request_id", ""))
    return Response(body, status_code=status, headers=extra, media_type="application/json")


def _failure(request: Request, error: Exception) -> HttpError:
    if isinstance(error, InvalidRequest):
        return http_error(error)
    if isinstance(error, FlareError):
        # Probes ask every few seconds while an engine starts; that is no event.
        level = logging.WARNING if request.method == "POST" else logging.DEBUG
        logger.log(level, "%s %s: %s", request.method, request.url.path, error)
        return http_error(error)
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    detail = ErrorDetail(
        message="internal error; the server's log has its cause",
        type="server_error",
        code="internal_error",
    )
    return HttpError(status=500, detail=detail)


def _request_id(request: Request) -> str:
    """The client's own id; part of the response's id.

    Raises:
        InvalidRequest: the header holds something that is no identifier.
    """
    given = request.headers.get(REQUEST_ID_HEADER)
    if given is None:
        return str(request.state.request_id)
    if REQUEST_ID.fullmatch(given) is None:
        raise InvalidRequest(
            "X-Request-ID: 1 to 128 letters, digits, '.', '_', ':' or '-'", param="X-Request-ID"
        )
    return given
