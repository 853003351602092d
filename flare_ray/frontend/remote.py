"""`EngineClient` over engines of other processes: submission, output stream, retry (contract: A4).

One request is one open call (routing, back-pressure, fault) beside one inbox on the replica's
output stream. Which library carries the call is not known here; `router.py` brings Ray Serve.

A request whose engine dies is run at most twice, and only while nothing of it has been shown:

    submit -> not admitted, the engine is dead or gone   -> wait for a ready engine, submit again,
              until OPEN_LIMIT_S
           -> refused (bad request, overload)            -> the caller gets the refusal
           -> admitted -> dies before the first delta    -> as above, once
                       -> dies after it                  -> `Failed`, the response ends in an error

A request that was running at two deaths is refused from then on (`quarantine`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import msgspec

from flare_ray.contracts.cache import CacheReset, CacheStats
from flare_ray.contracts.messages import Admitted, Delta, Failed, Finished
from flare_ray.contracts.request import GenerationRequest
from flare_ray.contracts.tiers import Tier
from flare_ray.errors import FlareError, InvalidRequest, Overloaded
from flare_ray.frontend.client import EngineInfo, StreamEvent
from flare_ray.frontend.openai.errors import UNAVAILABLE_RETRY_S
from flare_ray.frontend.quarantine import Quarantine
from flare_ray.frontend.stream import Bypass, Inbox, RequestItem, StreamTable, failure_error

logger = logging.getLogger("ray.serve.flare")

OPEN_LIMIT_S = 60.0
"""Seconds within which a request whose engine is away must be admitted elsewhere."""
RETRY_PAUSE_S = 0.5
LATE_LIMIT_S = 5.0
"""Seconds that a request waits for the first sight of an engine; reports come each second."""
INFO_AGE_S = 1.0
"""Age up to which facts about a ready engine are reused."""
SHUTTING_DOWN = "the service is shutting down"
CALL_GRACE_S = 0.25
"""Seconds that a failed call leaves its last items on the stream to arrive first."""


class SubmitCall(Protocol):
    """One open call to an engine."""

    async def result(self) -> Finished | Failed:
        """How the request ended; a lost engine is a `Failed` with the code rank_failure."""

    def cancel(self) -> None:
        """Give the call up, which cancels the request in the engine; idempotent."""


class OutputStream(Protocol):
    """The replica's receiving side (`actors.stream_receiver.StreamReceiver`)."""

    address: str

    def expect(self, request_id: str) -> None:
        """Take items of a request about to be submitted."""

    def forget(self, request_id: str) -> None:
        """Drop later items; idempotent."""


class EngineCaches(Protocol):
    """Prefix caches of all engines, as `EngineClient` asks for them."""

    async def cache(self) -> list[CacheStats]:
        """See `EngineClient.cache`."""

    async def reset_cache(self, tiers: frozenset[Tier]) -> list[CacheReset]:
        """See `EngineClient.reset_cache`."""


