"""Channel (b), ingress's side: one ZeroMQ PULL socket for the output of all engines.

Batches are checked against their engine's start-up secret, lost ones are noticed by sequence
number, a silent engine by its missing heartbeats. Whatever goes wrong ends in a `Failed` item for
each request it concerns: a consumer never waits for ever.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from flare_ray.contracts.messages import (
    Admitted,
    Delta,
    Failed,
    Finished,
    Heartbeat,
    StreamBatch,
)

logger = logging.getLogger(__name__)

MAX_BATCH_BYTES = 4 * 1024 * 1024
"""Largest batch taken off the wire; 256 requests with eight tokens each need some 20 KiB."""
UNKNOWN_ENGINE_S = 1.0
"""Seconds for which an engine id without a secret is refused without asking again."""
MAX_UNKNOWN_ENGINES = 64
EVENTS, READABLE, AT_ONCE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
"""Of the library, as plain numbers: its enumerations cost more than what they are passed to."""

_decode = msgspec.msgpack.Decoder(StreamBatch).decode

ENDS = (Finished, Failed)
RequestItem = Admitted | Delta | Finished | Failed
SecretLookup = Callable[[str], Awaitable[bytes | None]]
"""Engine id -> its start-up secret, None if no such engine is known."""
Deliver = Callable[[Sequence[RequestItem]], None]
"""Takes items of expected requests, in order, on the receiver's event loop."""


@dataclass(slots=True)
class _Engine:
    """One engine whose secret is known.

    Attributes:
        requests: expected requests whose first item came from this engine.
    """

    secret: bytes
    sequence: int = 0
    seen_s: float = 0.0
    requests: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Expected:
    """One request whose output is awaited; engine_id is "" before its first item."""

    since_s: float
    engine_id: str = ""


