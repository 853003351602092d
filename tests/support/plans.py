"""Small valid plans for tests of transport."""

from __future__ import annotations

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.plan import PageGrant, PrefillLane, RoundPlan, SlotInit
from flare_ray.contracts.shapes import GraphKind


def prefill_plan(
    manifest: PreparedManifest, round_id: int, *, slot: int = 0, tokens: tuple[int, ...] = (5, 6, 7)
) -> RoundPlan:
    """One request's whole prompt in `slot`; epochs rise with the round, so plans may repeat it."""
    shape = next(
        s
        for s in manifest.shapes
        if s.kind is GraphKind.PREFILL and s.batch_capacity == 1 and s.speculation
    )
    init = SlotInit(slot, round_id + 1, round_id, 1, 4, 1.0, 0, 1.0, 0.0, ())
    return RoundPlan(
        round_id=round_id,
        shape=shape,
        inits=(init,),
        grants=(PageGrant(slot, 0, (slot + 1,)),),
        prefill=(PrefillLane(slot, round_id + 1, 0, tokens, final=True),),
        context_pages=1,
    )
