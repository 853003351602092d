"""The controller: one thread that decides every round of one engine (contract: C1, T6, T7).

It owns requests, slots, pages and widths; it owns no transport (`RankChannel`), no delivery
(`OutputPort`) and no tensor. One iteration, `step`:

    receive commands -> end overdue requests -> admit -> plan and submit -> publish
    -> harvest the oldest round

Publication comes after submission so that the ranks already run the next round while consumers are
told about the last one.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from flare_ray.config import EngineConfig
from flare_ray.config.live import LiveSettings
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.messages import Failed
from flare_ray.contracts.record import Proposals
from flare_ray.contracts.request import GenerationRequest
from flare_ray.controller.admission import Admission
from flare_ray.controller.cache import PrefixCache
from flare_ray.controller.catalog import serve_selection
from flare_ray.controller.cohort import Planner, SubmittedRound
from flare_ray.controller.grammar.gate import GrammarGate, Outcome
from flare_ray.controller.grammar.masks import MaskWriter
from flare_ray.controller.grammar.matcher import GrammarService
from flare_ray.controller.harvest import Harvester
from flare_ray.controller.intake import Command, Intake, IntakePorts
from flare_ray.controller.integrity import request_problems
from flare_ray.controller.live import LiveRequest, Phase
from flare_ray.controller.meters import Meters
from flare_ray.controller.paging.chain import TokenChain
from flare_ray.controller.paging.freed import FreedSince
from flare_ray.controller.paging.pool import PagePool
from flare_ray.controller.parts import (
    admission_limits,
    check_settings,
    copying_of,
    drain_rate,
    plan_rules,
    verification_policy,
)
from flare_ray.controller.ports import OutputPort, RankChannel, RoundResult
from flare_ray.controller.publication import Publisher
from flare_ray.controller.stops import OutputStops
from flare_ray.controller.tuning import Tuning
from flare_ray.errors import (
    ContractViolation,
    InvalidRequest,
    Overloaded,
    RankFailure,
)
from flare_ray.metrics.recorder import Recorder

logger = logging.getLogger(__name__)

MAX_WAIT_S = 1.0
"""Longest sleep of an idle loop; commands wake it earlier."""
CLIENT_GONE = 499
GATEWAY_TIMEOUT = 504
UNAVAILABLE = 503


class ControllerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Where the controller stands; read by health checks and `top` from any thread.

    Attributes:
        running: requests that hold a slot.
        waiting / waiting_tokens: admitted requests without a slot / their prompts and budgets.
        free_pages / total_pages: pages nobody holds or has been promised / pages of the pool, the
            null page excluded.
        rounds: programs harvested since the start, prefill included.
        last_progress_ns: clock reading when a round was last harvested or work last began.
        pending_work: some request is live; with it, an old `last_progress_ns` means a hang.
        fatal: text of the failure that ended the loop, "" while it is well.
    """

    running: int
    waiting: int
    waiting_tokens: int
    free_pages: int
    total_pages: int
    rounds: int
    last_progress_ns: int
    pending_work: bool
    fatal: str


