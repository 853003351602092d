"""Failures in the Anthropic shape: {"type": "error", "error": {type, message}, "request_id"}."""

from __future__ import annotations

import msgspec

from flare_ray.contracts.messages import Failed
from flare_ray.frontend.openai.errors import HttpError

VERSION_HEADER = "anthropic-version"
OVERLOADED_STATUS = 529
"""What clients of this API take for a server without room; 429 is a client that asks too much."""
TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "api_error",
    OVERLOADED_STATUS: "overloaded_error",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inner object."""

    type: str
    message: str


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True, tag="error", tag_field="type"):
    """The outer object."""

    error: ErrorDetail
    request_id: str


def anthropic_error(error: HttpError, request_id: str) -> tuple[int, bytes]:
    """Status and body of a failure before the response."""
    status = OVERLOADED_STATUS if error.detail.code == "overloaded" else error.status
    detail = ErrorDetail(_type(status), error.detail.message)
    return status, msgspec.json.encode(ErrorBody(error=detail, request_id=request_id))


def failed_body(item: Failed, request_id: str) -> ErrorBody:
    """A failure inside an open response."""
    status = OVERLOADED_STATUS if item.code == "overloaded" else item.status
    return ErrorBody(error=ErrorDetail(_type(status), item.message), request_id=request_id)


def _type(status: int) -> str:
    kind = "invalid_request_error" if 400 <= status < 500 else "api_error"
    return TYPE_OF_STATUS.get(status, kind)
