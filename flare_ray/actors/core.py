"""One engine without Ray: channel, controller thread, delivery, health (contract: A1, A4).

The Ray shell (`engine.py`), the single-process server and the offline class all hold one
`EngineCore`. It owns the controller's thread and who is told of which item; it owns neither how
ranks are started nor how they are killed, which come in as `EngineParts`.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from flare_ray.actors.wire import check_message_bounds
from flare_ray.config import EngineConfig
from flare_ray.config.live import LiveSettings
from flare_ray.contracts.cache import ALL_TIERS, CacheReset, CacheStats
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.messages import Failed, Finished, Heartbeat, StreamItem
from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from flare_ray.contracts.routing import Choice
from flare_ray.contracts.tiers import Tier
from flare_ray.controller.grammar.matcher import GrammarService
from flare_ray.controller.loop import Controller, ControllerStats
from flare_ray.controller.ports import OutputPort, RankChannel
from flare_ray.errors import InvalidRequest, Overloaded, RankFailure
from flare_ray.metrics import names
from flare_ray.metrics.recorder import Recorder, Snapshot

logger = logging.getLogger("ray.serve.flare")
"""Below `ray.serve`, whose handlers a Serve replica configures; an ordinary logger elsewhere."""

STOP_LIMIT_S = 10.0
"""Seconds for the controller's thread to end once it no longer drains."""
RESET_LOOK_S = 0.5
"""Between two looks whether the controller that was asked for a reset is still there."""
READINESS_LIMIT_S = 120.0
"""Seconds for the first generation; on CUDA it is the first replay of every kind of graph it
needs."""

_ENDS = (Finished, Failed)
"""Kinds of a request's last item."""

OnItem = Callable[[StreamItem], None]
"""Told of a request's items by the controller's thread; must return at once and not raise."""


def new_engine_id() -> str:
    """Identity of an engine replica; a new one after each restart."""
    return secrets.token_hex(6)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an `EngineCore` is made of.

    Attributes:
        channel: ranks that have been prepared and agree on `manifest`.
        token_bytes: bytes by token id (`controller.grammar.token_bytes`).
        release_ranks: ends the ranks at once, without waiting for them to agree; called once, from
            the controller's thread after a fault or from `shutdown`, before the channel is closed.
        health_timeout_s: seconds without a finished round, while work is pending, that count as a
            hang.
        grammars: for constrained requests, closed by `shutdown`; None = `no_grammars` says why.
    """

    manifest: PreparedManifest
    config: EngineConfig
    channel: RankChannel
    token_bytes: Sequence[bytes]
    release_ranks: Callable[[], None]
    health_timeout_s: float
    grammars: GrammarService | None = None
    no_grammars: str = "this engine has none"
    engine_id: str = field(default_factory=new_engine_id)


class StreamPort(OutputPort, Protocol):
    """An `OutputPort` to other processes; `stream.StreamSender` in a deployment."""

    on_lost: Callable[[str], None]
    """Set by the engine; called by `send` with an address that no longer takes its items."""

    def close(self) -> None:
        """Let queued items leave for a moment, then close; idempotent."""


@dataclass(slots=True)
class _Open:
    """One live request: who is told, and where its stream goes."""

    reply_to: str
    on_item: OnItem


class Delivery:
    """`OutputPort` that sorts items to remote streams and local callbacks.

    A request with a reply address sends its items there, and only its last one to its callback; a
    local request sends all to its callback. `open` and `close` may be called from any thread.
    """

    def __init__(self, stream: OutputPort | None) -> None:
        self._stream = stream
        self._open: dict[str, _Open] = {}

    def open(self, request: GenerationRequest, on_item: OnItem) -> None:
        """Expect items of `request`.

        Raises:
            InvalidRequest: its id is in use, or it has a reply address and this engine no stream.
        """
        if request.reply_to and self._stream is None:
            raise InvalidRequest(
                f"request {request.request_id} names the stream {request.reply_to}, but this "
                "engine serves its own process only"
            )
        mine = _Open(request.reply_to, on_item)
        if self._open.setdefault(request.request_id, mine) is not mine:
            raise InvalidRequest(
                f"a live request has the id {request.request_id}; use another",
                param="request_id",
                code="duplicate_request_id",
                status=409,
            )

    def close(self, request_id: str) -> None:
        """Forget a request that was never taken."""
        self._open.pop(request_id, None)

    def of_address(self, reply_to: str) -> list[str]:
        """Live requests that stream to `reply_to`."""
        return [name for name, entry in list(self._open.items()) if entry.reply_to == reply_to]

    def remaining(self) -> list[tuple[str, str]]:
        """Live requests and their addresses."""
        return [(name, entry.reply_to) for name, entry in list(self._open.items())]

    def send(self, reply_to: str, items: tuple[StreamItem, ...]) -> None:
        """Deliver one round's items for one address; never blocks."""
        if reply_to and self._stream is not None:
            self._stream.send(reply_to, items)
        for item in items:
            if isinstance(item, _ENDS):
                entry = self._open.pop(item.request_id, None)
            elif reply_to or isinstance(item, Heartbeat):
                continue
            else:
                entry = self._open.get(item.request_id)
            if entry is None:
                continue
            try:
                entry.on_item(item)
            except Exception:
                # One consumer's fault must not stop the rounds of all others.
                logger.exception("the consumer of request %s failed", item.request_id)


