"""Host memory and disk of fake ranks: what a region or a file holds is the tokens it stands for.

A move takes effect where a rank would let it: its orders' saves at once, its content when its time
has come. Contents are token lists, so a wrong one shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flare_ray.contracts.plan import SnapshotSave
from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.contracts.tiers import TierFault, TierMove, TierOrder, TierOutcome

Tokens = tuple[int, ...]


@dataclass
class FakeTiers:
    """Moves of one engine's snapshots.

    Attributes:
        rows / content: the device's, shared with the channel: tokens by row; by page and place.
        save: applies a save of an order.
        moves: every order, as it came.
        held: moves whose time has not come: they stay under way until released.
        faults: by move, what the next one of that kind meets.
        regions: by offset: (entry, tokens); files: by path.
    """

    rows: dict[int, Tokens]
    content: dict[int, dict[int, int]]
    save: Callable[[SnapshotSave], None]
    moves: list[TierOrder] = field(default_factory=list)
    held: set[TierMove] = field(default_factory=set)
    faults: dict[TierMove, TierFault] = field(default_factory=dict)
    regions: dict[int, tuple[int, Tokens]] = field(default_factory=dict)
    files: dict[str, Tokens] = field(default_factory=dict)
    sealed: set[str] = field(default_factory=set)
    _waiting: list[TierOrder] = field(default_factory=list)

    def order(self, order: TierOrder) -> None:
        for save in order.saves:
            self.save(save)
        self.moves.append(order)
        self._waiting.append(order)
        if order.move is TierMove.LOAD:
            self.rows.pop(order.row, None)

    @property
    def has_outcomes(self) -> bool:
        return any(order.move not in self.held for order in self._waiting)

    def take_outcomes(self) -> tuple[TierOutcome, ...]:
        due = [order for order in self._waiting if order.move not in self.held]
        self._waiting = [order for order in self._waiting if order.move in self.held]
        return tuple(self._outcome(order) for order in due)

    def _outcome(self, order: TierOrder) -> TierOutcome:
        fault = self.faults.pop(order.move, TierFault.NONE)
        checksum = ""
        if not fault:
            checksum = self._move(order)
        text = "made to fail" if fault else ""
        return TierOutcome(order.ticket, fault, 100, 1000, (checksum,), text)

    def _move(self, order: TierOrder) -> str:
        if order.move is TierMove.STORE:
            tokens = self.rows[order.row]
            assert len(tokens) == order.tokens, "another snapshot lies in the row"
            for position, token in enumerate(tokens):
                page = self.content[order.pages[position // PAGE_TOKENS]]
                assert page[position % PAGE_TOKENS] == token, "a page was reused under a copy"
            self.regions[order.offset] = (order.entry, tokens)
        elif order.move is TierMove.LOAD:
            tokens = self._region(order)
            self.rows[order.row] = tokens
            for page in order.pages:
                self.content[page] = {}
            for position, token in enumerate(tokens):
                page = order.pages[position // PAGE_TOKENS]
                self.content[page][position % PAGE_TOKENS] = token
        elif order.move is TierMove.WRITE:
            self.files[order.path] = self._region(order)
            return f"sum of {order.path}"
        elif order.move is TierMove.SEAL:
            assert order.path in self.files, "sealed before it was written"
            self.sealed.add(order.path)
        elif order.move is TierMove.READ:
            assert order.path in self.sealed and order.checksums == (f"sum of {order.path}",)
            self.regions[order.offset] = (order.entry, self.files[order.path])
        else:
            self.files.pop(order.path, None)
            self.sealed.discard(order.path)
        return ""

    def _region(self, order: TierOrder) -> Tokens:
        entry, tokens = self.regions[order.offset]
        assert entry == order.entry and len(tokens) == order.tokens, "another prefix lies there"
        return tokens
