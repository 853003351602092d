"""The plan as text."""

import msgspec

from flare_ray.cli.plan import GIB, plan_text, rank_bytes
from flare_ray.contracts.manifest import ByteBudget, PreparedManifest
from tests.support.fake_channel import make_manifest

BUDGET = ByteBudget(
    weights_bytes=3 * GIB,
    page_bytes=2 * GIB,
    state_bytes=GIB // 2,
    graph_pool_bytes=0,
    scratch_bytes=GIB // 4,
)


def manifest_of(budget: ByteBudget = BUDGET, **settings) -> PreparedManifest:
    return msgspec.structs.replace(make_manifest(**settings), budget=budget)


def test_plan_sums_what_is_persistent_and_all_of_a_rank():
    manifest = manifest_of()
    lines = {line.split()[0]: line for line in plan_text(manifest).splitlines() if "MiB" in line}
    assert f"{11 * GIB // 2:,}" in lines["persistent"]
    assert f"{rank_bytes(manifest):,}" in lines["total"]
    assert rank_bytes(manifest) == 23 * GIB // 4


def test_plan_counts_programs_by_kind_and_lanes():
    # Concurrency four and five drafts: eighteen speculative programs (contract: G1).
    text = plan_text(manifest_of(slots=4, draft_tokens=5))
    assert "speculative, absorbs drafter history: 18" in text
    assert "decode, ordinary: 3" in text
    assert "lanes   4: widths 1 2 3 4 5 6" in text
    assert "programs: 33" in text
    assert "resume, absorbs drafter history: 3" in text


def test_plan_shows_tokens_a_lane_of_prefills():
    assert "lanes   2: tokens a lane 32" in plan_text(manifest_of(slots=2, prefill_tokens=64))
