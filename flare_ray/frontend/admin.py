"""Routes for administrators: the prefix cache of every engine (contract: M7).

    GET  /admin/cache          what each tier holds and did, by engine
    POST /admin/cache/reset    forget it: {"tiers": ["device", "host", "disk"]}, all by default

They answer only to the secret in FLARE_ADMIN_KEY, sent as `Authorization: Bearer ...`; without that
variable they are closed. Clients' keys do not open them: a reset and its statistics concern every
tenant.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from flare_ray.contracts.cache import ALL_TIERS, CacheReset, CacheStats
from flare_ray.contracts.tiers import Tier
from flare_ray.errors import InvalidRequest
from flare_ray.frontend.client import EngineClient
from flare_ray.frontend.openai.requests import decode_json

KEY_VARIABLE = "FLARE_ADMIN_KEY"
MAX_BODY_BYTES = 4096


class CacheList(msgspec.Struct, frozen=True):
    """Answer of GET /admin/cache."""

    engines: list[CacheStats]


class ResetList(msgspec.Struct, frozen=True):
    """Answer of POST /admin/cache/reset."""

    engines: list[CacheReset]


class AdminRoutes:
    """Handlers; `key` is read once, "" = closed."""

    def __init__(self, client: EngineClient, key: str | None = None) -> None:
        self._client = client
        self._key = os.environ.get(KEY_VARIABLE, "") if key is None else key

    async def cache(self, request: Request) -> Response:
        """Statistics of every engine's cache."""
        self._check(request)
        return _json(msgspec.json.encode(CacheList(await self._client.cache())))

    async def reset(self, request: Request) -> Response:
        """Reset every engine's cache, or some of its tiers."""
        self._check(request)
        body = await request.body()
        if len(body) > MAX_BODY_BYTES:
            raise InvalidRequest("the body of a reset names tiers and nothing else", status=413)
        tiers = _tiers(decode_json(body) if body else {})
        return _json(msgspec.json.encode(ResetList(await self._client.reset_cache(tiers))))

    def _check(self, request: Request) -> None:
        """Refuse whoever does not know the secret.

        Raises:
            InvalidRequest: status 403 while there is none, else 401.
        """
        if not self._key:
            raise InvalidRequest(
                f"administration is closed: set {KEY_VARIABLE} where HTTP replicas start",
                code="admin_closed",
                status=403,
            )
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        known = hmac.compare_digest(given.strip().encode(), self._key.encode())
        if kind.lower() != "bearer" or not known:
            raise InvalidRequest(
                f"send the secret of {KEY_VARIABLE} as 'Authorization: Bearer ...'",
                code="invalid_admin_key",
                status=401,
            )


def _tiers(body: Mapping[str, Any]) -> frozenset[Tier]:
    unknown = sorted(set(body) - {"tiers"})
    if unknown:
        raise InvalidRequest(f"{unknown[0]}: no such field; send tiers", param=unknown[0])
    named = body.get("tiers")
    if named is None:
        return ALL_TIERS
    choices = ", ".join(tier.value for tier in Tier)
    if not isinstance(named, list) or not named:
        raise InvalidRequest(f"tiers: a list of {choices}", param="tiers")
    for name in named:
        if name not in {tier.value for tier in Tier}:
            raise InvalidRequest(f"tiers: {name!r} is none of {choices}", param="tiers")
    return frozenset(Tier(name) for name in named)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