class Controller:
    """Decides rounds for one engine.

    `submit`, `cancel`, `stop` and `stats` may be called from any thread; everything else belongs to
    the thread that calls `run` (or, in tests, `step`). The caller closes the channel after `run`
    has returned.

    Args:
        manifest: what was prepared; equal on all ranks.
        config: the engine's settings; may select less than was prepared, never more.
        channel: the ranks.
        output: receives the items of each round, one tuple per reply address.
        token_bytes: bytes of every token id, b"" for special tokens
            (`grammar.token_bytes.token_bytes`).
        recorder: metrics of this engine, written by the controller's thread only; its clock is the
            controller's clock.
    Attributes:
        cache: the prefix cache; holds the directory of its disk tier until it is closed.
    Raises:
        ConfigError: the settings select nothing that was prepared, or ask for what is not built.
    """

    def __init__(
        self,
        manifest: PreparedManifest,
        config: EngineConfig,
        *,
        channel: RankChannel,
        output: OutputPort,
        token_bytes: Sequence[bytes],
        recorder: Recorder,
    ) -> None:
        check_settings(manifest, config, token_bytes)
        catalog = serve_selection(manifest, config)
        limits = admission_limits(manifest, config, catalog.max_width)
        self._clock = recorder.clock
        self._channel = channel
        self._queue_depth = config.queue_depth
        self._eos_ids = frozenset(manifest.eos_ids)
        self._token_bytes = token_bytes
        self._pool = PagePool(manifest.num_pages)
        self._is_debugging = config.debug_checks
        if config.debug_checks:
            self._pool.freed = FreedSince()
        self.cache = PrefixCache(manifest, config, self._pool, channel, clock=recorder.clock)
        self._snapshots = self.cache.snapshots
        self._retry_after_s = config.admission.retry_after_s
        drain = drain_rate(config, recorder.clock)
        self._admission = Admission(limits, self._pool, catalog.slots, self._snapshots, drain=drain)
        self._policy = verification_policy(manifest, config, catalog.max_width)
        self._masks = MaskWriter()
        copying = copying_of(manifest, config, self._policy, catalog.max_width)
        rules = plan_rules(manifest, config)
        self._planner = Planner(
            self._admission, catalog, self._policy, masks=self._masks, rules=rules
        )
        self._tuning = Tuning(config, catalog, self._admission, self._planner)
        self._publisher = Publisher(output, recorder)
        self._meters = Meters(recorder, self._admission, self.cache)
        self._harvester = Harvester(
            self._publisher, self._planner, self._meters, self._snapshots, self._masks
        )
        self._in_flight: deque[SubmittedRound] = deque()
        self._requests: dict[str, LiveRequest] = {}
        self._gate = GrammarGate(self._masks, config.admission)
        self._intake = Intake(
            self._requests,
            IntakePorts(self._admission, self._publisher, self._gate, copying),
            admit=self._admit,
            forget=self._forget_id,
            deliver=self._deliver_grammar,
        )
        self._deadlines: list[tuple[int, int, str]] = []
        self._next_uid, self._rounds = 1, 0
        self._last_progress_ns = self._clock()
        self._idle = self._is_clean = True
        # Shared with submitting threads, guarded by the lock.
        self._lock = threading.Lock()
        self._commands: deque[Command] = deque()
        self._live_ids: set[str] = set()
        self._stopping: Literal["", "drain", "now"] = ""
        self._fatal: RankFailure | ContractViolation | None = None

    def use_grammars(self, service: GrammarService | None, why: str) -> None:
        """Take constrained requests, or say why not; before the loop runs.

        Args:
            service: None = they are refused, `why` says what to change.
        """
        self._gate.use(service, why)

    # Any thread.

    def submit(self, request: GenerationRequest) -> None:
        """Hand over a request; the first item sent for it is `Admitted` or `Failed`.

        Thread-safe, never blocks on a round.

        Raises:
            InvalidRequest: a live request has the same id, status 409 (no item is sent: it would
                reach the other request's stream).
            Overloaded: the controller is stopping, status 503.
            RankFailure: the engine has failed before; sticky.
            ContractViolation: the engine has stopped over its own bug before; sticky.
        """
        with self._lock:
            if self._fatal is not None:
                raise self._fatal
            if self._stopping:
                raise Overloaded(
                    "the engine is shutting down; retry on another replica",
                    retry_after_s=self._retry_after_s,
                    status=UNAVAILABLE,
                )
            if request.request_id in self._live_ids:
                raise InvalidRequest(
                    f"request id {request.request_id!r} belongs to a live request; choose another",
                    param="request_id",
                    status=409,
                )
            self._live_ids.add(request.request_id)
            self._commands.append(Command(request.request_id, request, self._clock()))
        self._channel.wake()

    def cancel(self, request_id: str) -> None:
        """End a request with `Failed(code="cancelled")`; slot and pages are free at the next round
        boundary.

        Thread-safe and idempotent; an unknown or finished id is no error.
        """
        with self._lock:
            if request_id not in self._live_ids:
                return
            self._commands.append(Command(request_id))
        self._channel.wake()

    def reconfigure(self, settings: LiveSettings) -> None:
        """Change what may change between two rounds; raises as `Tuning.check` does."""
        self._tuning.check(settings)
        with self._lock:
            self._commands.append(Command("", settings=settings))
        self._channel.wake()

    def stop(self, *, drain: bool) -> None:
        """Refuse new requests and end `run`: if `drain` once live requests have ended and their
        prefixes have reached the lower tiers, else now.

        Without drain every live request gets `Failed(code="cancelled", status=503)`. Returns at
        once; join the thread that called `run`. A second call may turn a drain into a stop.
        """
        with self._lock:
            self._stopping = "drain" if drain and self._stopping != "now" else "now"
        self._channel.wake()

    def stats(self) -> ControllerStats:
        """Counts that were true at some moment during the call; any thread."""
        return ControllerStats(
            running=len(self._admission.running),
            waiting=len(self._admission.waiting),
            waiting_tokens=self._admission.waiting_tokens,
            free_pages=self._pool.free_pages,
            total_pages=self._pool.total_pages,
            rounds=self._rounds,
            last_progress_ns=self._last_progress_ns,
            pending_work=bool(self._live_ids),
            fatal=str(self._fatal) if self._fatal is not None else "",
        )

    # The controller's thread.

    def run(self) -> None:
        """Run the loop until `stop` or a fatal failure; the failure is in `stats().fatal`."""
        while self._fatal is None and not self._is_done():
            self.step(MAX_WAIT_S)
        if self._fatal is None:
            self._end_all("cancelled", UNAVAILABLE, "the engine is shutting down")
        self._masks.close()

    def step(self, timeout_s: float) -> bool:
        """One iteration, waiting at most `timeout_s` for a round.

        A failure of the ranks or of our own ends every live request and is kept; further steps
        do nothing.

        Returns:
            Whether a command was taken, a plan submitted, an item sent or a round harvested.
        """
        if self._fatal is not None:
            return False
        try:
            return self._iterate(timeout_s)
        except RankFailure as failure:
            cause = f"rank {failure.rank} in round {failure.round_id}: {failure}"
            self._fail(failure, "rank_failure", f"the engine has stopped, {cause}")
        except Exception as error:
            logger.exception("controller stopped in round %d", self._rounds)
            violation = ContractViolation(f"the controller has stopped: {error!r}")
            self._fail(violation, "internal_error", str(violation))
        return True

    def _iterate(self, timeout_s: float) -> bool:
        acted = self._receive()
        self.cache.receive()
        self._expire()
        self._admit()
        acted |= self.cache.send()
        acted |= self._submit_rounds()
        now_ns = self._clock()
        acted |= self._publisher.flush(now_ns, self._rounds)
        self._meters.sample_if_due(now_ns)
        self._check_when_idle()
        idle = not self._in_flight
        result = self._channel.receive(self._wait_s(timeout_s))
        if isinstance(result, Proposals):
            self._answer_barrier(result)
        elif result is not None:
            self._harvest(result)
        # Work that follows a harvest at once pays for the host's time since then.
        self._idle = idle
        return acted or result is not None

    def _receive(self) -> bool:
        """Take the commands of other threads, in order."""
        acted = False
        while self._commands:
            command = self._commands.popleft()
            acted = True
            if command.request is not None:
                self._accept(command.request, command.arrival_ns)
            elif command.compiled is not None:
                self._intake.take_grammar(*command.compiled)
            elif command.settings is not None:
                self._tuning.apply(command.settings)
            elif (live := self._requests.get(command.request_id)) is not None:
                self._end_failed(live, "cancelled", CLIENT_GONE, "the request was cancelled")
        return acted

    def _accept(self, request: GenerationRequest, arrival_ns: int) -> None:
        deadline_ns = arrival_ns + round(request.deadline_s * 1e9) if request.deadline_s else 0
        stops = OutputStops(request, self._eos_ids, self._token_bytes)
        chain = TokenChain(request.prompt_tokens, request.cache_salt)
        live = LiveRequest(request, self._next_uid, arrival_ns, deadline_ns, stops, chain)
        self._next_uid += 1
        if not self._requests:
            self._last_progress_ns = self._clock()
        if self._intake.accept(live) and deadline_ns:
            heapq.heappush(self._deadlines, (deadline_ns, live.uid, request.request_id))

    def _deliver_grammar(self, live: LiveRequest, outcome: Outcome) -> None:
        """Hand a compiled grammar over to the loop; any thread."""
        with self._lock:
            self._commands.append(Command(live.request.request_id, compiled=(live, outcome)))
        self._channel.wake()

    def _expire(self) -> None:
        """End requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            _, uid, request_id = heapq.heappop(self._deadlines)
            live = self._requests.get(request_id)
            if live is not None and live.uid == uid:
                message = f"the request did not finish within {live.request.deadline_s:g} s"
                self._end_failed(live, "deadline", GATEWAY_TIMEOUT, message)

    def _admit(self) -> None:
        now_ns = self._clock()
        for live in self._admission.admit():
            self._meters.admitted(live, now_ns)

    def _submit_rounds(self) -> bool:
        """Fill the queue of rounds; whether anything was submitted."""
        submitted = False
        while len(self._in_flight) < self._queue_depth:
            started_ns = self._clock() if self._idle else self._last_progress_ns
            planned = self._planner.next_round(started_ns)
            if planned is None:
                break
            self._channel.submit(planned.plan)
            self._in_flight.append(planned)
            self._meters.submitted(planned, self._clock())
            self._end_slow()
            submitted = True
        return submitted

    def _answer_barrier(self, proposals: Proposals) -> None:
        """The drafts of a masked round are known: write the masks behind them."""
        planned = self._in_flight[0] if self._in_flight else None
        if planned is None or planned.plan.round_id != proposals.round_id:
            raise ContractViolation(f"round {proposals.round_id} is at a barrier, out of order")
        self._channel.answer(self._masks.answer(planned.plan, planned.lanes, proposals))
        self._meters.grammar_drafts(self._masks.cut_drafts, self._masks.forced_drafts)
        self._end_slow()

    def _end_slow(self) -> None:
        """End requests whose grammars took too long; their rounds go on without them."""
        for live in self._masks.take_slow():
            refusal = self._gate.condemn(live)
            self._end_failed(live, refusal.code, refusal.status, str(refusal), param=refusal.param)

    def _harvest(self, result: RoundResult) -> None:
        if not self._in_flight:
            raise ContractViolation(f"round {result.round_id} was answered, none is in flight")
        now_ns = self._clock()
        planned = self._in_flight.popleft()
        for live, end in self._harvester.fold(planned, result, now_ns):
            if isinstance(end, Failed):
                self._publisher.failed(live, end)
            else:
                self._publisher.finished(live, end, now_ns)
            self._release(live)
        for live in planned.lanes:
            self._admission.retire(live)
        self._rounds += 1
        self._last_progress_ns = now_ns

    # Ends.

    def _end_failed(
        self, live: LiveRequest, code: str, status: int, message: str, *, param: str | None = None
    ) -> None:
        failure = Failed(
            live.request.request_id, code, message, status, param=param, emitted=live.emitted
        )
        self._intake.leave(live)
        if live.phase is Phase.COMPILING:
            self._publisher.refused(live, failure)
        else:
            self._publisher.failed(live, failure)
        self._release(live)

    def _release(self, live: LiveRequest) -> None:
        """Forget an ended request; its slot and pages follow when its rounds have drained."""
        del self._requests[live.request.request_id]
        self._planner.forget(live)
        self._admission.end(live)
        self._forget_id(live)

    def _forget_id(self, live: LiveRequest) -> None:
        with self._lock:
            self._live_ids.discard(live.request.request_id)

    def _fail(self, failure: RankFailure | ContractViolation, code: str, message: str) -> None:
        """End everything over a failure; no round runs hereafter."""
        with self._lock:
            self._fatal = failure
        self._meters.fatal()
        self._in_flight.clear()
        for live in self._requests.values():
            live.in_flight.clear()
        self._end_all(code, UNAVAILABLE, message)

    def _end_all(self, code: str, status: int, message: str) -> None:
        """One `Failed` for every live request, and for those still among the commands."""
        with self._lock:
            self._stopping = "now"
        self._receive()
        for live in list(self._requests.values()):
            self._end_failed(live, code, status, message)
        self._publisher.flush(self._clock(), self._rounds)
        self._meters.sample()

    def _is_done(self) -> bool:
        if self._stopping == "drain":
            return not (self._live_ids or self._in_flight or self.cache.is_moving)
        return self._stopping == "now"

    # Waiting.

    def _wait_s(self, timeout_s: float) -> float:
        """How long to wait for a round: until the next heartbeat or deadline at most."""
        due_ns = self._publisher.next_heartbeat_ns
        if self._deadlines:
            due_ns = min(due_ns, self._deadlines[0][0])
        return min(timeout_s, max(0.0, (due_ns - self._clock()) / 1e9))

    def check_integrity(self) -> None:
        """Prove that pages, references, reservations, slots, epochs and snapshots add up.

        Runs under `debug_checks` whenever the engine goes idle, and after every test; between two
        steps, the controller's thread only.

        Raises:
            ContractViolation: what does not.
        """
        problems = list(request_problems(self._admission, self._requests, self._in_flight))
        if problems:
            raise ContractViolation("requests are damaged: " + "; ".join(problems))
        self._admission.check_integrity()

    def _check_when_idle(self) -> None:
        """Once per idle period: nobody holds a page, and in debug mode everything adds up."""
        if self._requests or self._in_flight:
            self._is_clean = False
        elif not self._is_clean:
            if self._is_debugging:
                self.check_integrity()
            if not self._pool.is_untouched:
                raise ContractViolation("pages are held although no request is live")
            self._is_clean = True
            # A request that ended while its round ran freed its pages at the harvest.
            self._meters.sample()
