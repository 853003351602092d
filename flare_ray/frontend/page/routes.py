"""The page's files as routes, under a policy that lets them load nothing but themselves.

    GET /ui     to /ui/
    GET /ui/    index.html      GET /ui/{name}    what it loads

They hold no data and need no API key; what the page asks for does, where keys are in force. No part
of the API: the OpenAPI document leaves them out.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from flare_ray.frontend.guard import Handler

PATH = "/ui"
INDEX = "index.html"
MEDIA_TYPES: Mapping[str, str] = {
    INDEX: "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "service.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "status.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
HEADERS: Mapping[str, str] = {
    # `require-trusted-types-for` with no policy allowed: text can become markup nowhere.
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # Kept, and asked about each time: all files of one page are of one version.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    """One file; `etag` is its content's digest, so replicas of one version agree on it."""

    content: bytes
    media_type: str
    etag: str

    async def __call__(self, request: Request) -> Response:
        headers = {**HEADERS, "etag": self.etag}
        if _names(request.headers.get("if-none-match", ""), self.etag):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def page_routes() -> list[tuple[str, Handler]]:
    """Path and handler of each route; all of them GET."""
    named = [(f"{PATH}/{'' if name == INDEX else name}", file) for name, file in _files().items()]
    return [(PATH, _to_index), *named]


async def _to_index(request: Request) -> Response:
    """Relative, since a proxy or Serve's `route_prefix` may stand before the path."""
    return Response(status_code=308, headers={"location": f"{PATH.strip('/')}/"})


@functools.cache
def _files() -> dict[str, _File]:
    """The files by name, read once."""
    folder = resources.files(__package__)
    contents = {name: folder.joinpath(name).read_bytes() for name in MEDIA_TYPES}
    return {
        name: _File(content, MEDIA_TYPES[name], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
        for name, content in contents.items()
    }


def _names(header: str, etag: str) -> bool:
    """Whether If-None-Match names the tag; a proxy that compresses has weakened it."""
    tags = [tag.strip().removeprefix("W/") for tag in header.split(",")]
    return etag in tags or "*" in tags
