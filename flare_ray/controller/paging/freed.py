"""What became free since the last plan, where the ranks are to overwrite it (debugging only).

A plan tells it at its start, in stream order: after its saves, which may still read a slot that
ended, and before its hand-overs, restores and grants. So whatever is reused has been overwritten,
and what is read after it was freed is not a number.
"""

from __future__ import annotations

from flare_ray.contracts.plan import FreedMemory

MAX_PAGES = 4096
"""Pages told in one plan, which must fit a message; the others wait for the next."""


class FreedSince:
    """Pages, snapshot rows and slots that nobody holds any more and nobody has been given since.

    Used by the controller's thread.
    """

    def __init__(self) -> None:
        self.pages: set[int] = set()
        self.rows: set[int] = set()
        self.slots: set[int] = set()

    def take(self) -> FreedMemory:
        """Everything that the plan being built tells."""
        pages = tuple(sorted(self.pages)[:MAX_PAGES])
        told = FreedMemory(pages, tuple(sorted(self.rows)), tuple(sorted(self.slots)))
        self.pages.difference_update(pages)
        self.rows.clear()
        self.slots.clear()
        return told
