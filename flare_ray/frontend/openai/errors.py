"""Every failure in the OpenAI error shape: {"error": {message, type, param, code}}."""

from __future__ import annotations

import math

import msgspec

from flare_ray.contracts.messages import Failed
from flare_ray.errors import FlareError, InvalidRequest, Overloaded, RankFailure, RateLimited

UNAVAILABLE_RETRY_S = 5.0
"""Retry-After while an engine is being rebuilt: about what replacing a replica takes (measured, 5
to 7 s for a toy engine on CPU)."""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The inner object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The outer object."""

    error: ErrorDetail


class HttpError(msgspec.Struct, frozen=True, kw_only=True):
    """One failure as HTTP carries it.

    Attributes:
        retry_after_s: whole seconds for the Retry-After header; 0 = no header.
    """

    status: int
    detail: ErrorDetail
    retry_after_s: int = 0

    def body(self) -> bytes:
        """JSON."""
        return msgspec.json.encode(ErrorBody(self.detail))


def http_error(error: FlareError) -> HttpError:
    """How a failure before the response is answered."""
    if isinstance(error, InvalidRequest):
        kind = "not_found_error" if error.status == 404 else "invalid_request_error"
        detail = ErrorDetail(message=str(error), type=kind, param=error.param, code=error.code)
        return HttpError(status=error.status, detail=detail)
    if isinstance(error, Overloaded):
        code = "overloaded" if error.status == 429 else "service_unavailable"
        if isinstance(error, RateLimited):
            code = "rate_limit_exceeded"
        kind = "rate_limit_error" if error.status == 429 else "server_error"
        return HttpError(
            status=error.status,
            detail=ErrorDetail(message=str(error), type=kind, code=code),
            retry_after_s=max(1, math.ceil(error.retry_after_s)),
        )
    if isinstance(error, RankFailure):
        return HttpError(
            status=503,
            detail=ErrorDetail(message=str(error), type="server_error", code="rank_failure"),
            retry_after_s=math.ceil(UNAVAILABLE_RETRY_S),
        )
    return HttpError(
        status=500,
        detail=ErrorDetail(message=str(error), type="server_error", code="internal_error"),
    )


def failed_detail(item: Failed) -> ErrorDetail:
    """How a failure inside an open response is told."""
    kind = "invalid_request_error" if 400 <= item.status < 500 else "server_error"
    return ErrorDetail(message=item.message, type=kind, param=item.param, code=item.code)
