"""`EngineClient` over an engine of the same process: `debug-serve` and tests (contract: G8).

The engine calls back on its controller's thread; items cross to the event loop with one
`call_soon_threadsafe` per burst, not per item.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from flare_ray.contracts.cache import CacheReset, CacheStats
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.messages import Admitted, Failed, Finished, StreamItem
from flare_ray.contracts.request import GenerationRequest
from flare_ray.contracts.tiers import Tier
from flare_ray.errors import Overloaded
from flare_ray.frontend.client import EngineInfo, StreamEvent
from flare_ray.frontend.openai.errors import UNAVAILABLE_RETRY_S
from flare_ray.frontend.stream import Bypass, Inbox, RequestItem, StreamTable, failure_error


class LocalEngine(Protocol):
    """The part of `actors.core.EngineCore` that serving in one process uses."""

    engine_id: str
    manifest: PreparedManifest

    @property
    def ready(self) -> bool:
        """A generation has gone through all ranks, and nothing has failed since."""

    @property
    def fatal(self) -> str:
        """What stopped the engine, "" while it is well."""

    def submit(self, request: GenerationRequest, on_item: Callable[[StreamItem], None]) -> None:
        """Hand over a request whose items go to `on_item`, called by another thread."""

    def cancel(self, request_id: str) -> None:
        """End a request; unknown ids are no error."""

    def cache_stats(self) -> CacheStats:
        """What the prefix cache holds and did."""

    def reset_cache(self, tiers: frozenset[Tier]) -> CacheReset:
        """Forget every kept prefix of some tiers; blocks until it is done."""


class InProcessClient:
    """Client of one engine; lives on the event loop that first uses it.

    Args:
        max_prompt_tokens: `admission.max_prompt_tokens`; None = context - 1.
        render_metrics: Prometheus text of this process.
    """

    def __init__(
        self,
        engine: LocalEngine,
        *,
        max_prompt_tokens: int | None,
        render_metrics: Callable[[], str],
    ) -> None:
        self._engine = engine
        self._max_prompt_tokens = max_prompt_tokens
        self._render_metrics = render_metrics
        self._table = StreamTable()
        self._crossing: _Crossing | None = None

    async def open(self, request: GenerationRequest) -> _LocalStream:
        """See `EngineClient.open`."""
        if self._crossing is None:
            self._crossing = _Crossing(asyncio.get_running_loop(), self._table)
        stream = _LocalStream(self._engine, self._table, request.request_id)
        try:
            self._engine.submit(request, self._crossing.put)
            stream.submitted = True
            await stream.admitted()
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def info(self) -> EngineInfo:
        """See `EngineClient.info`."""
        if not self._engine.ready:
            why = self._engine.fatal or "it is starting or stopping"
            raise Overloaded(
                f"the engine is not ready: {why}", retry_after_s=UNAVAILABLE_RETRY_S, status=503
            )
        return engine_info(self._engine.engine_id, self._engine.manifest, self._max_prompt_tokens)

    async def request_info(self) -> EngineInfo:
        """See `EngineClient.request_info`; an engine of this process that has ended stays so."""
        return await self.info()

    async def cache(self) -> list[CacheStats]:
        """See `EngineClient.cache`."""
        return [self._engine.cache_stats()]

    async def reset_cache(self, tiers: frozenset[Tier]) -> list[CacheReset]:
        """See `EngineClient.reset_cache`."""
        return [await asyncio.to_thread(self._engine.reset_cache, tiers)]

    async def metrics(self) -> str:
        """See `EngineClient.metrics`."""
        return self._render_metrics()


def engine_info(
    engine_id: str, manifest: PreparedManifest, max_prompt_tokens: int | None
) -> EngineInfo:
    """What routes need, from what preparation found out."""
    return EngineInfo(
        engine_id=engine_id,
        context_tokens=manifest.context_tokens,
        max_prompt_tokens=min(
            max_prompt_tokens or manifest.context_tokens, manifest.context_tokens - 1
        ),
        vocab_size=manifest.vocab_size,
        sampling_defaults=manifest.sampling_defaults,
    )


class _Crossing:
    """Carries items from the engine's thread to the event loop, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, table: StreamTable) -> None:
        self._loop = loop
        self._table = table
        self._items: deque[StreamItem] = deque()
        self._lock = threading.Lock()
        self._scheduled = False

    def put(self, item: StreamItem) -> None:
        """Called by the engine's thread; returns at once."""
        with self._lock:
            self._items.append(item)
            if self._scheduled:
                return
            self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop has closed: nobody is left to read, the process is going away.
            self._items.clear()

    def _deliver(self) -> None:
        with self._lock:
            items, self._items = self._items, deque()
            self._scheduled = False
        self._table.deliver(items)


class _LocalStream:
    """One request of an in-process engine.

    Attributes:
        submitted: the engine has taken the request, so that closing must cancel it.
    """

    def __init__(self, engine: LocalEngine, table: StreamTable, request_id: str) -> None:
        self._engine = engine
        self._table = table
        self._request_id = request_id
        self._inbox: Inbox = table.register(request_id)
        self._first: list[RequestItem] = []
        self.submitted = False
        self._ended = False
        self._closed = False

    async def admitted(self) -> None:
        """Wait for admission.

        Raises:
            FlareError: the request was refused or failed first.
        """
        head, *rest = await self._inbox.take()
        if isinstance(head, Failed):
            self._ended = True
            raise failure_error(head)
        if not isinstance(head, Admitted):
            rest.insert(0, head)
        self._first = rest

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        """See `RequestStream.__aiter__`."""
        pending, self._first = self._first, []
        while True:
            for item in pending:
                if isinstance(item, Admitted):
                    continue
                self._ended = isinstance(item, Finished | Failed)
                yield item
                if self._ended:
                    return
            pending = await self._inbox.take()

    def divert(self, bypass: Bypass) -> None:
        """See `RequestStream.divert`."""
        self._inbox.bypass = bypass

    async def aclose(self) -> None:
        """See `RequestStream.aclose`."""
        if self._closed:
            return
        self._closed = True
        self._inbox.bypass = None  # it leads back here
        self._table.forget(self._request_id)
        if self.submitted and not self._ended:
            self._engine.cancel(self._request_id)
