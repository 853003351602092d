"""The plan as text, and whether it fits."""

import msgspec
import pytest

from flare_ray.cli.plan import GIB, check_fit, plan_text, rank_bytes, rank_limit_bytes
from flare_ray.contracts.manifest import ByteBudget, PreparedManifest
from flare_ray.errors import CapacityError
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
    assert "programs: 27" in text


def test_plan_shows_tokens_a_lane_of_prefills():
    assert "lanes   2: tokens a lane 32" in plan_text(manifest_of(slots=2, prefill_tokens=64))


def test_plan_that_fits_says_of_how_much():
    assert check_fit(manifest_of(), 6 * GIB) == "fits: 5.75 of 6.00 GiB per rank"


@pytest.mark.parametrize(
    ("largest", "advice"),
    [
        ("weights_bytes", "tensor_parallel_size"),
        ("page_bytes", "page_pool_tokens"),
        ("state_bytes", "concurrency"),
        ("graph_pool_bytes", "token_capacity"),
        ("scratch_bytes", "prefill_tokens"),
    ],
)
def test_plan_that_does_not_fit_names_the_sum_and_the_setting_of_the_largest_part(largest, advice):
    manifest = manifest_of(msgspec.structs.replace(BUDGET, **{largest: 9 * GIB}))
    with pytest.raises(CapacityError, match=f"needs .* 4.00 GiB are available; .*{advice}"):
        check_fit(manifest, 4 * GIB)


def test_limit_of_a_rank_is_what_the_user_says_or_a_share_of_free_memory():
    manifest = manifest_of()
    assert rank_limit_bytes(manifest, 1.5) == 3 * GIB // 2
    alone = rank_limit_bytes(manifest, None)
    four = rank_limit_bytes(msgspec.structs.replace(manifest, world_size=4), None)
    assert 0 < four < alone