class EngineCore:
    """A running engine.

    Threads: `submit`, `cancel`, `health`, `stats`, `snapshot` from any; `start` and `shutdown` from
    the owner's.

    Args:
        stream: port of requests with a reply address, closed by `shutdown`; None = local requests
            only.

    Raises:
        ConfigError: plans of this preparation could not be sent, or the settings select what was
            not prepared.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        stream: StreamPort | None = None,
    ) -> None:
        check_message_bounds(parts.manifest)
        self.parts = parts
        self.engine_id = parts.engine_id
        self.manifest = parts.manifest
        self.recorder = Recorder("engine", parts.engine_id)
        self._stream = stream
        if stream is not None:
            stream.on_lost = self._cancel_address
        self._delivery = Delivery(stream)
        self._controller = Controller(
            parts.manifest,
            parts.config,
            channel=parts.channel,
            output=self._delivery,
            token_bytes=parts.token_bytes,
            recorder=self.recorder,
        )
        self._controller.use_grammars(parts.grammars, parts.no_grammars)
        self._release_lock = threading.Lock()
        self._released = False
        self._stopping = False
        self._crash = ""
        self._ready = False
        self._thread = threading.Thread(
            target=self._run, name=f"flare-controller-{self.engine_id}", daemon=True
        )

    @property
    def ready(self) -> bool:
        """One generation has gone through all ranks, and nothing has failed since."""
        return self._ready and not self.fatal and not self._stopping

    @property
    def fatal(self) -> str:
        """What stopped the engine, "" while it is well."""
        return self._crash or self._controller.stats().fatal

    def start(self, *, limit_s: float = READINESS_LIMIT_S) -> None:
        """Start the controller and generate once through all ranks (contract: A4).

        Raises:
            RankFailure: the generation failed or did not end in `limit_s`; the ranks are released.
        """
        self._thread.start()
        done = threading.Event()
        last: list[StreamItem] = []

        def note(item: StreamItem) -> None:
            if isinstance(item, Finished | Failed):
                last.append(item)
                done.set()

        try:
            self.submit(self._readiness_request(), note)
            finished = done.wait(limit_s)
            if not finished or isinstance(last[0], Failed):
                why = self.fatal or (
                    last[0].message
                    if finished and isinstance(last[0], Failed)
                    else f"no answer within {limit_s} s"
                )
                raise RankFailure(
                    f"the first generation through all ranks failed: {why}", rank=-1, round_id=-1
                )
        except BaseException:
            self.shutdown(0.0)
            raise
        self._ready = True
        logger.info("engine %s is ready: %d ranks", self.engine_id, self.manifest.world_size)

    def submit(self, request: GenerationRequest, on_item: OnItem) -> None:
        """Hand `request` to the controller.

        Args:
            on_item: gets every item of a local request; only `Finished` or `Failed` of one that has
                a reply address.

        Raises:
            InvalidRequest: the id is in use.
            Overloaded: the engine is stopping.
            RankFailure: it has failed.
        """
        if self._stopping:
            raise Overloaded("the engine is shutting down", retry_after_s=1.0, status=503)
        self._raise_if_crashed()
        self._delivery.open(request, on_item)
        try:
            self._controller.submit(request)
        except BaseException:
            self._delivery.close(request.request_id)
            raise
        if not self._thread.is_alive():
            # The loop ended between the check and the hand-over: nobody would answer.
            self._fail_remaining(self.fatal or "the engine has shut down", remote=False)

    def cancel(self, request_id: str) -> None:
        """End a request; it gets `Failed(code="cancelled")`. Unknown ids are no error."""
        self._controller.cancel(request_id)

    def reconfigure(self, settings: LiveSettings) -> None:
        """Change what may change between two rounds; in force from the next one on.

        Raises:
            ConfigError: the settings ask for more than the engine was started for.
        """
        self._controller.reconfigure(settings)

    def stats(self) -> ControllerStats:
        """Counts of the controller, at once."""
        return self._controller.stats()

    def count_route(self, choice: Choice) -> None:
        """A router has sent a request here; one thread."""
        self.recorder.counter(names.ROUTED_REQUESTS, choice).add()

    def snapshot(self) -> Snapshot:
        """The engine's metrics, at once."""
        return self.recorder.snapshot()

    def cache_stats(self) -> CacheStats:
        """What the prefix cache holds and did, at once."""
        return msgspec.structs.replace(self._controller.cache.stats(), engine_id=self.engine_id)

    def reset_cache(self, tiers: frozenset[Tier] = ALL_TIERS) -> CacheReset:
        """Forget every kept prefix of some tiers; returns when it is done.

        Raises:
            RankFailure: the engine has failed or stops.
        """
        done = threading.Event()
        results: list[CacheReset] = []

        def note(reset: CacheReset) -> None:
            results.append(reset)
            done.set()

        self._controller.cache.reset(tiers, note)
        self.parts.channel.wake()
        while not done.wait(RESET_LOOK_S):
            if not self._thread.is_alive():
                raise RankFailure(self.fatal or "the engine has stopped", rank=-1, round_id=-1)
        return msgspec.structs.replace(results[0], engine_id=self.engine_id)

    def health(self) -> None:
        """Return if rounds make progress; never waits for one.

        Raises:
            RankFailure: the engine has failed, its controller's thread has ended, or work has been
                pending for `health_timeout_s` without a finished round.
        """
        if fatal := self.fatal:
            raise RankFailure(fatal, rank=-1, round_id=-1)
        if self._ready and not self._stopping and not self._thread.is_alive():
            raise RankFailure("the controller's thread has ended", rank=-1, round_id=-1)
        stats = self._controller.stats()
        age_s = (time.monotonic_ns() - stats.last_progress_ns) / 1e9
        if stats.pending_work and age_s > self.parts.health_timeout_s:
            raise RankFailure(
                f"no round has finished for {age_s:.1f} s with {stats.running} requests running "
                f"and {stats.waiting} waiting; at most {self.parts.health_timeout_s} s",
                rank=-1,
                round_id=stats.rounds,
            )

    def shutdown(self, drain_s: float) -> None:
        """Refuse new requests, let live ones end for at most `drain_s`, then stop everything.

        Idempotent; requests that are not done by then get `Failed`.
        """
        self._stopping = True
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            if drain_s > 0:
                self._controller.stop(drain=True)
                self._thread.join(drain_s)
            self._controller.stop(drain=False)
            self._thread.join(STOP_LIMIT_S)
            if self._thread.is_alive():
                logger.error(
                    "engine %s: the controller did not stop in %.0f s; its ranks are killed",
                    self.engine_id,
                    STOP_LIMIT_S,
                )
        self._release()
        self._fail_remaining("the engine has shut down", remote=not self._thread.is_alive())
        if self._stream is not None and not self._thread.is_alive():
            self._stream.close()

    def _run(self) -> None:
        try:
            self._controller.run()
        except BaseException as error:
            # The loop reports rank faults by itself; this is a fault of our own code.
            logger.exception("engine %s: the controller failed", self.engine_id)
            self._crash = f"the controller failed: {type(error).__name__}: {error}"
        else:
            if not self._stopping and not self._controller.stats().fatal:
                self._crash = "the controller's loop ended without being asked to"
        if self.fatal:
            logger.error("engine %s stopped: %s", self.engine_id, self.fatal)
            self._fail_remaining(self.fatal, remote=True)
            self._release()

    def _raise_if_crashed(self) -> None:
        if self._crash:
            raise RankFailure(self._crash, rank=-1, round_id=-1)

    def _release(self) -> None:
        """Let go of the ranks, once, whoever comes first."""
        with self._release_lock:
            if self._released:
                return
            self._released = True
        self.parts.release_ranks()
        self.parts.channel.close()
        # Not earlier: whoever takes the directory next must not meet a rank that still writes.
        self._controller.cache.close()
        if self.parts.grammars is not None:
            self.parts.grammars.close()

    def _fail_remaining(self, message: str, *, remote: bool) -> None:
        """End what the controller could not: a request is never left without an answer.

        Args:
            remote: also on its stream; only while no other thread uses the stream.
        """
        for request_id, reply_to in self._delivery.remaining():
            failed = Failed(request_id, "rank_failure", message, status=503, emitted=True)
            self._delivery.send(reply_to if remote else "", (failed,))

    def _cancel_address(self, reply_to: str) -> None:
        for request_id in self._delivery.of_address(reply_to):
            self.cancel(request_id)

    def _readiness_request(self) -> GenerationRequest:
        """A prompt of one token and enough output for a round of the largest width."""
        manifest = self.manifest
        tokens = min(manifest.draft_tokens + 2, manifest.context_tokens - 1)
        return GenerationRequest(
            request_id=f"readiness-{self.engine_id}",
            prompt_tokens=(0,),
            sampling=SamplingSpec(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed=0),
            max_tokens=tokens,
            ignore_eos=True,
        )
