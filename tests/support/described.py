"""Requests held against the OpenAPI document: whatever the server accepts must fit it."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema

from flare_ray.frontend.openapi import OPERATIONS, document


@functools.cache
def request_validator(path: str) -> jsonschema.Draft202012Validator | None:
    """Validator of a route's request body; None = the route takes none."""
    operation = OPERATIONS.get(("POST", path))
    if operation is None or operation.body is None:
        return None
    served = document()
    body = served["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = {"components": served["components"], **body["schema"]}
    return jsonschema.Draft202012Validator(schema)


def assert_described(path: str, body: Any) -> None:
    """A request that was accepted fits the document."""
    validator = request_validator(path)
    if validator is not None:
        found = next(validator.iter_errors(body), None)
        assert found is None, f"{path} accepted what its schema refuses: {found}"


class DescribedApp:
    """An ASGI application that keeps the bodies it accepted.

    Attributes:
        accepted: path and body of every request that was answered with 200.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self.accepted: list[tuple[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        pieces: list[bytes] = []

        async def heard() -> Any:
            message = await receive()
            pieces.append(message.get("body", b""))
            return message

        async def told(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                body = b"".join(pieces)
                if body:
                    self.accepted.append((scope["path"], json.loads(body)))
            await send(message)

        await self._app(scope, heard, told)
