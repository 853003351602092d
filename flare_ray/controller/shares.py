"""Fair shares of slots among tenants: which waiting request is next (contract: C1).

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", 2024), one per
priority and tenant: tokens served, prompts at admission and output as it comes, over the tenant's
weight. Among requests of one priority the next slot goes to the tenant whose counter is least; a
tenant's own requests keep their order. Rounds need no shares of their own: whoever holds a slot
takes part in all of them.

Stated bound. Of two tenants that both have requests of one priority waiting all through any stretch
of time, let T be the tokens that each was served in it and w their weights. Then

    |T1 / w1 - T2 / w2| <= 2 * S * K / min(w1, w2)

with S slots and K the longest prompt plus output: twice what the engine can hold at once, however
long the stretch. Why: who is admitted has the least counter, and what it already holds adds at most
S * K tokens to it before it is least again. Left out is who waits for its prefix to be loaded: such
a request keeps its place, and others pass it.

A tenant that had nothing waiting comes back with no less than the least counter of those that have,
so being idle saves nothing up. When nobody of a priority waits its counters are forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from flare_ray.controller.live import LiveRequest


class _Share(NamedTuple):
    """Whose counter it is."""

    priority: int
    tenant: str


class FairShares:
    """Counters of tenants with waiting requests. Used by the controller's thread only."""

    def __init__(self) -> None:
        self._counters: dict[_Share, float] = {}
        self._waiting: Counter[_Share] = Counter()
        # Until nobody waits: places once estimated would not compare with those of newcomers.
        self._is_contested = False

    def entered(self, live: LiveRequest, running: Iterable[LiveRequest]) -> None:
        """A request joined the queue."""
        share = _share(live)
        if not self._waiting[share]:
            # What they were served before counts before, not against the newcomer's start.
            for served in running:
                self.settle(served)
            backlogged = [
                counter
                for other, counter in self._counters.items()
                if other.priority == share.priority and other in self._waiting
            ]
            least = min(backlogged, default=0.0)
            self._counters[share] = max(self._counters.get(share, least), least)
            self._is_contested |= len(self._counters) > 1
        self._waiting[share] += 1

    def left(self, live: LiveRequest) -> None:
        """A request left the queue, for a slot or for good."""
        share = _share(live)
        self._waiting[share] -= 1
        if self._waiting[share]:
            return
        del self._waiting[share]
        if all(other.priority != share.priority for other in self._waiting):
            for other in [other for other in self._counters if other.priority == share.priority]:
                del self._counters[other]
        self._is_contested &= bool(self._waiting)

    def settle(self, live: LiveRequest) -> None:
        """Charge a request that has, or had, a slot with what it was served since the last time."""
        tokens = len(live.request.prompt_tokens) + live.generated_tokens
        share = _share(live)
        if share in self._counters:
            self._counters[share] += (tokens - live.charged_tokens) / live.request.weight
        live.charged_tokens = tokens

    def arrange(self, waiting: list[LiveRequest], running: Iterable[LiveRequest]) -> None:
        """Put the queue in the order in which slots will be given, as far as is known now."""
        if not self._is_contested:
            return
        for live in running:
            self.settle(live)
        ahead = dict(self._counters)
        for live in sorted(waiting, key=lambda live: live.order):
            if live.preemptions:
                continue  # it has been charged, and keeps its place before everybody
            share = _share(live)
            live.share_start = ahead[share]
            ahead[share] += len(live.request.prompt_tokens) / live.request.weight
        waiting.sort(key=lambda live: live.queue_order)


def _share(live: LiveRequest) -> _Share:
    return _Share(live.request.priority, live.request.tenant)