class RemoteClient:
    """Client of the engines behind `submit`.

    Args:
        submit: begins a call; routes it to some engine.
        table: what `outputs` delivers to.
        find: facts about a ready engine, None if there is none.
        metrics: Prometheus text of all engines.
        caches: prefix caches of all engines; None where administration is served elsewhere.

    Attributes:
        calls: watchers of open calls; held here so that one outlives the stream it belongs to.
        draining: no new request is taken; those that are open go on.
        streams: open requests.
        quarantine: what engines died of.
    """

    def __init__(
        self,
        *,
        submit: Callable[[GenerationRequest], SubmitCall],
        outputs: OutputStream,
        table: StreamTable,
        find: Callable[[], Awaitable[EngineInfo | None]],
        metrics: Callable[[], Awaitable[str]],
        caches: EngineCaches | None = None,
    ) -> None:
        self.submit = submit
        self.outputs = outputs
        self.table = table
        self._find = find
        self._metrics = metrics
        self._caches = caches
        self.calls: set[asyncio.Task[None]] = set()
        self.draining = False
        self.streams: set[RemoteStream] = set()
        self.quarantine = Quarantine()
        self._lookup = asyncio.Lock()
        self._known: EngineInfo | None = None
        self._known_s = -INFO_AGE_S
        self._last: EngineInfo | None = None
        self._last_s = 0.0

    async def open(self, request: GenerationRequest) -> RemoteStream:
        """See `EngineClient.open`."""
        self.quarantine.check(request)
        stream = RemoteStream(self, request)
        self.streams.add(stream)
        try:
            await stream.admit()
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def info(self) -> EngineInfo:
        """See `EngineClient.info`."""
        self._check_open()
        return await self._engine_info()

    async def request_info(self) -> EngineInfo:
        """See `EngineClient.request_info`; the call then waits in `open` as it would had the engine
        died a moment later."""
        self._check_open()
        try:
            return await self._engine_info()
        except Overloaded:
            if self._last is not None and time.monotonic() - self._last_s < OPEN_LIMIT_S:
                return self._last
        # This replica has seen none so far: a report may be late on a busy host.
        await self.wait_ready(time.monotonic() + LATE_LIMIT_S)
        return await self._engine_info()

    def end_all(self) -> None:
        """End every open request with an error: the service stops now."""
        for stream in self.streams:
            stream.end(SHUTTING_DOWN + "; this request was still running at its time limit")

    def _check_open(self) -> None:
        if self.draining:
            raise Overloaded(
                SHUTTING_DOWN + " and takes no new requests",
                retry_after_s=UNAVAILABLE_RETRY_S,
                status=503,
            )

    async def _engine_info(self) -> EngineInfo:
        async with self._lookup:
            if time.monotonic() - self._known_s >= INFO_AGE_S:
                self._known = await self._find()
                self._known_s = time.monotonic()
            if self._known is not None:
                self._last, self._last_s = self._known, self._known_s
        if self._known is None:
            raise Overloaded(
                "no engine is ready: it is starting, or being rebuilt after a failure",
                retry_after_s=UNAVAILABLE_RETRY_S,
                status=503,
            )
        return self._known

    async def cache(self) -> list[CacheStats]:
        """See `EngineClient.cache`."""
        return await self._engine_caches().cache()

    async def reset_cache(self, tiers: frozenset[Tier]) -> list[CacheReset]:
        """See `EngineClient.reset_cache`."""
        return await self._engine_caches().reset_cache(tiers)

    def _engine_caches(self) -> EngineCaches:
        if self._caches is None:
            raise InvalidRequest("this replica does not administer engines", status=404)
        return self._caches

    async def metrics(self) -> str:
        """See `EngineClient.metrics`."""
        return await self._metrics()

    async def wait_ready(self, deadline_s: float) -> None:
        """Pause, then wait until an engine is ready or `deadline_s` (monotonic) has passed."""
        while True:
            await asyncio.sleep(RETRY_PAUSE_S)
            try:
                await self._engine_info()
            except Overloaded:
                if time.monotonic() < deadline_s:
                    continue
            return


class _Attempt:
    """One submission of a request under an id of its own: late items of a dead engine must not
    be taken for output of the next attempt."""

    def __init__(self, client: RemoteClient, request: GenerationRequest, number: int) -> None:
        self._client = client
        self.wire_id = request.request_id if number == 0 else f"{request.request_id}~{number}"
        self.inbox: Inbox = client.table.register(self.wire_id)
        client.outputs.expect(self.wire_id)
        self._call = client.submit(
            msgspec.structs.replace(
                request, request_id=self.wire_id, reply_to=client.outputs.address
            )
        )
        self._task = asyncio.create_task(self._watch())
        client.calls.add(self._task)
        self._task.add_done_callback(client.calls.discard)

    async def _watch(self) -> None:
        """A call that ends badly ends the stream, if the stream does not say so itself."""
        result = await self._call.result()
        if isinstance(result, Failed):
            await asyncio.sleep(CALL_GRACE_S if self.inbox.heard else 0)
            self.inbox.put(result)
        # After `Finished` the last batch is still on its way; a lost one is noticed by the
        # receiver, which then fails the request.

    async def first(self, deadline_s: float) -> list[RequestItem]:
        """The first items: led by `Admitted`, or by the `Failed` that ended the attempt."""
        while True:
            items = await self.inbox.take()
            head = items[0]
            unheard = isinstance(head, Failed) and head.code == "rank_failure"
            if not unheard or self._task.done() or time.monotonic() >= deadline_s:
                return items
            # Only the receiver lost patience: the call still waits for an engine to be rebuilt.
            self._forget()
            self.inbox = self._client.table.register(self.wire_id)
            self._client.outputs.expect(self.wire_id)

    def close(self, *, finished: bool) -> None:
        """Forget the request, and cancel it unless it has finished: then its call is about to
        return by itself."""
        self._forget()
        if not finished:
            self._call.cancel()
            self._task.cancel()
        # Both lead back here, and what is left of a stream would wait for the collector.
        self.inbox.bypass = None
        del self._task

    def _forget(self) -> None:
        self._client.table.forget(self.wire_id)
        self._client.outputs.forget(self.wire_id)


