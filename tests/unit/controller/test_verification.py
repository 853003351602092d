"""Verification policies: what is learnt, what is chosen, and what it costs in simulated worlds."""

import dataclasses
import itertools
import pickle
import random

import numpy as np
import pytest

from benchmarks.policy.cells import readaptation
from benchmarks.policy.costs import catalog
from benchmarks.policy.players import Stage, observed_noise, play_policy
from benchmarks.policy.traces import Synthetic
from flare_ray.contracts.record import Status
from flare_ray.contracts.shapes import speculative_shapes
from flare_ray.controller.verification import (
    AdaptivePolicy,
    Cohort,
    CohortLane,
    CompletedRound,
    FixedPolicy,
    survival,
)
from flare_ray.controller.verification.adaptive import STATED_BOUND
from flare_ray.controller.verification.cost import MEMORY_ROUNDS, CostTable
from flare_ray.controller.verification.exploration import (
    ACCOUNT_LIMIT_ROUNDS,
    PROBE_SHARE,
    ExplorationAccount,
    Prober,
)
from flare_ray.controller.verification.survival import SurvivalEstimator
from flare_ray.errors import ContractViolation
from tests.support.policy_simulator import World, lane_record

ROUNDS = 2000
CONTENDED_MEAN = 0.93
"""Mean share of the best fixed width's goodput under contention of up to two; 0.983 was measured
over 342 runs, the mean of eleven varies by about 0.01."""
MS = 1e6
SURVIVAL_TOLERANCE = 0.1
"""Three standard deviations of a frequency over the request's memory of some 20 tests, shrunk."""
CATALOG = speculative_shapes(1, range(1, 9), 128)
ONE_LANE = Cohort((CohortLane(1, 7),))


def rising(per_row, *, cliff_at=99, factor=1.0):
    """Price by width, with a jump at one width."""

    def price(shape):
        jump = factor if shape.verify_width >= cliff_at else 1.0
        return MS * (1.0 + per_row * (shape.verify_width - 1)) * jump

    return price


# Fixed.


def test_fixed_width_applies_where_prepared_and_width_one_elsewhere():
    policy = FixedPolicy(4)
    assert policy.choose(ONE_LANE, CATALOG).verify_width == 4
    only_narrow = CATALOG[:1]
    assert policy.choose(ONE_LANE, only_narrow).verify_width == 1


def test_policy_refuses_to_explain_a_choice_it_never_made():
    with pytest.raises(ContractViolation):
        FixedPolicy(2).decision()
    with pytest.raises(ContractViolation):
        AdaptivePolicy().decision()


# Survival.


def survival_of(records, uid=1):
    estimator = SurvivalEstimator()
    for record in records:
        estimator.observe([record])
    expected = estimator.expected_emitted(uid)
    return [after - before for before, after in itertools.pairwise(expected)]


def test_survival_converges_to_the_observed_joint_frequencies():
    accepted = [3, 1, 0, 3, 3, 1, 3, 3] * 50
    survival = survival_of([lane_record(1, offered=3, accepted=a) for a in accepted])
    for depth, truth in enumerate([7 / 8, 5 / 8, 5 / 8]):
        assert survival[depth] == pytest.approx(truth, abs=SURVIVAL_TOLERANCE)


def test_depth_that_was_not_offered_counts_neither_way():
    shallow = survival_of([lane_record(1, offered=2, accepted=2)] * 60)
    assert shallow[1] > 0.85
    ratios = [after / before for before, after in itertools.pairwise(shallow[1:])]
    assert min(ratios) > 0.85, "unseen depths follow the deepest seen one"


def test_clipped_round_is_no_rejection():
    """EOS after two of five accepted drafts: two passed, the third's fate is unknown."""
    clipped = lane_record(1, offered=7, accepted=5, emitted=2, status=Status.ACTIVE | Status.EOS)
    assert survival_of([clipped] * 40)[2] > 0.8
    rejected = lane_record(1, offered=7, accepted=2)
    assert survival_of([rejected] * 40)[2] < 0.3


