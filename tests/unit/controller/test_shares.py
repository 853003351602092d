"""Fair shares among tenants: the stated bound, weights, and what coming and going does to them."""

import pytest

from flare_ray.contracts.messages import Failed
from tests.support.fake_channel import make_manifest
from tests.unit.controller.conftest import Harness, first_item

SLOTS = 4
SHORT, LONG = 8, 32
PROMPT = (1, 2, 3)
FLOOD_TOKENS = 2400
WINDOW = 600
"""Programs that are looked at: four tokens each at most, so everybody has requests waiting."""
TOLERANCE = 0.2
"""Relative, of shares over a window; four requests of 32 tokens move 800 tokens by 16 %."""


def served(harness, tenants):
    """Tokens each tenant was served so far."""
    tokens = dict.fromkeys(tenants, 0)
    for live in harness.seen.values():
        if live.slot >= 0 or live.generated_tokens:
            tokens[live.request.tenant] += len(live.request.prompt_tokens) + live.generated_tokens
    return tokens


def flood(queue_depth, tenants):
    """An engine with FLOOD_TOKENS waiting of every tenant: name -> (weight, max_tokens)."""
    counts = {tenant: FLOOD_TOKENS // budget for tenant, (_, budget) in tenants.items()}
    harness = Harness(
        queue_depth=queue_depth,
        manifest=make_manifest(slots=SLOTS, draft_tokens=0),
        admission={"max_waiting": sum(counts.values())},
    )
    for number in range(max(counts.values())):
        for tenant, (weight, budget) in tenants.items():
            if number < counts[tenant]:
                name = f"{tenant}{number}"
                harness.submit(name, PROMPT, budget, tenant=tenant, weight=weight)
    harness.step()
    harness.seen = {live.uid: live for live in harness.controller._requests.values()}
    return harness


def shares_over_window(queue_depth, tenants):
    """Tokens by tenant over the window, over their weights; and the largest difference seen."""
    harness = flood(queue_depth, tenants)
    widest = 0.0
    for _ in range(WINDOW):
        harness.step()
        per_weight = [
            tokens / tenants[tenant][0] for tenant, tokens in served(harness, tenants).items()
        ]
        widest = max(widest, max(per_weight) - min(per_weight))
    waiting = {live.request.tenant for live in harness.controller._admission.waiting}
    assert waiting == set(tenants), "the window is shorter than the flood"
    return per_weight, widest


def bound(tenants):
    """As `shares` states it."""
    longest = len(PROMPT) + max(budget for _, budget in tenants.values())
    return 2 * SLOTS * longest / min(weight for weight, _ in tenants.values())


@pytest.mark.parametrize(
    "tenants",
    [
        {"a": (1.0, LONG), "b": (1.0, LONG)},
        {"a": (1.0, SHORT), "b": (1.0, LONG)},
        {"a": (3.0, LONG), "b": (1.0, SHORT)},
        {"a": (1.0, SHORT), "b": (1.0, LONG), "c": (2.0, SHORT)},
    ],
    ids=["equal", "short-and-long", "three-to-one", "three"],
)
def test_backlogged_tenants_are_served_by_weight_within_the_stated_bound(queue_depth, tenants):
    per_weight, widest = shares_over_window(queue_depth, tenants)
    assert widest <= bound(tenants)
    assert min(per_weight) >= (1 - TOLERANCE) * max(per_weight)


def test_without_shares_the_tenant_with_long_outputs_takes_more(queue_depth, monkeypatch):
    """Negative control: in order of arrival alone the same load breaks the bound."""
    monkeypatch.setattr(
        "flare_ray.controller.shares.FairShares.arrange", lambda self, waiting, running: None
    )
    tenants = {"a": (1.0, SHORT), "b": (1.0, LONG)}
    per_weight, widest = shares_over_window(queue_depth, tenants)
    assert widest > bound(tenants)
    assert min(per_weight) < 0.5 * max(per_weight)


def test_newcomer_is_neither_behind_the_flood_nor_ahead_of_it_for_having_been_idle(make_harness):
    harness = make_harness(
        manifest=make_manifest(slots=1, draft_tokens=0), admission={"max_waiting": 64}
    )
    for number in range(20):
        harness.submit(f"a{number}", PROMPT, 6, tenant="a")
    harness.run_rounds(40)
    for number in range(6):
        harness.submit(f"b{number}", PROMPT, 6, tenant="b")
    harness.run_until_idle()
    order = [
        item.request_id
        for _, items in harness.output.batches
        for item in items
        if type(item).__name__ == "Finished"
    ]
    first, last = order.index("b0"), order.index("b5")
    between = [name[0] for name in order[first : last + 1]]
    assert first <= order.index("a0") + 10
    assert between.count("a") == pytest.approx(between.count("b"), abs=2), "they take turns"


def test_one_tenant_keeps_the_order_of_arrival(make_harness):
    harness = make_harness(manifest=make_manifest(slots=1), admission={"max_waiting": 64})
    for number in range(8):
        harness.submit(f"r{number}", PROMPT, 4, tenant="a", weight=float(1 + number))
    harness.run_until_idle()
    firsts = [plan.inits[0].uid for plan in harness.channel.plans if plan.inits]
    assert firsts == sorted(firsts)


def test_priority_goes_before_shares(make_harness):
    harness = make_harness(manifest=make_manifest(slots=1), admission={"max_waiting": 64})
    harness.submit("first", PROMPT, 4, tenant="b")
    harness.step()
    for number in range(6):
        harness.submit(f"a{number}", PROMPT, 4, tenant="a", priority=0)
    harness.submit("low", PROMPT, 4, tenant="c", priority=1)
    harness.run_until_idle()
    uids = [plan.inits[0].uid for plan in harness.channel.plans if plan.inits]
    assert uids[-1] == max(uids), "the lower priority came last although its share is untouched"


def test_counters_are_forgotten_when_nobody_waits(make_harness):
    harness = make_harness(manifest=make_manifest(slots=1), admission={"max_waiting": 64})
    for number in range(12):
        harness.submit(f"r{number}", PROMPT, 3, tenant=str(number % 5), priority=number % 2)
    harness.run_until_idle()
    assert not harness.controller._admission._shares._counters


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_nonsensical_weight_is_refused_by_name(make_harness, weight):
    harness = make_harness()
    harness.submit("r", PROMPT, 3, weight=weight)
    harness.step(2)
    refusal = first_item(harness, "r")
    assert isinstance(refusal, Failed)
    assert "weight" in refusal.message
