"""When prompts may run beside rounds under an inter-token target (contract: C1).

A prompt's program between two rounds delays every request that decodes. The gate keeps their slack:

    slack += target * tokens a lane emitted - time     for every round
    slack -= what a prompt's program is expected to take     when one may run

and lets a program run once the slack pays for it, so that the mean time between tokens stays at the
target wherever rounds alone are faster. What rounds alone cannot reach is not made up for: after
MOST_DEFERRED_ROUNDS a program runs in any case, which bounds the wait of prompts. The slack never
exceeds one program's time, so a quiet stretch buys no burst of them.
"""

from __future__ import annotations

MOST_DEFERRED_ROUNDS = 16
"""Rounds in a row for which a prompt's program can be held back."""
PRICE_GAIN = 0.25
"""Share of a program's error by which the expected time moves."""


class PrefillGate:
    """Holds prompts' programs back. Used by the controller's thread only.

    Args:
        target_ns: mean time between tokens of a request that decodes.
    """

    def __init__(self, target_ns: float) -> None:
        self._target_ns = target_ns
        self._slack_ns = 0.0
        self._program_ns = 0.0
        self._deferred = 0

    def admits(self) -> bool:
        """Whether a prompt's program may run before the next round; if so it is paid for.

        Asked once per turn in which both have work.
        """
        if self._slack_ns < self._program_ns and self._deferred < MOST_DEFERRED_ROUNDS:
            self._deferred += 1
            return False
        self._deferred = 0
        self._pay(-self._program_ns)
        return True

    def alone(self) -> None:
        """Nobody decodes: whoever will starts without slack."""
        self._slack_ns = 0.0
        self._deferred = 0

    def round_done(self, cost_ns: float, *, emitted: int, lanes: int) -> None:
        """A round of `lanes` > 0 living lanes took `cost_ns` and emitted so many tokens."""
        self._pay(self._target_ns * emitted / lanes - cost_ns)

    def prompts_done(self, cost_ns: float) -> None:
        """A prompt's program took `cost_ns`."""
        known = self._program_ns
        self._program_ns = known + PRICE_GAIN * (cost_ns - known) if known else cost_ns

    def _pay(self, gain_ns: float) -> None:
        bound_ns = self._program_ns
        self._slack_ns = min(max(self._slack_ns + gain_ns, -bound_ns), bound_ns)