@pytest.mark.parametrize("status", [Status.IDLE, Status.ACTIVE | Status.NONFINITE])
def test_dead_or_failed_lane_teaches_nothing(status):
    record = lane_record(1, offered=7, accepted=0, emitted=0, status=status)
    assert survival_of([record] * 40) == survival_of([])


def test_request_is_judged_by_its_own_outcomes_once_it_has_some():
    estimator = SurvivalEstimator()
    for _ in range(40):
        estimator.observe(
            [lane_record(1, offered=5, accepted=5), lane_record(2, offered=5, accepted=0)]
        )
    assert estimator.expected_emitted(1)[5] > 4.5
    assert estimator.expected_emitted(2)[5] < 1.7
    assert 1.5 < estimator.expected_emitted(3)[5] < 4.5, "a new request starts at the workload"


def test_forgotten_requests_leave_nothing_behind():
    policy = AdaptivePolicy()
    for uid in range(500):
        policy.choose(Cohort((CohortLane(uid, 7),)), CATALOG)
        policy.forget(uid)
    assert len(policy.survival) == 0


# Prices.


def test_price_ignores_rare_disturbances():
    table = CostTable()
    for number in range(2 * MEMORY_ROUNDS):
        table.observe(CATALOG[2], 5_000_000 if number % 7 == 3 else 1_000_000)
    assert table.estimate_ns(CATALOG[2]) == pytest.approx(1_000_000, rel=0.03)


def test_price_of_an_idle_program_follows_the_common_drift():
    table = CostTable()
    for _ in range(MEMORY_ROUNDS):
        table.observe(CATALOG[0], 1_000_000)
        table.observe(CATALOG[3], 1_500_000)
    for number in range(300):
        table.observe(CATALOG[0], 1_000_000 + 10_000 * min(number, 100))
    assert table.estimate_ns(CATALOG[3]) == pytest.approx(3_000_000, rel=0.02)


@pytest.mark.parametrize("programs", [1, 3, 8])
def test_prices_do_not_wander_under_noise(programs):
    """Incident: with many programs in turn the common factor grew a millionfold."""
    table = CostTable()
    for number in range(20_000):
        shape = CATALOG[number % programs]
        noise = 0.8 + (number * 7919 % 400) / 1000
        table.observe(shape, round(shape.verify_width * 1_000_000 * noise))
    for shape in CATALOG[:programs]:
        expected = pytest.approx(shape.verify_width * 1_000_000, rel=0.15)
        assert table.estimate_ns(shape) == expected


def test_unmeasured_width_is_priced_between_its_neighbours():
    table = CostTable({CATALOG[0]: 1_000_000, CATALOG[4]: 2_000_000})
    assert table.estimate_ns(CATALOG[2]) == pytest.approx(1_500_000)


def test_one_disturbed_sample_cannot_price_a_narrow_width_out():
    table = CostTable()
    table.observe(CATALOG[0], 90_000_000)
    for _ in range(MEMORY_ROUNDS):
        table.observe(CATALOG[2], 2_000_000)
    assert table.prices_ns([table.price(shape) for shape in CATALOG])[0] <= 2_000_000


# Choice.


