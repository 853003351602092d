"""The policy benchmark's parts at a small size: traces, costs, players, figures, files."""

import json

import numpy as np
import pytest

from benchmarks.policy import simulate
from benchmarks.policy.cells import readaptation, run_trace
from benchmarks.policy.costs import Banded, CostTable, SparseMixture, Table, all_costs, catalog
from benchmarks.policy.live import ADAPTIVE, OFF, Timing, compare, live_metrics, speculation_of
from benchmarks.policy.players import Stage, play, play_fixed, play_oracle, priced
from benchmarks.policy.plots import heat_map
from benchmarks.policy.public import PUBLIC, batch_schedule_drafts
from benchmarks.policy.report import NAME, merged
from benchmarks.policy.traces import CATEGORY_TRACES, Synthetic, all_traces, recorded
from benchmarks.support.results import read_result
from flare_ray.config.engine import SpeculationConfig

ROUNDS = 200
GLM = CostTable("glm-bytes", SparseMixture())
FAIR = Synthetic("fair", [(0.6,)])


def stage(synthetic=FAIR, lanes=4, rounds=ROUNDS):
    return Stage(synthetic.make(rounds, lanes), lanes, rounds)


def test_six_rows_read_five_point_six_times_the_experts_of_one():
    mixture = SparseMixture()
    assert mixture._touched(6) / mixture._touched(1) == pytest.approx(5.6, abs=0.02)


def test_best_width_is_shallow_at_one_deep_in_the_middle_and_shallow_when_compute_bound():
    survival = np.concatenate([[1.0], np.cumsum(np.cumprod([0.85] * 7)) + 1.0])
    best = {}
    for lanes in (1, 16, 128):
        _, prices = priced(GLM, lanes, 1024)
        best[lanes] = int((survival / prices).argmax())
    assert best[16] > best[1]
    assert best[16] > best[128]


def test_same_trace_is_made_twice():
    first, second = FAIR.make(50, 3), FAIR.make(50, 3)
    assert (first.requests == second.requests).all()
    assert (first.drawn(0) == second.drawn(0)).all()


def test_drawn_acceptance_follows_the_trace_survival():
    made = Synthetic("s", [(0.8, 0.5)]).make(2000, 4)
    drawn = made.drawn(0)
    assert (drawn >= 1).mean() == pytest.approx(0.8, abs=0.01)
    assert (drawn >= 2).mean() == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize("name", CATEGORY_TRACES)
def test_recorded_requests_keep_their_order_of_difficulty(name):
    made = recorded(name, CATEGORY_TRACES[name], 20)
    assert made.chances.min() > 0
    assert made.chances.max() < 1


def test_fixed_players_agree_with_one_played_alone():
    one = stage()
    _, prices = priced(GLM, 4, 128)
    together = play_fixed(one)
    for drafts in (0, 3, 7):
        alone = play(one, prices, lambda number, classes, drafts=drafts: drafts)
        assert alone.emitted[0] / ROUNDS == pytest.approx(together[drafts])


def test_oracle_is_at_least_as_good_as_every_fixed_width():
    one = stage(Synthetic("turning", [(0.95,), (0.3,)], phase_tokens=100), rounds=1000)
    _, prices = priced(GLM, 4, 128)
    best = (play_fixed(one)[: len(prices)] / prices).max()
    assert play_oracle(one, prices).goodput >= best


@pytest.mark.parametrize("name", PUBLIC)
def test_public_policy_stays_inside_the_catalog(name):
    one = stage()
    _, prices = priced(GLM, 4, 12)
    run = PUBLIC[name](one, prices, 1e5)
    assert max(run.widths) <= len(prices)


def test_batch_schedule_gets_shallower_with_the_batch():
    assert [batch_schedule_drafts(lanes, 7) for lanes in (1, 8, 32, 128)] == [5, 3, 1, 0]
    assert batch_schedule_drafts(1, 2) == 2


def test_readaptation_counts_rounds_until_choices_are_good():
    synthetic = Synthetic("shift", [(0.1,), (0.97,)], turns=((0, 0), (100, 1)))
    one = stage(synthetic, rounds=ROUNDS)
    _, prices = priced(GLM, 4, 128)
    run = play(one, prices, lambda number, classes: 7 if number >= 130 else 0)
    assert readaptation(one, prices, run) == (pytest.approx(30, abs=2),)


