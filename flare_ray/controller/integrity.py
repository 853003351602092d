"""Whether the controller's books add up: the part that no single room sees (contract: M1, T6, T7).

`Controller.check_integrity` proves, in this order,

    requests      everyone live waits (also for a grammar), runs, or drains; each in its phase
    rounds        what is in flight is what its requests believe to be in flight
    preempted     snapshots that requests wait for, and pages that requests lack, are counted right
    admission     slots, epochs, reservations and page-table entries (`Admission.check_integrity`)
    snapshots     pins, rows, claims (`Snapshots`, `PrefixIndex`), then every page of the pool
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from flare_ray.controller.admission import Admission
from flare_ray.controller.cohort import SubmittedRound
from flare_ray.controller.live import LiveRequest, Phase
from flare_ray.controller.paging.pool import pages_for


def request_problems(
    admission: Admission,
    requests: Mapping[str, LiveRequest],
    in_flight: Iterable[SubmittedRound],
) -> Iterator[str]:
    """What is wrong with requests and rounds, in words.

    Args:
        requests: live requests by id.
        in_flight: submitted rounds that have not answered.
    """
    yield from _place_problems(admission, requests)
    lanes = Counter(live.uid for planned in in_flight for live in planned.lanes)
    known = {live.uid: live for live in (*requests.values(), *admission.holders.values())}
    for uid, live in known.items():
        if lanes.pop(uid, 0) != len(live.in_flight):
            yield f"request {uid} believes in {len(live.in_flight)} rounds in flight"
    if lanes:
        yield f"rounds in flight have lanes of unknown requests {sorted(lanes)}"
    for live in admission.running.values():
        yield from _progress_problems(live)
    awaiting = Counter(id(live.kept) for live in requests.values() if live.kept is not None)
    for snapshot in admission.snapshots.index:
        if snapshot.awaited != awaiting[id(snapshot)]:
            yield (
                f"row {snapshot.row} is awaited by {snapshot.awaited} requests by count, by "
                f"{awaiting[id(snapshot)]} in truth"
            )


def _place_problems(admission: Admission, requests: Mapping[str, LiveRequest]) -> Iterator[str]:
    waiting = {live.uid for live in admission.waiting}
    draining = {live.uid for live in admission.holders.values() if live.uid not in waiting}
    draining -= set(admission.running)
    for live in requests.values():
        places = {
            Phase.COMPILING: live.slot < 0 and live.uid not in waiting,
            Phase.WAITING: live.uid in waiting,
            Phase.PREFILL: live.uid in admission.running,
            Phase.DECODE: live.uid in admission.running,
            Phase.PREEMPTED: live.uid in draining,
            Phase.ENDED: False,
        }
        if not places[live.phase]:
            yield f"request {live.uid} is {live.phase.name} and in no such place"
    for live in (*admission.waiting, *admission.running.values()):
        if requests.get(live.request.request_id) is not live:
            yield f"request {live.uid} holds a place and is not live"
    orders = [live.queue_order for live in admission.waiting]
    if orders != sorted(orders) or len(waiting) != len(orders):
        yield f"the queue is out of order: {orders}"


def _progress_problems(live: LiveRequest) -> Iterator[str]:
    """A running request's counters against its tokens and pages."""
    name = f"request {live.uid}"
    if not live.reserved_pages <= live.limit_pages:
        yield f"{name}: {live.reserved_pages} pages reserved, its worst case is {live.limit_pages}"
    if live.started and live.granted_pages < pages_for(live.consumed_tokens):
        yield f"{name}: {live.consumed_tokens} tokens in {live.granted_pages} pages"
    if min(pages_for(live.consumed_bound), live.limit_pages) > live.reserved_pages:
        yield f"{name}: may reach {live.consumed_bound} tokens, {live.reserved_pages} pages"
    generated = len(live.chain.tokens) - len(live.request.prompt_tokens)
    if live.generated_tokens != generated:
        yield f"{name}: {live.generated_tokens} generated tokens by count, {generated} known"
    if live.short_pages and live.phase is not Phase.DECODE:
        yield f"{name}: lacks {live.short_pages} pages without decoding"