def choose_after(policy, chance_accepted, price, rounds=300):
    """Widths chosen in the last third of a run with one lane that always accepts so many."""
    widths = []
    for _ in range(rounds):
        shape = policy.choose(ONE_LANE, CATALOG)
        widths.append(shape.verify_width)
        record = lane_record(
            1,
            offered=shape.verify_width - 1,
            accepted=min(chance_accepted, shape.verify_width - 1),
        )
        policy.observe(CompletedRound(shape, (record,)), round(price(shape)))
    return widths[-rounds // 3 :]


def most_common(widths):
    return max(set(widths), key=widths.count)


@pytest.mark.parametrize(("accepted", "width"), [(0, 1), (2, 3), (7, 8)])
def test_width_follows_the_accepted_count_under_mild_prices(accepted, width):
    assert most_common(choose_after(AdaptivePolicy(), accepted, rising(0.05))) == width


def test_width_stops_before_a_price_cliff():
    price = rising(0.05, cliff_at=5, factor=3.0)
    assert most_common(choose_after(AdaptivePolicy(), 7, price)) == 4


def test_ceilings_bound_the_useful_widths():
    policy = AdaptivePolicy()
    cohort = Cohort((CohortLane(1, 0), CohortLane(2, 2)))
    assert policy.choose(cohort, CATALOG).verify_width <= 3
    assert policy.choose(Cohort((CohortLane(1, 0),)), CATALOG).verify_width == 1


def test_equal_inputs_give_equal_choices():
    world = World(4, [(0.6,)], rising(0.2))
    first = world.play(AdaptivePolicy(), rounds=400, seed=3)
    second = world.play(AdaptivePolicy(), rounds=400, seed=3)
    assert first.widths == second.widths


def test_probes_stay_inside_their_account_in_the_long_run():
    """Drafts are useless and dear: every round that is not of width one is a probe's loss."""
    world = World(1, [(0.0,)], rising(0.8), noise=0.0)
    widths = world.play(AdaptivePolicy(), rounds=20_000, seed=1).widths
    settled = widths[10_000:]
    lost_ns = sum(0.8 * MS * (width - 1) for width in settled)
    assert 0 < lost_ns < (PROBE_SHARE * len(settled) + ACCOUNT_LIMIT_ROUNDS) * MS


SHIFT_ROUND = 400


@pytest.mark.parametrize("lanes", [4, 16])
def test_drafts_that_become_good_are_noticed_from_depth_zero_within_fifty_rounds(lanes):
    """A test at width two loses a quarter of a round: one in fifty is paid for."""
    texts = Synthetic("shift", [(0.3,), (0.9,)], turns=((0, 0), (SHIFT_ROUND, 1)))
    stage = Stage(texts.make(2 * SHIFT_ROUND, lanes), lanes, 2 * SHIFT_ROUND)
    shapes = catalog(lanes, 4096)
    prices = np.array([rising(0.55)(shape) for shape in shapes])
    measured = {shape: round(price) for shape, price in zip(shapes, prices, strict=True)}
    noise = observed_noise(stage.rounds, 5)
    run = play_policy(stage, shapes, prices, AdaptivePolicy(measured), noise)
    before, after = run.widths[:SHIFT_ROUND], run.widths[SHIFT_ROUND:]
    assert most_common(before) == 1
    assert most_common(after[50:]) > 1
    assert readaptation(stage, prices, run)[0] <= 50
    assert run.probe_ns <= PROBE_SHARE * run.price_ns.sum() + ACCOUNT_LIMIT_ROUNDS * prices.max()


def picked(account, *, hint):
    """Pick between width one, which is best, and two."""
    table = CostTable({CATALOG[0]: 1_000_000, CATALOG[1]: 1_500_000})
    prober = Prober(table, account)
    candidates = [table.price(shape) for shape in CATALOG[:2]]
    return prober.pick(candidates, [1.0, 1.1], [1e6, 1.5e6], 0, hint=hint)


def test_test_that_went_better_than_forecast_is_repeated_on_credit_and_no_further():
    account = ExplorationAccount()
    account.balance_ns = -0.5 * MS
    assert picked(account, hint=False) == (0, 0.0)
    assert picked(account, hint=True) == (1, pytest.approx(0.4 * MS))
    account.balance_ns = -1.5 * MS
    assert picked(account, hint=True) == (0, 0.0)


@pytest.mark.parametrize(("passes", "hint"), [(1, False), (3, True)])
def test_outcomes_far_above_their_forecast_hint_at_better_drafts(passes, hint):
    estimator = SurvivalEstimator()
    for _ in range(40):
        estimator.observe([lane_record(uid, offered=1, accepted=0) for uid in range(4)])
    for _ in range(100):
        estimator.observe([lane_record(uid, offered=0, accepted=0) for uid in range(4)])
    estimator.observe([lane_record(uid, offered=1, accepted=uid < passes) for uid in range(4)])
    assert estimator.hints_at_better == hint


def test_every_width_is_measured_where_probes_are_cheap():
    world = World(1, [(0.5,)], rising(0.02), noise=0.05)
    widths = world.play(AdaptivePolicy(), rounds=600, seed=2).widths
    assert set(widths) == set(range(1, 9))


WORST_BOUND = 0.1
"""Share of the best fixed width's goodput that one run may lose, whatever its noise."""
DISTURBED_BOUND = 0.08
"""The same with four rounds in a hundred three times as long."""
WORLDS = {
    "useless-drafts": World(4, [(0.02,)], rising(0.2)),
    "useless-dear": World(1, [(0.02,)], rising(0.8)),
    "poor": World(4, [(0.3,)], rising(0.25)),
    "good-cheap": World(1, [(0.85,)], rising(0.03)),
    "copying": World(16, [(0.98,)], rising(0.25)),
    "survival-cliff-3": World(4, [(0.97, 0.95, 0.9, 0.05)], rising(0.1)),
    "survival-cliff-1": World(1, [(0.9, 0.02)], rising(0.05)),
    "price-cliff-5": World(4, [(0.85,)], rising(0.05, cliff_at=5, factor=1.8)),
    "price-cliff-2": World(4, [(0.6,)], rising(0.03, cliff_at=2, factor=1.5)),
    "mixed-requests": World(4, [(0.95,), (0.2,)], rising(0.15), by_request=True),
    "turning-texts": World(1, [(0.9,), (0.4,)], rising(0.2), phase_tokens=300),
}


FORMER_FAULTS = [
    ("useless-drafts", 331083917),
    ("survival-cliff-3", 1990410814),
    ("good-cheap", 1521685921),
]
"""Worlds and noises in which a price that rested on a disturbed round ruled for hundreds of rounds
and cost up to 16 %."""


def share_of_best(world, seed):
    run = world.play(AdaptivePolicy(), rounds=ROUNDS, seed=seed)
    return run.goodput / world.best_fixed(ROUNDS)


@pytest.mark.parametrize("name", WORLDS)
def test_goodput_stays_within_the_stated_bound_of_the_best_fixed_width(name, random_seed):
    """Without start-up measurements: on average over noise, and for no noise far below.

    The least of 300 runs of a world was 0.96 (`survival-cliff-1`): a start 8 % too low of a width
    that is worth no more ruled for half the run. It can cost no more than these 8 %.
    """
    runs = [share_of_best(WORLDS[name], random_seed + number) for number in range(3)]
    assert sum(runs) / len(runs) >= 1 - STATED_BOUND
    assert min(runs) >= 1 - WORST_BOUND


@pytest.mark.parametrize(("name", "seed"), FORMER_FAULTS)
def test_disturbed_start_of_the_best_width_is_overcome(name, seed):
    assert share_of_best(WORLDS[name], seed) >= 1 - STATED_BOUND


@pytest.mark.parametrize("name", ["useless-drafts", "poor", "survival-cliff-3"])
def test_frequently_disturbed_host_costs_little(name, random_seed):
    """The former policy lost 6 to 16 % in every sixth such run."""
    world = dataclasses.replace(WORLDS[name], disturbed=0.04)
    assert min(share_of_best(world, random_seed + n) for n in range(2)) >= 1 - DISTURBED_BOUND


class DisturbedStart(AdaptivePolicy):
    """Told of a width's first rounds that they took three times as long."""

    def __init__(self, width, rounds):
        super().__init__()
        self.width, self.left = width, rounds

    def observe(self, record, cost_ns):
        if record.shape.verify_width == self.width and self.left:
            self.left -= 1
            cost_ns *= 3
        super().observe(record, cost_ns)


@pytest.mark.parametrize(("name", "width"), [("useless-drafts", 1), ("survival-cliff-3", 4)])
def test_price_whose_first_three_rounds_were_all_disturbed_is_corrected(name, width):
    world = WORLDS[name]
    run = world.play(DisturbedStart(width, 3), rounds=ROUNDS, seed=77)
    assert run.goodput >= (1 - STATED_BOUND) * world.best_fixed(ROUNDS)


def test_busy_neighbour_costs_little_on_average(random_seed):
    ratios = []
    for world in WORLDS.values():
        disturbed = dataclasses.replace(world, contention=2.0)
        run = disturbed.play(AdaptivePolicy(), rounds=ROUNDS, seed=random_seed)
        ratios.append(run.goodput / world.best_fixed(ROUNDS))
    assert sum(ratios) / len(ratios) > CONTENDED_MEAN


def test_price_of_a_rare_program_is_corrected_for_the_pace_around_it():
    """The rare program runs only while a neighbour makes every round three times as long."""
    table = CostTable()
    for number in range(600):
        busy = number // 30 % 2
        table.observe(CATALOG[0], 3_000_000 if busy else 1_000_000)
        if busy and number % 30 == 15:
            table.observe(CATALOG[2], 6_000_000)
    ratio = table.estimate_ns(CATALOG[2]) / table.estimate_ns(CATALOG[0])
    assert ratio == pytest.approx(2.0, rel=0.15)


def test_texts_that_turn_are_served_better_than_by_any_fixed_width(random_seed):
    world = World(1, [(0.95,), (0.1,)], rising(0.15), phase_tokens=400)
    run = world.play(AdaptivePolicy(), rounds=ROUNDS, seed=random_seed)
    assert run.goodput > world.best_fixed(ROUNDS)


def test_bound_catches_a_policy_that_never_adapts(random_seed):
    """Negative control: the wrong fixed width breaks the bound in the same simulation."""
    world = WORLDS["useless-dear"]
    run = world.play(FixedPolicy(8), rounds=ROUNDS, seed=random_seed)
    assert run.goodput < (1 - STATED_BOUND) * world.best_fixed(ROUNDS)


def test_learning_with_and_without_arrays_agrees(monkeypatch, random_seed):
    """Few lanes are learnt from one by one; both ways must give the same estimates."""
    rng = random.Random(random_seed)
    one_by_one, arrays = SurvivalEstimator(), SurvivalEstimator()
    for number in range(300):
        records = []
        for uid in rng.sample(range(6), 3):
            offered = rng.choice([0, 3, 7])
            passes = [rng.random() < (0.3, 0.9)[(number // 50 + uid) % 2] for _ in range(offered)]
            accepted = (*passes, False).index(False)
            records.append(lane_record(uid, offered=offered, accepted=accepted))
        one_by_one.observe(records)
        monkeypatch.setattr(survival, "FEW_LANES", 0)
        arrays.observe(records)
        monkeypatch.undo()
        for uid in range(6):
            expected = pytest.approx(arrays.expected_emitted(uid), rel=1e-9)
            assert one_by_one.expected_emitted(uid) == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_policy_does_not_grow_over_a_million_rounds():
    """Requests come and go; what is kept must not."""
    policy, rng = AdaptivePolicy(), random.Random(1)
    sizes = []
    for number in range(1_000_000):
        uid = 1 + number // 50
        if number % 50 == 0:
            policy.forget(uid - 1)
        shape = policy.choose(Cohort((CohortLane(uid, 7),)), CATALOG)
        accepted = min(shape.draft_tokens, int(rng.expovariate(0.5)))
        record = lane_record(uid, offered=shape.draft_tokens, accepted=accepted)
        policy.observe(CompletedRound(shape, (record,)), round(MS * rng.uniform(0.9, 1.1)))
        if number in (9_999, 999_999):
            sizes.append(len(pickle.dumps(policy)))
    assert sizes[1] <= 1.05 * sizes[0]
