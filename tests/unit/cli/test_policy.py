"""`flare-ray policy explain`, and the log it reads."""

import pytest
from typer.testing import CliRunner

from benchmarks.policy.costs import catalog
from benchmarks.policy.players import Stage, observed_noise, play_policy
from benchmarks.policy.traces import Synthetic
from flare_ray.cli.main import app
from flare_ray.cli.policy import check, explain
from flare_ray.controller.verification import FixedPolicy, LoggedPolicy, Opened, policy_of
from flare_ray.errors import ConfigError

ROUNDS = 120


@pytest.fixture
def log(tmp_path):
    """A short run of four requests, written down."""
    path = tmp_path / "decisions.jsonl"
    opened = Opened()
    policy = LoggedPolicy(policy_of(opened), path, opened)
    play(policy)
    policy.close()
    return path


def play(policy):
    shapes = catalog(4, 128)
    prices = observed_noise(1, 0) * [1e6 * (1 + 0.1 * shape.draft_tokens) for shape in shapes]
    trace = Synthetic("t", [(0.7,)]).make(ROUNDS, 4)
    return play_policy(Stage(trace, 4, ROUNDS), shapes, prices, policy, observed_noise(ROUNDS, 1))


def test_log_replays_into_the_same_choices(log):
    assert check(log) == (f"{ROUNDS} choices, all made again alike", True)


def test_replay_notices_a_changed_outcome(log):
    """Negative control: one round's cost is another one."""
    lines = log.read_bytes().split(b"\n")
    place = next(i for i, line in enumerate(lines) if b'"observed"' in line)
    head, _, _ = lines[place].rpartition(b'"cost_ns":')
    lines[place] = head + b'"cost_ns":123}'
    log.write_bytes(b"\n".join(lines))
    assert not check(log)[1]


def test_explanation_shows_every_candidate_and_what_came_of_the_choice(log):
    text = explain(log, 60)
    assert text.startswith(f"choice 60 of {ROUNDS} (adaptive")
    assert [line.split()[0] for line in text.splitlines()[3:11]] == [*map(str, range(1, 9))]
    assert text.count("<- chosen") == 1
    assert "the next round of this program emitted" in text


def test_log_cut_inside_its_last_line_is_still_read(log):
    log.write_bytes(log.read_bytes()[:-40])
    assert explain(log, None).startswith("choice")


def test_missing_choice_and_foreign_file_are_refused_by_name(log, tmp_path):
    with pytest.raises(ConfigError, match="number 999"):
        explain(log, 999)
    other = tmp_path / "other.jsonl"
    other.write_text('{"type":"forgot","uid":1}\n')
    with pytest.raises(ConfigError, match="decision log"):
        explain(other, None)


def test_fixed_policy_is_logged_and_replayed_too(tmp_path):
    path = tmp_path / "fixed.jsonl"
    policy = LoggedPolicy(FixedPolicy(3), path, Opened(fixed_width=3))
    play(policy)
    policy.close()
    assert check(path)[1]
    assert "the policy is fixed" in explain(path, None)


def test_command_prints_the_last_choice_and_replays(log):
    runner = CliRunner()
    shown = runner.invoke(app, ["policy", "explain", str(log)])
    assert shown.exit_code == 0
    assert f"choice {ROUNDS} of {ROUNDS}" in shown.output
    replayed = runner.invoke(app, ["policy", "explain", str(log), "--replay"])
    assert (replayed.exit_code, "alike" in replayed.output) == (0, True)
