"""Requests that wait for their grammar: beside the queue, in nobody's way (contract: C1, K1).

A request comes here first if it has a grammar. It is admitted to the queue once the grammar is
compiled, and refused with the reason if it is not; until then it holds no place, slot or page.
"""

from __future__ import annotations

from collections.abc import Callable

from flare_ray.config import AdmissionConfig
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.controller.grammar.masks import WALK_LIMIT_S, MaskWriter
from flare_ray.controller.grammar.matcher import CompiledGrammar, GrammarService
from flare_ray.controller.live import LiveRequest
from flare_ray.errors import InvalidRequest, Overloaded

Outcome = CompiledGrammar | InvalidRequest | Overloaded
PARAM = "response_format"
MAX_STUCK = 2
"""Matchers that were given up on and may be at work while new grammars are taken."""


def unavailable(manifest: PreparedManifest, *, enabled: bool, installed: bool) -> str:
    """Why an engine takes no constrained requests, and what to change; "" if it does."""
    if not enabled:
        return "this engine was started with grammar.enabled: false"
    if not any(shape.masked for shape in manifest.shapes):
        return "this engine was prepared without masked rounds; prepare it with grammar.enabled"
    if not manifest.eos_ids:
        return "the checkpoint declares no terminal token, so that no constrained output could end"
    if not installed:
        return "xgrammar is not installed on the engine's host; install flare-ray[grammar]"
    return ""


class GrammarGate:
    """Counts those who wait and hands them on.

    Args:
        masks: where those work that it lets through.
        config: as many may wait here as for a slot.
    """

    def __init__(self, masks: MaskWriter, config: AdmissionConfig) -> None:
        self._masks = masks
        self._service: GrammarService | None = None
        self._why = "this engine has none"
        self._most = config.max_waiting
        self._retry_after_s = config.retry_after_s
        self._waiting: set[int] = set()

    def use(self, service: GrammarService | None, why: str) -> None:
        """Compile with `service`; None = no constrained request is taken, for the reason `why`."""
        self._service, self._why = service, why
        self._masks.service = service

    def enter(self, live: LiveRequest, deliver: Callable[[LiveRequest, Outcome], None]) -> None:
        """Start compiling the grammar of `live`.

        Args:
            deliver: called once with the outcome, by any thread, maybe at once.
        Raises:
            InvalidRequest: constrained requests are not taken.
            Overloaded: too many wait here.
        """
        grammar = live.request.grammar
        if self._service is None or grammar is None:
            raise InvalidRequest(
                f"structured output is not available: {self._why}",
                param=PARAM,
                code="unsupported_parameter",
            )
        if len(self._waiting) >= self._most:
            raise Overloaded(
                f"{len(self._waiting)} requests are waiting for their grammars, at most "
                f"{self._most} may; retry in {self._retry_after_s:g} s",
                retry_after_s=self._retry_after_s,
            )
        if self._masks.num_stuck >= MAX_STUCK:
            raise Overloaded(
                f"{MAX_STUCK} grammars that took too long still hold a processor; retry in "
                f"{self._retry_after_s:g} s",
                retry_after_s=self._retry_after_s,
                status=503,
            )
        self._waiting.add(live.uid)
        self._service.compile(grammar, lambda outcome: deliver(live, outcome))

    def condemn(self, live: LiveRequest) -> InvalidRequest:
        """Refuse the grammar of `live` from now on, for its matcher took too long; the reason."""
        refusal = InvalidRequest(
            f"after {live.generated_tokens} tokens its grammar takes more than {WALK_LIMIT_S:g} s "
            "a round: it reads the text so far in too many ways; repeat nothing that may be empty "
            "or that matches the same text in several ways",
            param=PARAM,
            code="grammar_too_slow",
        )
        if self._service is not None and live.request.grammar is not None:
            self._service.refuse(live.request.grammar, refusal)
        return refusal

    def leave(self, live: LiveRequest) -> None:
        """`live` waits no longer, whatever the reason."""
        self._waiting.discard(live.uid)
