"""Packed rounds as the policy sees them: what they are expected to emit, and what confidence gains
(contract: C4)."""

import msgspec
import numpy as np
import pytest
from pydantic import ValidationError

from benchmarks.policy.packing import PackedWorld
from flare_ray.config import EngineConfig, SpeculationConfig
from flare_ray.contracts.shapes import packed_shapes, speculative_shapes
from flare_ray.controller.catalog import serve_selection
from flare_ray.controller.verification import AdaptivePolicy, Cohort, CohortLane, CompletedRound
from flare_ray.controller.verification.capacity import MOST_GAIN, ConfidenceGain, packed_expected
from flare_ray.errors import ConfigError
from tests.support.fake_channel import make_manifest
from tests.support.policy_simulator import lane_record

GOOD = [1.0, 1.9, 2.7, 3.4, 4.0, 4.5, 4.9, 5.2]
POOR = [1.0, 1.2, 1.24, 1.25, 1.25, 1.25, 1.25, 1.25]
ROUNDS = 600


def shape_of(lanes, capacity):
    packed = packed_shapes(lanes, 8, 4096, (2, 3, 4))
    return next(s for s in packed if s.batch_capacity == lanes and s.packed_capacity == capacity)


def test_rows_go_to_the_largest_survivals():
    expected = np.array([GOOD, POOR])
    tokens = packed_expected(expected, shape_of(2, 6))
    assert tokens.tolist() == pytest.approx([GOOD[4], 1.0]), "four free rows, all to the good lane"


def test_expected_tokens_never_pass_ceilings_nor_the_rectangular_round():
    clipped = [*GOOD[:3], *[GOOD[2]] * 5]
    tokens = packed_expected(np.array([clipped, POOR]), shape_of(2, 8))
    assert tokens[0] == pytest.approx(GOOD[2])
    assert tokens[1] <= POOR[-1]


def test_a_lane_alone_takes_every_row():
    lone = packed_expected(np.array([GOOD]), shape_of(1, 4))
    assert lone.tolist() == pytest.approx([GOOD[3]])


def test_gain_of_confidence_follows_what_rounds_emit_and_is_bounded():
    gain, shape = ConfidenceGain(), shape_of(2, 4)
    assert gain.of(shape) == 1.0
    for _ in range(200):
        gain.observe(shape, drafted=2.0, emitted=3)
    assert gain.of(shape) == pytest.approx(1.5, rel=0.01)
    for _ in range(400):
        gain.observe(shape, drafted=1.0, emitted=14)
    assert gain.of(shape) <= MOST_GAIN


def test_packed_rounds_teach_survival_only_what_they_offered():
    policy, shape = AdaptivePolicy(), shape_of(2, 4)
    for _ in range(60):
        records = (lane_record(1, offered=2, accepted=2), lane_record(2, offered=0, accepted=0))
        policy.observe(CompletedRound(shape, records), 1_000_000)
    assert policy.survival.expected_emitted(1)[2] > 2.6
    untouched = AdaptivePolicy().survival.expected_emitted(2)
    assert policy.survival.expected_emitted(2)[1] >= untouched[1], "no offer is no rejection"


# The whole policy, where fresh confidence knows what history cannot.


@pytest.mark.parametrize("lanes", [4, 16])
def test_packed_programs_are_chosen_where_forecasts_tell_lanes_apart(lanes, random_seed):
    world = PackedWorld(lanes=lanes, rounds=ROUNDS)
    packed = world.play(AdaptivePolicy(), seed=random_seed, packed=True)
    rectangular = world.play(AdaptivePolicy(), seed=random_seed, packed=False)
    assert packed.goodput > 1.08 * rectangular.goodput
    assert packed.packed_share > 0.5


def test_packed_programs_lose_little_where_all_drafts_pass(random_seed):
    world = PackedWorld(lanes=4, rounds=ROUNDS, curves=((0.95,),))
    packed = world.play(AdaptivePolicy(), seed=random_seed, packed=True)
    rectangular = world.play(AdaptivePolicy(), seed=random_seed, packed=False)
    assert packed.goodput > 0.97 * rectangular.goodput


def test_target_is_held_for_the_slowest_lane_of_a_packed_round():
    policy = AdaptivePolicy(objective="slo", inter_token_ns=3e6)
    catalog = sorted(
        (*speculative_shapes(1, (1, 8), 128), *packed_shapes(1, 8, 128, (4,))),
        key=lambda shape: shape.rows,
    )
    policy.choose(Cohort((CohortLane(1, 7),)), catalog)
    assert len(policy.decision().inter_token_ns) == 3


# Catalog and settings.


def manifest_with_packing():
    manifest = make_manifest(slots=4, draft_tokens=7)
    return msgspec.structs.replace(
        manifest, shapes=(*manifest.shapes, *packed_shapes(4, 8, 128, (2, 4)))
    )


def selection(**speculation):
    config = EngineConfig(
        checkpoint="x", device="cpu", concurrency=4, speculation=SpeculationConfig(**speculation)
    )
    return serve_selection(manifest_with_packing(), config)


def test_candidates_hold_every_packing_ordered_by_rows():
    candidates = selection(packed_rows=(2, 4)).candidates(3)
    assert [(s.verify_width, s.packed_capacity) for s in candidates[-4:]] == [
        (7, 0),
        (8, 8),
        (8, 16),
        (8, 0),
    ]


def test_prepared_packings_that_are_not_asked_for_are_not_served():
    assert not any(shape.packed_capacity for shape in selection().rounds)
    assert {s.packed_capacity for s in selection(packed_rows=(4,)).rounds} == {0, 4, 8, 16}


def test_unprepared_packing_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"packed_rows: \[3\] were not prepared"):
        selection(packed_rows=(3,))


@pytest.mark.parametrize("rows", [(4, 2), (2, 2), (1,), (0, 3)])
def test_nonsensical_packings_are_refused_by_name(rows):
    with pytest.raises(ValidationError, match="packed_rows"):
        SpeculationConfig(packed_rows=rows)


def test_packing_under_a_fixed_width_is_refused():
    with pytest.raises(ValidationError, match="packed_rows"):
        SpeculationConfig(packed_rows=(2,), policy="fixed")
