"""Ratios, gates and the report: what noise may not do, and what a real loss must."""

import itertools
import re

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from flare_ray.cli.main import app
from flare_ray.errors import ConfigError
from flare_ray.workload.compare import compare
from flare_ray.workload.records import ArmStart, BlockEnd, BlockKey, Header, Journal, Observation
from flare_ray.workload.report import write_report
from flare_ray.workload.stats import speed_ratio, tails
from flare_ray.workload.summary import (
    cell_of,
    depths_of,
    equal_work,
    ratio_between,
    read_run,
    run_of,
)
from flare_ray.workload.tables import claims_table, roles_of, tables_of
from tests.support.paced_server import Paced, paced_server

ARMS = ("off", "fixed-1", "fixed-5", "adaptive")
SESSIONS = 16
NOISE = 0.25
"""Standard deviation of a request's time, relative: a busy machine."""
GATE = 0.95
RUNS = 20
ALLOWED = 1
"""False alarms in RUNS comparisons of equal runs, each of twelve rows whose intervals hold together
with 95 %; the gate asks for 5 % below 1 besides."""


def observation(arm, category, place, seconds, **fields) -> Observation:
    key = BlockKey(arm=arm, category=category, repeat=0, chunk=0)
    chosen = {
        "block": key,
        "attempt": 0,
        "item_id": f"{category}-{place}",
        "session": f"{category}-{place}",
        "turn": 0,
        "intended_s": 1.0,
        "sent_s": 1.0,
        "ended_s": 1.0 + seconds,
        "chunk_ms": (seconds * 250, seconds * 1000),
        "completion_tokens": 40,
        "finish_reason": "stop",
        "right": True,
        **fields,
    }
    return Observation(**chosen)


def records_of(speeds, *, seed, noise=NOISE, categories=("chat", "edit"), machine=1.0):
    """A run whose arms take 1 s a request over their speed, times noise."""
    rng = np.random.default_rng(seed)
    records = [ArmStart(arm=arm, described="test") for arm in speeds]
    for category, (arm, speed) in itertools.product(categories, speeds.items()):
        times = machine / speed * np.exp(rng.normal(0, noise, SESSIONS))
        seen = [observation(arm, category, i, float(t)) for i, t in enumerate(times)]
        records += seen
        records.append(BlockEnd(block=seen[0].block, attempt=0, wall_s=float(times.sum())))
    return records


def header_of(arms=ARMS) -> Header:
    return Header(workload="w", digest="d", arms=arms, settings={}, environment={"commit": "abc"})


def run_at(speeds, **fields):
    return run_of(header_of(tuple(speeds)), records_of(speeds, **fields))


EQUAL = dict.fromkeys(ARMS, 1.0)


def test_ratio_and_interval_hold_the_truth():
    covered = 0
    for seed in range(RUNS):
        run = run_at({"a": 1.2, "b": 1.0}, seed=seed)
        found = ratio_between(run, "a", "b", "all", measure="total")
        covered += found.lower <= 1.2 <= found.upper
    # 95 % of 20 is 19; bootstrap intervals of 32 sessions are slightly short.
    assert covered >= 16


def test_pairing_narrows_the_interval():
    """Sessions of very different length: their own ratio is what counts."""
    rng = np.random.default_rng(3)
    lengths = {(i,): float(10 ** rng.uniform(0, 2)) for i in range(30)}
    ours = {name: (length, length * 0.9) for name, length in lengths.items()}
    theirs = {name: (length, length) for name, length in lengths.items()}
    paired = speed_ratio(ours, theirs)
    assert paired.upper - paired.lower < 1e-9 and paired.ratio == pytest.approx(1 / 0.9)


def test_equal_runs_pass_the_gate_on_a_noisy_machine():
    alarms = 0
    for seed in range(RUNS):
        old, new = (run_at(EQUAL, seed=1000 * part + seed) for part in (1, 2))
        alarms += bool(compare(old, new).failures(GATE))
    assert alarms <= ALLOWED


def test_a_loss_of_a_third_fails_the_gate_on_a_noisy_machine():
    slower = EQUAL | {"adaptive": 0.67}
    caught = 0
    for seed in range(RUNS):
        old, new = run_at(EQUAL, seed=seed), run_at(slower, seed=5000 + seed)
        caught += any(line.startswith("adaptive") for line in compare(old, new).failures(GATE))
    assert caught >= RUNS - ALLOWED


def test_a_slower_machine_passes_with_a_reference_and_fails_without():
    old, new = run_at(EQUAL, seed=1, noise=0.05), run_at(EQUAL, seed=2, noise=0.05, machine=2.0)
    assert compare(old, new).failures(GATE)
    assert not compare(old, new, reference="off").failures(GATE)
    lost = run_at(EQUAL | {"adaptive": 0.7}, seed=2, noise=0.05, machine=0.5)
    failures = compare(old, lost, reference="off").failures(GATE)
    assert failures and all(line.startswith("adaptive") for line in failures)


def test_new_failures_fail_the_gate_however_fast_they_are():
    old = run_at(EQUAL, seed=1, noise=0.0)
    records = records_of(EQUAL, seed=1, noise=0.0)
    broken = next(i for i, r in enumerate(records) if isinstance(r, Observation))
    records[broken] = msgspec.structs.replace(records[broken], error="503", completion_tokens=0)
    failures = compare(old, run_of(header_of(), records)).failures(GATE)
    assert failures == ["off: 1 of 32 requests failed"]


def test_an_arm_of_any_name_fails_the_gate_by_its_failures_alone():
    speeds = {"failed": 1.0}
    records = records_of(speeds, seed=1, noise=0.0)
    records[1] = msgspec.structs.replace(records[1], finish_reason="length")
    new = run_of(header_of(("failed",)), records)
    found = compare(run_at(speeds, seed=1, noise=0.0), new)
    assert found.work and not found.failures(GATE)


