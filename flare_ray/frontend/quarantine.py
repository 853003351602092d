"""Requests that engines died of are not run for ever (contract: A4).

A client that gets an error sends the same request again, often by itself. One that was running when
an engine died, twice, is refused for a while: whatever is wrong with it then costs two engines and
not one a minute. Requests that merely ran beside it at both deaths are refused too, with the same
words; another wording, or a little patience, gets them through.

Each HTTP replica keeps its own list, in memory: a restart forgets it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from flare_ray.contracts.request import GenerationRequest
from flare_ray.errors import InvalidRequest

logger = logging.getLogger("ray.serve.flare")

FATAL_DEATHS = 2
"""Engines that died while a request ran, after which it is refused."""
QUARANTINE_S = 300.0
MAX_SUSPECTS = 1024
ONE_DEATH_S = 2.0
"""Choices of one request that report within this time saw the same engine die."""


@dataclass(slots=True)
class _Suspect:
    """What is held against one request: deaths, and when the last one was."""

    deaths: int = 0
    last_s: float = 0.0


class Quarantine:
    """Deaths by request. One event loop's.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that engines died of.

        Raises:
            InvalidRequest: status 422.
        """
        if not self._suspects:
            return
        key = _fingerprint(request)
        suspect = self._suspects.get(key)
        if suspect is None:
            return
        left_s = suspect.last_s + QUARANTINE_S - self._clock()
        if left_s <= 0:
            del self._suspects[key]
        elif suspect.deaths >= FATAL_DEATHS:
            raise InvalidRequest(
                f"engines died {suspect.deaths} times while this very request was running; it is "
                f"not run again for {left_s:.0f} s: change it, or tell the operator",
                code="quarantined_request",
                status=422,
            )

    def died(self, request: GenerationRequest) -> None:
        """The engine that ran a request has died."""
        key, now_s = _fingerprint(request), self._clock()
        suspect = self._suspects.setdefault(key, _Suspect())
        self._suspects.move_to_end(key)
        if len(self._suspects) > MAX_SUSPECTS:
            self._suspects.popitem(last=False)
        if suspect.deaths and now_s - suspect.last_s < ONE_DEATH_S:
            return
        suspect.deaths += 1
        suspect.last_s = now_s
        if suspect.deaths == FATAL_DEATHS:
            logger.error(
                "request %s was running when an engine died for the second time; it is refused "
                "for %.0f s",
                request.request_id,
                QUARANTINE_S,
            )

    def survived(self, request: GenerationRequest) -> None:
        """An engine has run a request to its end: it was not to blame."""
        if self._suspects:
            self._suspects.pop(_fingerprint(request), None)


def _fingerprint(request: GenerationRequest) -> bytes:
    """Equal for requests that ask an engine for the same work, whoever sends them."""
    work = msgspec.structs.replace(
        request,
        request_id="",
        reply_to="",
        priority=0,
        cache_salt="",
        session="",
        sampling=msgspec.structs.replace(request.sampling, seed=0),
    )
    return hashlib.blake2b(msgspec.msgpack.encode(work), digest_size=16).digest()
