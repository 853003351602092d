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
from flare_ray.frontend.access import Access, Caller
from flare_ray.frontend.anthropic.errors import VERSION_HEADER, anthropic_error
from flare_ray.frontend.openai.errors import ErrorDetail, HttpError, http_error
from flare_ray.frontend.sse import ClientGone

logger = logging.getLogger("ray.serve.flare")
"""Below `ray.serve`, whose handlers a Serve replica configures; an ordinary logger elsewhere."""

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_HEADERS = (REQUEST_ID_HEADER, "request-id")
"""Of every response: the names of the two APIs."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MESSAGES_PATH = "/v1/messages"
CLIENT_CLOSED_STATUS = 499
"""Logged, never seen by anyone: the client has gone (the code other servers use)."""

Handler = Callable[[Request], Awaitable[Response]]


def guarded(handler: Handler, access: Access | None = None) -> Handler:
    """`handler`, whose failures become responses; our own ones are logged.

    Args:
        access: admits the request first; None = a route for everyone.
    """

    async def guard(request: Request) -> Response:
        try:
            request.state.request_id = _given_id(request)
            if access is not None:
                request.state.caller = await access.admit(request.headers)
            response = await handler(request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED_STATUS)
        except Exception as error:
            response = error_response(request, _failure(request, error))
        return identified(request, response)

    return guard


def identified(request: Request, response: Response) -> Response:
    """`response` with the request's id in its headers."""
    for name in REQUEST_ID_HEADERS:
        response.headers[name] = request_id_of(request)
    return response


def request_id_of(request: Request) -> str:
    """The client's X-Request-ID, else a fresh one, always the same for one request."""
    if getattr(request.state, "request_id", None) is None:
        request.state.request_id = uuid.uuid4().hex
    return str(request.state.request_id)


def caller_of(request: Request) -> Caller:
    """Who sent a request that was admitted."""
    caller: Caller = request.state.caller
    return caller


def error_response(
    request: Request,
    error: HttpError,
    *,
    headers: Mapping[str, Any] | None = None,
) -> Response:
    """A failure as a response, in the shape of the API that the client speaks."""
    extra = dict(headers or {})
    if error.retry_after_s:
        extra["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        extra["www-authenticate"] = "Bearer"
    if error.status == 413:
        extra["connection"] = "close"  # the rest of the body is not read
    status, body = error.status, error.body()
    if request.url.path.startswith(MESSAGES_PATH) or VERSION_HEADER in request.headers:
        status, body = anthropic_error(error, request_id_of(request))
    response = Response(body, status_code=status, headers=extra, media_type="application/json")
    return identified(request, response)


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


def _given_id(request: Request) -> str | None:
    """The client's own id; part of the response's id.

    Raises:
        InvalidRequest: the header holds something that is no identifier.
    """
    given = request.headers.get(REQUEST_ID_HEADER)
    if given is not None and REQUEST_ID.fullmatch(given) is None:
        raise InvalidRequest(
            "X-Request-ID: 1 to 128 letters, digits, '.', '_', ':' or '-'", param="X-Request-ID"
        )
    return given