def test_lost_verdicts_and_changed_work_are_told():
    records = records_of(EQUAL, seed=1, noise=0.0)
    changed = msgspec.structs.replace(records[4], right=False, completion_tokens=12)
    new = run_of(header_of(), [*records[:4], changed, *records[5:]])
    found = compare(run_of(header_of(), records), new)
    assert found.verdicts == ("off: 1 answer(s) were right and are not: chat-0",)
    assert found.work == ("off: 1280 completion tokens became 1252",)
    assert equal_work(new) == [
        "chat-0 (pass 0): off 0+12 stop, fixed-1 0+40 stop, fixed-5 0+40 stop, adaptive 0+40 stop"
    ]


def test_runs_of_other_items_are_not_compared():
    run = run_at(EQUAL, seed=1)
    other = run_of(msgspec.structs.replace(header_of(), digest="e"), records_of(EQUAL, seed=1))
    with pytest.raises(ConfigError, match="other items"):
        compare(run, other)
    with pytest.raises(ConfigError, match="none in common"):
        compare(run, run, reference="absent")


def test_claims_are_worst_first_and_name_the_best_fixed_depth():
    run = run_at({"off": 0.5, "fixed-1": 1.0, "fixed-5": 2.0, "adaptive": 1.5}, seed=1, noise=0.0)
    rows = claims_table(run, roles_of(run)).rows
    assert [float(row[3]) for row in rows] == sorted(float(row[3]) for row in rows)
    assert rows[0][2] == "best fixed: fixed-5" and rows[0][3] == "0.750"
    assert "!" in rows[0][4] and rows[-1][3] == "3.000"


def test_warm_up_and_interrupted_attempts_count_nowhere():
    records = records_of(EQUAL, seed=1)
    torn = observation("off", "chat", 0, 100.0, attempt=1)
    warm = msgspec.structs.replace(
        torn, block=msgspec.structs.replace(torn.block, repeat=-1), attempt=0
    )
    run = run_of(header_of(), [*records, torn, warm])
    assert cell_of(run, "off").requests == 2 * SESSIONS and run.failed_before == 1


def test_depths_come_from_the_engines_counters():
    counters = {
        'flare_spec_decode_lane_rounds_total{verify_width="1"}': 10.0,
        'flare_spec_decode_lane_rounds_total{verify_width="3"}': 30.0,
        'flare_spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 24.0,
        'flare_spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 12.0,
    }
    records = records_of({"a": 1.0}, seed=1, categories=("chat",))
    end = msgspec.structs.replace(records[-1], counters=counters)
    depths = depths_of(run_of(header_of(("a",)), [*records[:-1], end]), "a", "chat")
    assert depths.verified == [30.0, 30.0] and depths.accepted == [24.0, 12.0]
    assert depths.widths == {1: 10.0, 3: 30.0}


def test_tails_are_quantiles():
    assert tails(list(range(101))) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_report_is_one_page_that_loads_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    run = run_at(EQUAL, seed=1)
    paths = write_report([run], tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert [path.name for path in paths] == ["report.md", "report.html"]
    assert text.count("<svg") >= 3 and "abc" in text
    assert not re.search(r'(?:src|href)="(?!#)', re.sub(r'xlink:href="#', "", text))
    titles = [table.title for table in tables_of(run)]
    assert titles[0].startswith("Adaptive against") and "Equal work" in titles


def test_report_escapes_what_servers_said(tmp_path):
    records = records_of({"a": 1.0}, seed=1)
    records[1] = msgspec.structs.replace(records[1], error="<script>alert(1)</script>")
    write_report([run_of(header_of(("a",)), records)], tmp_path, with_plots=False)
    assert "<script>" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_commands_run_report_and_compare(tmp_path):
    """From the command line, two arms on one server; the gate's status is the command's."""
    runner = CliRunner()
    with paced_server(Paced(0.0, 0.0, 2)) as paced:
        command = ["workload", "run", "--url", f"a={paced.url}", "--url", f"b={paced.url}"]
        options = ["--categories", "chat,edit", "--sessions", "2", "--predict", "b"]
        for name in ("one", "two"):
            done = runner.invoke(app, [*command, "--out", str(tmp_path / name), *options])
            assert done.exit_code == 0, done.output
        again = runner.invoke(app, [*command, "--out", str(tmp_path / "one"), *options])
        assert again.exit_code == 0
    assert sum("prediction" in body for body in paced.bodies) == 2 * 3 + 1
    folder = str(tmp_path / "one")
    done = runner.invoke(app, ["workload", "report", folder, "--no-plots"])
    assert done.exit_code == 0 and "Equal work" in (tmp_path / "one/report.md").read_text()
    two = str(tmp_path / "two")
    assert runner.invoke(app, ["workload", "compare", folder, two]).exit_code == 0
    gated = runner.invoke(app, ["workload", "compare", folder, two, "--gate", "1000"])
    assert gated.exit_code == 1


@pytest.mark.parametrize(
    "options",
    [["--url", "nameless"], ["--url", "a=http://127.0.0.1:9", "--categories", "prose"]],
)
def test_wrong_options_are_refused_before_anything_runs(tmp_path, options):
    out = ["--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, ["workload", "run", *out, *options])
    assert isinstance(done.exception, ConfigError) and not (tmp_path / "run").exists()


def test_a_resumed_folder_reads_as_one_run(tmp_path):
    with Journal(tmp_path, header_of()) as journal:
        for record in records_of(EQUAL, seed=1)[:-1]:
            journal.write(record)
    run = read_run(tmp_path)
    assert run.arm_names == list(ARMS) and run.failed_before == SESSIONS