class RemoteStream:
    """Output of one request, over as many attempts as it takes."""

    def __init__(self, client: RemoteClient, request: GenerationRequest) -> None:
        self._client = client
        self._request = request
        self._attempt: _Attempt | None = None
        self._number = 0
        self._admissions = 0
        self._pending: list[RequestItem] = []
        self._bypass: Bypass | None = None
        self._finished = False
        self._ended: Failed | None = None

    def end(self, why: str) -> None:
        """End the request with an error where it stands; idempotent."""
        if self._ended is None:
            self._ended = Failed(
                self._request.request_id,
                "overloaded",
                why,
                status=503,
                retry_after_s=UNAVAILABLE_RETRY_S,
            )
            if self._attempt is not None:
                self._attempt.inbox.put(self._ended)

    async def admit(self) -> None:
        """Submit until an engine admits the request.

        Raises:
            FlareError: it was refused, or no engine took it in OPEN_LIMIT_S.
        """
        deadline_s = time.monotonic() + OPEN_LIMIT_S
        while True:
            if self._ended is not None:
                raise failure_error(self._ended)
            self._attempt = _Attempt(self._client, self._request, self._number)
            self._number += 1
            items = await self._attempt.first(deadline_s)
            head = items[0]
            if not isinstance(head, Failed):
                self._admissions += 1
                self._pending = items
                return
            self._drop_attempt()
            # An engine that is leaving refuses with 503; once waiting, a request waits that out.
            gone = head.code == "rank_failure" or (head.status == 503 and self._number > 1)
            if not gone or self._ended is not None or time.monotonic() >= deadline_s:
                raise failure_error(head)
            logger.warning(
                "request %s waits for another engine: %s", self._request.request_id, head.message
            )
            await self._client.wait_ready(deadline_s)

    def divert(self, bypass: Bypass) -> None:
        """See `RequestStream.divert`."""
        self._bypass = bypass

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        """See `RequestStream.__aiter__`."""
        shown = False
        while True:
            items, self._pending = self._pending, []
            for item in items:
                if isinstance(item, Delta):
                    shown = True
                    yield item
                    continue
                if isinstance(item, Admitted):
                    continue
                if isinstance(item, Failed) and await self._readmitted(
                    item, shown=shown or self._inbox.bypassed
                ):
                    break
                self._finished = isinstance(item, Finished)
                if self._finished:
                    self._client.quarantine.survived(self._request)
                yield item
                return
            if not self._pending:
                self._inbox.bypass = self._bypass
                self._pending = await self._inbox.take()

    @property
    def _inbox(self) -> Inbox:
        assert self._attempt is not None
        return self._attempt.inbox

    async def aclose(self) -> None:
        """See `RequestStream.aclose`."""
        self._drop_attempt()
        self._bypass = None
        self._client.streams.discard(self)

    async def _readmitted(self, failed: Failed, *, shown: bool) -> bool:
        """Run a request that lost its engine once more, if nothing of it has been shown.

        Returns:
            False: `failed` stands.
        """
        if failed.code == "rank_failure":
            self._client.quarantine.died(self._request)
        if shown or failed.code != "rank_failure" or self._admissions > 1:
            return False
        self._drop_attempt()
        await self._client.wait_ready(time.monotonic() + OPEN_LIMIT_S)
        try:
            await self.admit()
        except FlareError as error:
            logger.warning("request %s was not taken again: %s", self._request.request_id, error)
            return False
        return True

    def _drop_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.close(finished=self._finished)
            self._attempt = None
