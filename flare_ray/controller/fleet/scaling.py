"""How many engines there should be, from the tokens that wait and the pages in use.

    pressure = max(tokens waiting an engine / target, share of pages promised / target)

    pressure > 1                                    -> enough engines for it, at most twice as many
    one engine less would still be calm             -> one less
    otherwise                                       -> as many as now

Calm means at most CALM of either target, and of the slots, after the load has moved together: what
led to an engine more never takes it away again, nor the other way round. How long a wish must last
before it is followed is Serve's part (`upscale_delay_s`, `downscale_delay_s`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CALM = 0.6
"""Share of the targets that the remaining engines may reach when one is given up."""


@dataclass(frozen=True, slots=True)
class ScalingTargets:
    """What one engine should bear at most.

    Attributes:
        waiting_tokens: tokens, prompts and budgets, of requests without a slot; > 0.
        page_usage: share of its pages granted or promised, > 0 to 1.
        slots: requests that it runs at once; > 0.
    """

    waiting_tokens: float
    page_usage: float
    slots: int


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """What all engines bear.

    Attributes:
        engines: how many share it; > 0.
        waiting_tokens: sum over the engines.
        page_usage: sum of the shares of pages in use: 0 to `engines`.
        running: requests with a slot.
    """

    engines: int
    waiting_tokens: float
    page_usage: float
    running: float


def wanted_engines(load: FleetLoad, targets: ScalingTargets) -> int:
    """Engines that the load asks for, at least one; bounds are the caller's."""
    now = load.engines
    needed = max(load.waiting_tokens / targets.waiting_tokens, load.page_usage / targets.page_usage)
    if needed > now:
        return min(math.ceil(needed), 2 * now)
    fewer = now - 1
    busy = max(needed, load.running / targets.slots)
    return fewer if fewer and busy <= CALM * fewer else now
