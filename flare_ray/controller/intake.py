"""From a submitted request to a place in the queue, or a refusal (contract: C1, K1).

A constrained request waits beside the queue for its grammar first (`grammar.gate`); everybody else
is queued at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from flare_ray.config.live import LiveSettings
from flare_ray.contracts.messages import Failed
from flare_ray.contracts.request import GenerationRequest
from flare_ray.controller.admission import Admission
from flare_ray.controller.grammar.gate import GrammarGate, Outcome
from flare_ray.controller.history.copies import Copying
from flare_ray.controller.live import LiveRequest, Phase
from flare_ray.controller.publication import Publisher
from flare_ray.errors import InvalidRequest, Overloaded


class Command(msgspec.Struct, frozen=True):
    """What another thread asks of the loop: a request to accept, a grammar that was compiled,
    settings to change, or (none of them) an id to cancel."""

    request_id: str
    request: GenerationRequest | None = None
    arrival_ns: int = 0
    compiled: tuple[LiveRequest, Outcome] | None = None
    settings: LiveSettings | None = None


@dataclass(frozen=True, slots=True)
class IntakePorts:
    """Where requests go."""

    admission: Admission
    publisher: Publisher
    gate: GrammarGate
    copying: Copying


class Intake:
    """Takes requests in. Used by the controller's thread only.

    Args:
        requests: live requests by id; extended and shortened here.
        admit: moves the queue's head into free slots.
        forget: lets another request use an id.
        deliver: told of a grammar's outcome by any thread; leads to `take_grammar`.
    """

    def __init__(
        self,
        requests: dict[str, LiveRequest],
        ports: IntakePorts,
        *,
        admit: Callable[[], None],
        forget: Callable[[LiveRequest], None],
        deliver: Callable[[LiveRequest, Outcome], None],
    ) -> None:
        self._requests = requests
        self._admission = ports.admission
        self._publisher = ports.publisher
        self._gate = ports.gate
        self._copying = ports.copying
        self._admit = admit
        self._forget = forget
        self._deliver = deliver

    def accept(self, live: LiveRequest) -> bool:
        """Queue a new request, or let it wait for its grammar; False if it was refused."""
        request = live.request
        try:
            if request.grammar is None:
                self._enqueue(live)
            else:
                self._admission.limits.check(request, self._admission.pool.total_pages)
                self._requests[request.request_id] = live
                self._publisher.expects(live)
                live.phase = Phase.COMPILING
                self._gate.enter(live, self._deliver)
        except (InvalidRequest, Overloaded) as refusal:
            self._refuse(live, refusal)
            return False
        return True

    def take_grammar(self, live: LiveRequest, outcome: Outcome) -> None:
        """Queue a request whose grammar is compiled, or refuse it."""
        if live.phase is not Phase.COMPILING:
            return  # it was cancelled, or its deadline has passed
        try:
            if isinstance(outcome, InvalidRequest | Overloaded):
                raise outcome
            live.matcher = outcome.matcher()
            self.leave(live)
            live.phase = Phase.WAITING
            self._enqueue(live)
        except (InvalidRequest, Overloaded) as refusal:
            self._refuse(live, refusal)

    def leave(self, live: LiveRequest) -> None:
        """A request waits for its grammar no longer; no error if it never did."""
        if live.phase is Phase.COMPILING:
            self._gate.leave(live)
            self._publisher.expects_no_more(live)

    def _enqueue(self, live: LiveRequest) -> None:
        self._admission.enqueue(live)
        live.copies = self._copying.open(live.uid, live.request, live.chain.tokens)
        self._requests[live.request.request_id] = live
        self._publisher.admitted(live)
        # At once, so that the queue's bound counts only those who really wait.
        self._admit()

    def _refuse(self, live: LiveRequest, refusal: InvalidRequest | Overloaded) -> None:
        """Answer a request that is not in the queue."""
        self.leave(live)
        live.phase = Phase.ENDED
        self._requests.pop(live.request.request_id, None)
        self._forget(live)
        self._publisher.refused(live, _failure(live.request, refusal))


def _failure(request: GenerationRequest, error: InvalidRequest | Overloaded) -> Failed:
    if isinstance(error, Overloaded):
        return Failed(
            request.request_id,
            "overloaded",
            str(error),
            status=error.status,
            retry_after_s=error.retry_after_s,
        )
    return Failed(
        request.request_id, error.code, str(error), status=error.status, param=error.param
    )
