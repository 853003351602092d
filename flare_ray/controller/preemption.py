"""Pages for requests as they grow, and who gives way when there are none (contract: C1, M1, M7).

Before a round is planned, each of its lanes must hold a promise of every page that the round can
touch, counted from the furthest position that the rounds in flight may reach: so the device cannot
run out inside a round, at either queue depth. Lanes are served in order (lower priority value
first, then arrival). For a lane that is short

1. snapshots are evicted, those that preempted requests wait for last; while some of them cannot
   go yet, because they are being copied or are about to be restored, the lane sits out;
2. requests behind it in that order are preempted, the last one first. Nothing of theirs is
   published or freed before their rounds in flight have been harvested; meanwhile the lane sits
   out, and nobody is admitted;
3. if nobody is behind it, it sits out until somebody in front of it ends.

Why everybody finishes: the first running request in that order is short only while others hold
pages, and all others give way to it. Its worst case fits the pool (checked at arrival), so it ends.
A request is preempted at most once per page that somebody in front of it comes to need: at most
the sum of the worst cases, in pages, of those in front; and since it comes back to its old place in
the queue, they are those with a smaller priority value and those of its own that came before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flare_ray.controller.admission import Admission
from flare_ray.controller.live import LiveRequest, Phase
from flare_ray.controller.paging.pool import pages_for


class Growth:
    """Extends promises, and preempts. Used by the controller's thread.

    Args:
        admission: who runs, and what they hold.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def cover(
        self, decoding: Sequence[LiveRequest], end_of: Callable[[LiveRequest], int]
    ) -> list[LiveRequest]:
        """Those of `decoding`, in their order, whose next round has all its pages.

        Args:
            end_of: positions below which a lane's next round may write.
        """
        missing = {live.uid: _missing(live, end_of(live)) for live in decoding}
        if max(missing.values(), default=0) <= 0:
            for live in decoding:
                live.short_pages = 0
            return list(decoding)
        for live in sorted(decoding, key=lambda live: live.order):
            if live.phase is Phase.DECODE:
                self._extend(live, missing[live.uid])
        return [live for live in decoding if live.phase is Phase.DECODE and not live.short_pages]

    def _extend(self, live: LiveRequest, missing: int) -> None:
        """Promise `missing` pages to a request, or note that it is short of them."""
        pool = self._admission.pool
        live.short_pages = max(missing, 0)
        while live.short_pages and not pool.extend(live.uid, missing):
            comes_by_itself = self._admission.is_draining or missing <= pool.free_pages
            if comes_by_itself or not self._preempt_behind(live):
                return
        live.reserved_pages += live.short_pages
        live.short_pages = 0

    def _preempt_behind(self, live: LiveRequest) -> bool:
        """Preempt the last running request if it is behind `live`; False if it is not."""
        last = max(self._admission.running.values(), key=lambda other: other.order)
        if last is live:
            return False
        self._admission.preempt(last)
        return True


def _missing(live: LiveRequest, end: int) -> int:
    """Pages beyond its promise that a request needs for positions below `end`; 0 or less = none."""
    return min(pages_for(end), live.limit_pages) - live.reserved_pages
