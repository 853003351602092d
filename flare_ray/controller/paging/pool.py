"""The page pool: who holds which page, and what has been promised (contract: M1).

    id    0            1 ......................................... num_pages - 1
          null page    | granted, by owner |        free list                   |
                                            | promised | free for new requests  |

A request *reserves* its worst case once, at admission, and is *granted* page ids as its positions
grow. Free pages never number fewer than the promised ones, so an admitted request cannot run out
and no two requests can wait for each other: the only wait is for a first reservation, in queue
order, and it ends when somebody finishes. Bookkeeping only; no page content passes through here.
"""

from __future__ import annotations

from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.errors import ContractViolation


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // PAGE_TOKENS)


class PagePool:
    """Pages of one engine. Used by the controller's thread; `free_pages` may be read by any.

    Args:
        num_pages: pages of the pool, the null page 0 included.
    """

    def __init__(self, num_pages: int) -> None:
        self.total_pages = num_pages - 1
        # A stack: pages given back last are granted first.
        self._free = list(range(num_pages - 1, 0, -1))
        self._granted: dict[int, list[int]] = {}
        self._reserved: dict[int, int] = {}
        self._promised = 0

    @property
    def free_pages(self) -> int:
        """Pages neither granted nor promised."""
        return len(self._free) - self._promised

    @property
    def is_untouched(self) -> bool:
        """Whether nobody holds or was promised a page."""
        return not self._reserved

    def reserve(self, owner: int, pages: int) -> bool:
        """Promise `pages` to `owner`, which holds none; False, without change, if too few are
        free.

        Raises:
            ContractViolation: the owner already has a reservation.
        """
        if owner in self._reserved:
            raise ContractViolation(f"request {owner} reserves pages a second time")
        if pages > self.free_pages:
            return False
        self._reserved[owner] = pages
        self._granted[owner] = []
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
        taken = tuple(self._free.pop() for _ in range(pages))
        held.extend(taken)
        self._promised -= pages
        return taken

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
        self._free.extend(reversed(held))

    def check_integrity(self) -> None:
        """Recount everything.

        Raises:
            ContractViolation: a page is lost, held twice, or promised twice.
        """
        pages = [*self._free, *(page for held in self._granted.values() for page in held)]
        if sorted(pages) != list(range(1, self.total_pages + 1)):
            raise ContractViolation(
                f"page pool: {len(pages)} entries, {len(set(pages))} distinct, expected each of "
                f"1..{self.total_pages} once"
            )
        promised = sum(self._reserved.values()) - sum(map(len, self._granted.values()))
        if promised != self._promised or promised > len(self._free):
            raise ContractViolation(
                f"page pool: {self._promised} pages promised by count, {promised} by owner, "
                f"{len(self._free)} free"
            )
