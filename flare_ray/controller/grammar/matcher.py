"""What the controller asks of grammars (contract: K1); adapters live where their library may.

A matcher separates two states. The *committed* one has taken exactly the tokens that rounds
emitted. A *tentative* walk takes drafts one by one to learn the mask behind each prefix, and is
undone before the round's outcome is known. One mask reused for several positions is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from flare_ray.contracts.grammar import GrammarSpec
from flare_ray.errors import InvalidRequest, Overloaded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    MaskRows = NDArray[np.int32]


class GrammarMatcher(Protocol):
    """One request's position in its grammar."""

    def fill_mask(self, rows: MaskRows, row: int) -> None:
        """Write the mask of tokens allowed next, one bit a token, into `rows[row]`."""

    def try_token(self, token: int) -> bool:
        """Advance tentatively; False, without change, if the grammar forbids `token`."""

    def undo(self, tokens: int) -> None:
        """Take back the last `tokens` tentative steps."""

    def commit(self, token: int) -> None:
        """Advance for good.

        Raises:
            ContractViolation: the grammar forbids `token`.
        """

    def forced_tokens(self) -> Sequence[int]:
        """Tokens that write what must come next, if that is one text; () if it is open. Proposals
        only: another cut of the same text into tokens is allowed too."""

    @property
    def has_ended(self) -> bool:
        """A terminal token has been taken, tentatively or for good."""

    @property
    def can_end(self) -> bool:
        """Whether a terminal token is allowed next."""


class CompiledGrammar(Protocol):
    """A grammar ready to match, shared by its requests."""

    def matcher(self) -> GrammarMatcher:
        """A new position at its start."""


class MaskFrame(msgspec.Struct, frozen=True):
    """Mask rows of one round: name of the shared block, and its rows [rows, words] int32."""

    name: str
    rows: Any


OnCompiled = Callable[[CompiledGrammar | InvalidRequest | Overloaded], None]


class GrammarService(Protocol):
    """Compiles grammars beside the rounds and owns the blocks that masks travel in."""

    def compile(self, spec: GrammarSpec, done: OnCompiled) -> None:
        """Start compiling; never waits. `done` is called once, by any thread, maybe at once."""

    def refuse(self, spec: GrammarSpec, refusal: InvalidRequest) -> None:
        """Answer `spec` with `refusal` from now on; never waits."""

    def frame(self, round_id: int) -> MaskFrame:
        """The block of a round: one that no unanswered round names, as at most two are queued."""

    def close(self) -> None:
        """Stop compiling and remove the blocks; idempotent."""
