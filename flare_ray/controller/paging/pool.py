"""The page pool: who holds which page, and what has been promised (contract: M1).

    id    0            1 ...................................................... num_pages - 1
          null page    | granted, by owner | cached: held by |        free list
                       |  (shared or own)  | snapshots alone | promised | free for new requests

A request *reserves* what its prompt needs at admission, *extends* that before its rounds need more,
and is *granted* page ids as its positions grow. Free pages never number fewer than the promised
ones, so a plan that stays inside its requests' promises cannot run out. Who gives way when nothing
more can be promised is decided in `preemption.py`.

A page may have several owners, which share a prefix and never write into it, and may be held by
prefix snapshots besides. It returns to the free list when the last of them lets go. Cached pages
count as free for a new reservation: they are taken back from snapshots when it needs them.
Bookkeeping only; no page content passes through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.controller.paging.freed import FreedSince
from flare_ray.errors import ContractViolation


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // PAGE_TOKENS)


def _nothing_to_evict() -> bool:
    return False


class PagePool:
    """Pages of one engine. Used by the controller's thread; `free_pages` may be read by any.

    Args:
        num_pages: pages of the pool, the null page 0 included.
    Attributes:
        freed: is told of pages that become free and that are given away again; None = nobody is.
    """

    def __init__(self, num_pages: int) -> None:
        self.total_pages = num_pages - 1
        # A stack: pages given back last are granted first.
        self._free = list(range(num_pages - 1, 0, -1))
        self._granted: dict[int, list[int]] = {}
        self._reserved: dict[int, int] = {}
        self._promised = 0
        # By page id: requests that have it in their table, snapshots that hold it.
        self._owners = [0] * num_pages
        self._holds = [0] * num_pages
        self._cached = 0
        self._evict: Callable[[], bool] = _nothing_to_evict
        self.freed: FreedSince | None = None

    @property
    def free_pages(self) -> int:
        """Pages that new requests can be promised: free or cached, less what is promised."""
        return len(self._free) + self._cached - self._promised

    @property
    def cached_pages(self) -> int:
        """Pages that snapshots alone hold."""
        return self._cached

    @property
    def is_untouched(self) -> bool:
        """Whether no request holds or was promised a page."""
        return not self._reserved

    def evict_with(self, evict: Callable[[], bool]) -> None:
        """Name who gives up a snapshot when pages are short.

        Args:
            evict: drops one snapshot that holds a cached page; False = there is none that may go.
        """
        self._evict = evict

    def reserve(
        self, owner: int, pages: int, shared: Sequence[int] = (), *, spare: int = 0
    ) -> bool:
        """Promise `pages` to `owner`, which holds none, and let it share held pages.

        Snapshots are evicted as far as the promise needs. False, without a change of reservations,
        if too few pages are or become free.

        Args:
            shared: pages of a pinned snapshot: the owner's first page-table entries.
            spare: pages that must stay free or cached besides.
        Raises:
            ContractViolation: the owner already has a reservation; a shared page is not held.
        """
        if owner in self._reserved:
            raise ContractViolation(f"request {owner} reserves pages a second time")
        if not all(self._holds[page] for page in shared):
            raise ContractViolation(f"request {owner} shares pages {shared} that no snapshot holds")
        taken = sum(not self._owners[page] for page in shared)
        if pages + spare > self.free_pages - taken:
            return False
        self._own(shared)
        if not self._make_free(pages):
            self._disown(shared)
            return False
        self._reserved[owner] = pages + len(shared)
        self._granted[owner] = list(shared)
        self._promised += pages
        return True

    def extend(self, owner: int, pages: int) -> bool:
        """Promise `pages` more to an owner; False if too few are or become free.

        Raises:
            ContractViolation: the owner holds no reservation.
        """
        if owner not in self._reserved:
            raise ContractViolation(f"request {owner} extends a reservation it never made")
        if pages > self.free_pages or not self._make_free(pages):
            return False
        self._reserved[owner] += pages
        self._promised += pages
        return True

    def grant(self, owner: int, pages: int) -> tuple[int, ...]:
        """Turn `pages` of the owner's promise into page ids, for its next page-table entries.

        Raises:
            ContractViolation: beyond the owner's reservation.
        """
        held = self._granted.get(owner)
        if held is None or len(held) + pages > self._reserved[owner]:
            raise ContractViolation(
                f"request {owner} asks for {pages} pages beyond its reservation of "
                f"{self._reserved.get(owner, 0)}, {len(held or ())} granted"
            )
        taken = self._take_free(pages)
        held.extend(taken)
        for page in taken:
            self._owners[page] = 1
        self._promised -= pages
        return taken

    def is_cached(self, page: int) -> bool:
        """Whether snapshots alone hold `page`."""
        return self._holds[page] > 0 and not self._owners[page]

    def pages_of_its_own(self, owner: int, pages: int) -> int:
        """How many of the owner's first `pages` page-table entries no other request has."""
        return sum(self._owners[page] == 1 for page in self._granted[owner][:pages])

    @property
    def owners(self) -> Iterable[int]:
        """Everybody with a reservation."""
        return self._reserved.keys()

    def count_of(self, owner: int) -> tuple[int, int]:
        """(page-table entries, entries reserved) of an owner."""
        return len(self._granted[owner]), self._reserved[owner]

    def pages_of(self, owner: int) -> Sequence[int]:
        """The owner's page-table entries so far, shared ones first; not a copy."""
        return self._granted[owner]

    def release(self, owner: int) -> None:
        """Take back everything the owner holds or was promised.

        Only after every queued round that may touch its pages has been harvested (contract: T7).

        Raises:
            ContractViolation: the owner holds no reservation.
        """
        if owner not in self._reserved:
            raise ContractViolation(f"request {owner} gives back pages it never reserved")
        held = self._granted.pop(owner)
        self._promised -= self._reserved.pop(owner) - len(held)
        self._disown(reversed(held))

    def take(self, pages: int) -> tuple[int, ...] | None:
        """Free pages for a snapshot that is about to be filled, held by it from now on.

        Snapshots are evicted as far as that needs.

        Returns:
            None if too few pages are or become free.
        """
        if pages > self.free_pages or not self._make_free(pages):
            return None
        taken = self._take_free(pages)
        for page in taken:
            self._holds[page] = 1
        self._cached += pages
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """A snapshot keeps `pages`, which somebody owns or another snapshot holds."""
        for page in pages:
            if not self._owners[page] and not self._holds[page]:
                raise ContractViolation(f"a snapshot holds page {page}, which is free")
            self._holds[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """A snapshot lets go of `pages`."""
        for page in pages:
            if not self._holds[page]:
                raise ContractViolation(f"a snapshot drops page {page}, which none holds")
            self._holds[page] -= 1
            if not self._holds[page] and not self._owners[page]:
                self._cached -= 1
                self._set_free(page)

    def _make_free(self, pages: int) -> bool:
        """Evict snapshots until `pages` are free and not promised."""
        while pages > len(self._free) - self._promised:
            if not self._evict():
                return False
        return True

    def _set_free(self, page: int) -> None:
        self._free.append(page)
        if self.freed is not None:
            self.freed.pages.add(page)

    def _take_free(self, pages: int) -> tuple[int, ...]:
        taken = tuple(self._free.pop() for _ in range(pages))
        if self.freed is not None:
            self.freed.pages.difference_update(taken)
        return taken

    def _own(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._cached -= not self._owners[page]
            self._owners[page] += 1

    def _disown(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page]:
                continue
            if self._holds[page]:
                self._cached += 1
            else:
                self._set_free(page)

    def check_integrity(self, held: Iterable[int] = ()) -> None:
        """Recount everything.

        Args:
            held: pages of every snapshot, a page once per snapshot that holds it.
        Raises:
            ContractViolation: a page is lost, free and held, or promised twice; a count is off.
        """
        owners, holds = [0] * (self.total_pages + 1), [0] * (self.total_pages + 1)
        for granted in self._granted.values():
            for page in granted:
                owners[page] += 1
        for page in held:
            holds[page] += 1
        if owners != self._owners or holds != self._holds:
            wrong = [
                page
                for page in range(self.total_pages + 1)
                if (owners[page], holds[page]) != (self._owners[page], self._holds[page])
            ]
            raise ContractViolation(
                f"page pool: pages {wrong} are counted as owned or held by others than hold them"
            )
        used = [page for page in range(self.total_pages + 1) if owners[page] or holds[page]]
        pages = [*self._free, *used]
        if sorted(pages) != list(range(1, self.total_pages + 1)):
            raise ContractViolation(
                f"page pool: {len(pages)} entries, {len(set(pages))} distinct, expected each of "
                f"1..{self.total_pages} once"
            )
        cached = sum(1 for page in used if not owners[page])
        promised = sum(self._reserved.values()) - sum(map(len, self._granted.values()))
        if promised != self._promised or promised > len(self._free) or cached != self._cached:
            raise ContractViolation(
                f"page pool: {self._promised} pages promised by count, {promised} by owner, "
                f"{len(self._free)} free; {self._cached} cached by count, {cached} by page"
            )
