"""The frontend's one seam: an engine as the HTTP routes see it (contract: A2, A3).

Routes know this protocol and nothing of Ray, sockets or threads. Two clients implement it: the
Serve one (`router.py`) and the one of a single process (`inprocess.py`); tests bring a third.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec

from flare_ray.contracts.cache import CacheReset, CacheStats
from flare_ray.contracts.manifest import SamplingDefaults
from flare_ray.contracts.messages import Delta, Failed, Finished
from flare_ray.contracts.request import GenerationRequest
from flare_ray.contracts.tiers import Tier

StreamEvent = Delta | Finished | Failed
"""What a stream yields: any number of `Delta`, then exactly one `Finished` or `Failed`."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the routes must know of a ready engine; every value comes from its manifest.

    Attributes:
        engine_id: identity of the replica that answered.
        context_tokens: longest prompt plus output.
        max_prompt_tokens: longest prompt accepted, below `context_tokens`.
        vocab_size: rows of the vocabulary head; token ids of prompts and stops lie below it.
        sampling_defaults: the checkpoint's (contract: S3).
    """

    engine_id: str
    context_tokens: int
    max_prompt_tokens: int
    vocab_size: int
    sampling_defaults: SamplingDefaults


class RequestStream(Protocol):
    """Output of one admitted request."""

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        """The events, in order; iterated once."""

    def divert(self, bypass: Callable[[Delta], bool]) -> None:
        """Offer deltas to `bypass` first, from before the first event is read: those that arrive
        while the reader waits for one, having dealt with all before. What `bypass` takes is not
        yielded; what it raises is raised where the reader waits."""

    async def aclose(self) -> None:
        """Cancel the request if it still runs, and forget it; idempotent, never raises."""


class EngineClient(Protocol):
    """An engine, or several behind a router. Used by one event loop."""

    async def open(self, request: GenerationRequest) -> RequestStream:
        """Submit and wait for admission; no response has started before this returns.

        Raises:
            InvalidRequest: the engine refuses the request.
            Overloaded: no capacity, or no engine within the client's limit.
            RankFailure: the engine died before it emitted anything, twice.
        """

    async def info(self) -> EngineInfo:
        """Facts about a ready engine, fresh to within a second.

        Raises:
            Overloaded: status 503: no engine is ready (starting, or being rebuilt).
        """

    async def request_info(self) -> EngineInfo:
        """Facts with which a request is prepared before `open` submits it. Where engines are
        rebuilt or a busy one reports late, those of one that was ready a moment ago serve.

        Raises:
            Overloaded: status 503: no engine is ready, nor was one within the client's limit.
        """

    async def cache(self) -> list[CacheStats]:
        """The prefix cache of every engine."""

    async def reset_cache(self, tiers: frozenset[Tier]) -> list[CacheReset]:
        """Have every engine forget what it keeps in `tiers`; returns when all have.

        Raises:
            Overloaded: status 503: some engine did not answer.
        """

    async def metrics(self) -> str:
        """Prometheus text of every engine; equal whichever client is asked (contract: A5)."""