class StreamReceiver:
    """PULL socket, bound to an ephemeral port of `host`; lives on one event loop.

    A request is expected from just before it is submitted until its `Finished` or `Failed` has been
    delivered or it is forgotten; items of other requests are dropped.

    Args:
        secret_of: finds an engine's secret the first time one of its batches arrives.
        deliver: takes the items of expected requests, and `Failed` items made here.
        host: address of this node that engines can reach.
        heartbeat_timeout_s: seconds without a batch after which an engine's requests end, and
            seconds that a request waits for its first item.

    Attributes:
        address: what a request carries as `reply_to`.
        refused: messages dropped because they were unreadable or carried no valid secret.
    """

    def __init__(
        self,
        secret_of: SecretLookup,
        deliver: Deliver,
        *,
        host: str,
        heartbeat_timeout_s: float,
    ) -> None:
        self._secret_of = secret_of
        self._hand_over = deliver
        self._timeout_s = heartbeat_timeout_s
        self._expected: dict[str, _Expected] = {}
        self._engines: dict[str, _Engine] = {}
        self._unknown: dict[str, float] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self.refused = 0
        self._watched: tuple[asyncio.AbstractEventLoop, int] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._finding: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to receive; call on the event loop that consumes the items."""
        # The library's own asyncio socket costs some 50 us a message, this a tenth of it.
        loop, descriptor = asyncio.get_running_loop(), int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(descriptor, self._receive)
        self._watched = loop, descriptor
        # What came before is not signalled again.
        loop.call_soon(self._receive)
        self._watching = asyncio.create_task(self._watch(), name="flare-stream-watch")

    async def close(self) -> None:
        """Stop receiving and end every expected request with an error; idempotent."""
        if self._watched is not None:
            loop, descriptor = self._watched
            loop.remove_reader(descriptor)
            self._watched = None
        tasks = [task for task in (self._watching, self._finding) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watching = None
        self._fail(list(self._expected), "the HTTP replica is shutting down")
        if not self._socket.closed:
            self._socket.close()
            self._context.term()

    def expect(self, request_id: str) -> None:
        """Await the output of a request about to be submitted with this receiver's address.

        Raises:
            ValueError: it is expected already.
        """
        if request_id in self._expected:
            raise ValueError(f"the output of request {request_id} is already expected")
        self._expected[request_id] = _Expected(time.monotonic())

    def forget(self, request_id: str) -> None:
        """Drop later items of the request. Idempotent."""
        expected = self._expected.pop(request_id, None)
        if expected is not None and (engine := self._engines.get(expected.engine_id)) is not None:
            engine.requests.discard(request_id)

    def __len__(self) -> int:
        """Requests expected."""
        return len(self._expected)

    def _receive(self) -> None:
        """Take what has arrived. The descriptor tells of a change, not of a state: read until there
        is nothing. While an engine is looked up, what came behind its first batch waits."""
        while self._watched is not None and self._finding is None:
            try:
                message = self._socket.recv(AT_ONCE)
            except zmq.Again:
                return
            try:
                self._take(message)
            except Exception:
                # One bad message must not end the output of all others.
                logger.exception("a message on the output stream could not be handled")
            # Asked, not tried: the exception costs three times as much.
            if not int(self._socket.getsockopt(EVENTS)) & READABLE:
                return

    def _take(self, message: bytes) -> None:
        try:
            batch = _decode(message)
        except msgspec.MsgspecError as error:
            self._refuse(f"unreadable message of {len(message)} bytes: {error}")
            return
        engine = self._engines.get(batch.engine_id)
        if engine is None:
            self._finding = asyncio.create_task(self._take_from_unknown(batch))
        else:
            self._accept(batch, engine)

    async def _take_from_unknown(self, batch: StreamBatch) -> None:
        try:
            engine = await self._find(batch.engine_id)
            if engine is None:
                self._refuse("message without a valid engine secret")
            else:
                self._accept(batch, engine)
        except Exception:
            logger.exception("an engine on the output stream could not be looked up")
        finally:
            self._finding = None
        self._receive()

    def _accept(self, batch: StreamBatch, engine: _Engine) -> None:
        """Hand over the items of a batch that says it is from `engine`."""
        if not hmac.compare_digest(engine.secret, batch.secret):
            self._refuse("message without a valid engine secret")
            return
        engine.seen_s = time.monotonic()
        if batch.sequence != engine.sequence + 1:
            self._fail(
                list(engine.requests),
                f"output of engine {batch.engine_id} was lost: batch {batch.sequence} came after "
                f"{engine.sequence}",
            )
        engine.sequence = batch.sequence
        wanted: list[RequestItem] = []
        ended: list[str] = []
        for item in batch.items:
            if isinstance(item, Heartbeat):
                continue
            if self._is_expected(item.request_id, batch.engine_id, engine):
                wanted.append(item)
                if isinstance(item, ENDS):
                    ended.append(item.request_id)
        if wanted:
            self._hand_over(wanted)
        for request_id in ended:
            self.forget(request_id)

    def _is_expected(self, request_id: str, engine_id: str, engine: _Engine) -> bool:
        expected = self._expected.get(request_id)
        if expected is None:
            return False  # the client has gone; its cancellation is under way
        if expected.engine_id == engine_id:
            return True
        if not expected.engine_id:
            expected.engine_id = engine_id
            engine.requests.add(request_id)
            return True
        logger.warning(
            "engine %s sent output of request %s, which engine %s serves; dropped",
            engine_id,
            request_id,
            expected.engine_id,
        )
        return False

    async def _find(self, engine_id: str) -> _Engine | None:
        now = time.monotonic()
        if now < self._unknown.get(engine_id, 0.0):
            return None
        secret = await self._secret_of(engine_id)
        if secret is None:
            if len(self._unknown) >= MAX_UNKNOWN_ENGINES:
                del self._unknown[next(iter(self._unknown))]
            self._unknown[engine_id] = now + UNKNOWN_ENGINE_S
            return None
        # Engines that have been silent for long and serve nobody here were replaced.
        for old in [i for i, e in self._engines.items() if self._is_silent(e) and not e.requests]:
            del self._engines[old]
        engine = self._engines[engine_id] = _Engine(secret)
        return engine

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(self._timeout_s / 4, 1.0))
            for engine_id, engine in self._engines.items():
                if engine.requests and self._is_silent(engine):
                    self._fail(
                        list(engine.requests),
                        f"no heartbeat from engine {engine_id} for {self._timeout_s} s",
                    )
            now = time.monotonic()
            late = [
                request_id
                for request_id, expected in self._expected.items()
                if not expected.engine_id and now - expected.since_s > self._timeout_s
            ]
            self._fail(late, f"no engine acknowledged the request within {self._timeout_s} s")

    def _is_silent(self, engine: _Engine) -> bool:
        return time.monotonic() - engine.seen_s > self._timeout_s

    def _fail(self, request_ids: list[str], message: str) -> None:
        for request_id in request_ids:
            logger.error("request %s: %s", request_id, message)
            emitted = bool(self._expected[request_id].engine_id)
            # Forgotten first: whoever takes the item may expect the same request again.
            self.forget(request_id)
            failed = Failed(request_id, "rank_failure", message, status=503, emitted=emitted)
            self._hand_over([failed])

    def _refuse(self, why: str) -> None:
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:  # 1st, 2nd, 4th, 8th ...: never a log storm
            logger.warning("output stream: %s (%d refused so far)", why, self.refused)