def test_table_takes_measured_batches_as_they_are_and_lies_between_them_elsewhere():
    table = Table({"1": {"1": 10, "2": 20}, "4": {"1": 30, "2": 60}})
    by_lanes = {lanes: table(catalog(lanes, 4 * lanes)[0]) for lanes in (1, 2, 4)}
    assert by_lanes == {1: 10.0, 2: pytest.approx(20.0), 4: 30.0}


def test_gpu_result_file_becomes_a_table_when_there_is_one(tmp_path):
    path = tmp_path / "rounds.json"
    assert [t.name for t in all_costs(gpu=path)] == ["glm-bytes", "banded", "cpu-demo"]
    rows = {
        f"b1w{width}": {"batch": 1, "width": width, "round_us": 4.0 + width} for width in (1, 2)
    }
    path.write_text(json.dumps({"metrics": {"nvfp4": rows}}))
    table = all_costs(gpu=path)[-1]
    assert [table.price(shape) for shape in catalog(1, 2)] == [5000.0, 6000.0]
    assert table.covers(1, 2)
    assert not table.covers(1, 3)
    assert not table.covers(2, 2)


def test_measured_gpu_rounds_price_the_catalog_they_were_measured_for():
    table = all_costs()[-1]
    assert table.name == "h200-measured"
    assert [table.covers(lanes, 128) for lanes in (1, 8, 32, 64)] == [True, True, True, False]
    assert not table.covers(32, 1024)


def test_cells_are_drawn_and_summed_up():
    tables = [GLM, CostTable("banded", Banded())]
    cells = list(run_trace(FAIR.make(ROUNDS), tables, (1, 64), rounds=ROUNDS))
    assert {(c.table, c.lanes, c.capacities) for c in cells} == {
        (table, lanes, capacities)
        for table in ("glm-bytes", "banded")
        for lanes, capacities in ((1, (128, 1024)), (64, (128,)), (64, (1024,)))
    }
    found = simulate.summary(cells)
    assert 0.7 < found["min_vs_best_fixed"] <= found["mean_vs_best_fixed"] < 1.2
    assert heat_map("x", cells).count("<rect") == 3


def test_small_run_writes_its_result_beside_what_live_measured(tmp_path):
    arguments = ["--rounds", "60", "--traces", "fair", "--concurrency", "2"]
    simulate.main([*arguments, "--out", str(tmp_path)])
    result = read_result(tmp_path / f"{NAME}.json")
    assert {target.metric for target in result.targets} >= {"min_vs_best_fixed", "decision_us_16"}
    everything, bounds = merged({"live_vs_best_fixed_min": 0.99}, folder=tmp_path)
    assert everything["cells"] == result.metrics["cells"]
    assert "live_vs_best_fixed_min" in [bound.metric for bound in bounds]
    assert (tmp_path / "policy_glm-bytes.svg").read_text().startswith("<svg")


def timings(ms_per_token):
    return [Timing(10, 10 * ms / 1e3, 20 * ms / 1e3) for ms in ms_per_token]


def test_live_ratio_compares_with_the_best_fixed_width():
    compared = compare(
        {ADAPTIVE: timings([2, 2]), "1": timings([4, 4]), "3": timings([1.9, 1.9]), OFF: []}
        | {OFF: timings([1, 1])},
        "wall",
    )
    assert (compared.best, compared.ratio) == ("3", pytest.approx(0.95))
    assert compared.lower == pytest.approx(0.95)


def test_live_metrics_hold_every_bounded_figure():
    arms = {ADAPTIVE: timings([2]), "1": timings([2]), OFF: timings([1.9])}
    found = live_metrics({"docs": arms}, arms)
    assert found["live_useless_vs_width_one"] == pytest.approx(1.0)
    assert found["live_absorption_cpu"] == pytest.approx(2 / 1.9)


@pytest.mark.parametrize("name", [ADAPTIVE, OFF, "3"])
def test_arms_are_settings_of_an_engine(name):
    SpeculationConfig.model_validate(speculation_of(name))


def test_every_named_trace_can_be_made():
    assert all(make().chances.shape[1] == 7 for make in all_traces(20).values())
