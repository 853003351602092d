"""The check that stands before every route of the APIs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flare_ray.errors import InvalidRequest, RateLimited
from flare_ray.frontend.access.keys import ApiKey, KeyRing
from flare_ray.frontend.access.ledger import Ledger, Limits, LocalLedger

BEARER = "bearer "


class Access:
    """Admits requests.

    Args:
        keys: the keys in force; None = anyone may ask for anything.
    """

    def __init__(self, keys: KeyRing | None = None, *, ledger: Ledger | None = None) -> None:
        self._keys = keys
        self._ledger = ledger or LocalLedger()

    async def admit(self, headers: Mapping[str, str]) -> Caller:
        """Who asks: counts one request.

        Raises:
            InvalidRequest: status 401: no key, or one that is not in force.
            RateLimited: the key has asked too often, or its tokens are used up.
        """
        if self._keys is None:
            return Caller()
        secret = _secret(headers)
        key = None if secret is None else self._keys.find(secret)
        if key is None:
            raise InvalidRequest(
                "no API key was given; send it as Authorization: Bearer KEY or as X-API-Key: KEY"
                if secret is None
                else "the API key is not valid here",
                code="invalid_api_key",
                status=401,
            )
        caller = Caller(key, self._ledger)
        await caller.book(requests=1)
        return caller


@dataclass(frozen=True, slots=True)
class Caller:
    """A client that was admitted; without a key where none are in force."""

    key: ApiKey | None = None
    ledger: Ledger = field(default_factory=LocalLedger)

    @property
    def name(self) -> str:
        """For the log."""
        return "-" if self.key is None else self.key.name

    @property
    def counts_tokens(self) -> bool:
        """Whether anyone asks how many tokens it used."""
        return self.key is not None and self.key.tokens_per_minute is not None

    def priority(self, wanted: int | None) -> int:
        """Priority of a request that asks for `wanted`.

        Raises:
            InvalidRequest: status 403: below what the key may ask for.
        """
        if self.key is None:
            return wanted or 0
        lowest = self.key.lowest_priority
        if wanted is None:
            return lowest
        if wanted < lowest:
            raise InvalidRequest(
                f"priority: this API key may ask for {lowest} or above, got {wanted}",
                param="priority",
                code="priority_not_allowed",
                status=403,
            )
        return wanted

    @property
    def share(self) -> tuple[str, float]:
        """Tenant and weight under which its requests are served beside others'; without keys all
        are one tenant."""
        return ("", 1.0) if self.key is None else (self.key.name, self.key.weight)

    def cache_salt(self, wanted: str | None) -> str:
        """Salt of a request that asks for `wanted`; never that of another key's requests."""
        ours = "" if self.key is None else self.key.cache_salt
        return f"{ours}\x00{wanted}" if wanted else ours

    async def book(self, *, requests: int = 0, tokens: int = 0) -> None:
        """Count requests and prompt tokens before they are worked on.

        Raises:
            RateLimited: they do not fit now.
            InvalidRequest: they never will.
        """
        if self.key is None:
            return
        most = self.key.tokens_per_minute
        if most is not None and tokens > most:
            raise InvalidRequest(
                f"the prompt has {tokens} tokens, this API key may use {most} a minute",
                code="rate_limit_exceeded",
            )
        wait_s = await self.ledger.take(
            self.key.name, self._limits(self.key), requests=requests, tokens=tokens
        )
        if wait_s > 0:
            raise RateLimited(
                f"this API key may send {_shown(self.key.requests_per_minute)} requests and use "
                f"{_shown(most)} tokens a minute; try again in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )

    async def spend(self, tokens: int) -> None:
        """Count output tokens."""
        if self.key is not None and tokens:
            await self.ledger.spend(self.key.name, self._limits(self.key), tokens=tokens)

    @staticmethod
    def _limits(key: ApiKey) -> Limits:
        return Limits(key.requests_per_minute, key.tokens_per_minute)


def _secret(headers: Mapping[str, str]) -> str | None:
    """What the client sent as its key, in the header of either API."""
    given = headers.get("authorization", "")
    if given[: len(BEARER)].lower() == BEARER:
        return given[len(BEARER) :].strip()
    return headers.get("x-api-key")


def _shown(limit: int | None) -> str:
    return "any number of" if limit is None else str(limit)
