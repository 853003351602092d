"""What the controller will ask of a grammar (contract: K1); adapters live where their library may.

A matcher separates two states. The *committed* one has taken exactly the tokens that rounds
emitted. A *tentative* walk takes drafts one by one to learn the mask behind each prefix, and is
undone before the round's outcome is known. One mask reused for several positions is a bug.
"""

from __future__ import annotations

from typing import Protocol


class GrammarMatcher(Protocol):
    """One request's position in its grammar."""

    def fill_mask(self, words: memoryview) -> None:
        """Write the mask of tokens allowed next, one bit a token, into int32 `words`."""

    def try_token(self, token: int) -> bool:
        """Advance tentatively; False, without change, if the grammar forbids `token`."""

    def undo(self, tokens: int) -> None:
        """Take back the last `tokens` tentative steps."""

    def commit(self, token: int) -> None:
        """Advance for good.

        Raises:
            ContractViolation: the grammar forbids `token`, or tentative steps are open.
        """

    def is_complete(self) -> bool:
        """Whether the committed text may end here."""
