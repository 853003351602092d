"""The harness is measured: latencies that are known, arrivals that do not wait, failures kept."""

import itertools
import statistics

import msgspec
import pytest

from flare_ray.errors import ConfigError
from flare_ray.workload.arrivals import Arrivals, parse_arrivals
from flare_ray.workload.http import HttpEndpoint
from flare_ray.workload.items import Item, Settings, Source
from flare_ray.workload.records import (
    JOURNAL,
    WARM,
    BlockEnd,
    Header,
    Journal,
    Observation,
    read_journal,
)
from flare_ray.workload.runner import Arm, Runner, RunSettings, blocks_of, in_turn
from tests.support.paced_server import Paced, paced_server

TOLERANCE = 0.02
"""Relative; paces are so slow that an ordinary wake-up (some ms) stays inside."""
FIRST_S, GAP_S, TOKENS, REQUESTS = 1.0, 0.5, 3, 6
OTHER = 1.05
"""A pace that differs by more than the tolerance, for the negative control."""


def make_items(count: int, category: str = "chat", turns: int = 1) -> list[Item]:
    return [
        Item(
            item_id=f"{category}-{place}-{turn}",
            category=category,
            session=f"{category}-{place}",
            turn=turn,
            source=Source(name="test", key=str(place), licence="none"),
            settings=Settings(seed=place, max_tokens=8),
            messages=({"role": "user", "content": f"question {place}"},),
        )
        for place in range(count)
        for turn in range(turns)
    ]


def settings_of(**fields) -> RunSettings:
    chosen = {"categories": ("chat",), "arrivals": Arrivals(kind="closed"), "warm": 0, **fields}
    return RunSettings(**chosen)


def header_of(settings: RunSettings, arms=("a",)) -> Header:
    shown = msgspec.to_builtins(settings)
    return Header(workload="test", digest="0", arms=arms, settings=shown, environment={})


def run(folder, paced, settings, items, names=("a",)) -> list[Observation]:
    arms = [Arm(name, HttpEndpoint(paced.url), f"server {name}") for name in names]
    with Journal(folder, header_of(settings, tuple(names))) as journal:
        Runner(journal, settings, tokens={}).run(arms, items)
        return [r for r in journal.records if isinstance(r, Observation)]


def test_known_latencies_are_measured_within_two_per_cent(tmp_path):
    """Of several requests the least disturbed counts: a busy host only ever adds, and what the
    harness itself adds is in all of them."""
    paced = Paced(FIRST_S, GAP_S, TOKENS)
    lanes = Arrivals(kind="closed", lanes=REQUESTS)
    with paced_server(paced):
        settings = settings_of(sessions=REQUESTS, chunk=REQUESTS, arrivals=lanes)
        seen = run(tmp_path, paced, settings, make_items(REQUESTS))
    first, total = (min(getattr(one, name) for one in seen) for name in ("first_s", "total_s"))
    gaps = [(b - a) / 1e3 for one in seen for a, b in itertools.pairwise(one.chunk_ms)]
    assert first == pytest.approx(FIRST_S, rel=TOLERANCE)
    assert total == pytest.approx(paced.service_s, rel=TOLERANCE)
    assert statistics.median(gaps) == pytest.approx(GAP_S, rel=TOLERANCE)
    assert first != pytest.approx(FIRST_S * OTHER, rel=TOLERANCE)
    assert [one.completion_tokens for one in seen] == [TOKENS] * REQUESTS


def test_open_loop_counts_from_the_intended_start(tmp_path):
    """Five arrivals every 0.2 s at a server that takes 0.5 s for each, one after the other: the
    last one ends at 2.5 s, 1.7 s after it was due. Whoever counts from when a slow server let a
    request begin would see 0.5 s each (coordinated omission)."""
    paced = Paced(0.5, 0.0, 1, serial=True)
    arrivals = Arrivals(kind="bursts", lanes=1, period_s=0.2)
    with paced_server(paced):
        settings = settings_of(sessions=5, chunk=5, arrivals=arrivals)
        seen = run(tmp_path, paced, settings, make_items(5))
    latencies = sorted(one.total_s for one in seen)
    expected = [0.5 * (k + 1) - 0.2 * k for k in range(5)]
    off = [abs(found / due - 1) for found, due in zip(latencies, expected, strict=True)]
    assert statistics.median(off) < TOLERANCE  # one late wake-up of a busy host is no fault
    late = [one.sent_s - one.intended_s for one in seen]
    assert statistics.median(late) < 0.1  # nobody waited for another one to be sent


def test_a_late_generator_is_charged_to_the_latency(tmp_path):
    """Turns follow each other; the second is due when the first has ended, not later."""
    paced = Paced(0.05, 0.0, 1)
    with paced_server(paced):
        seen = run(tmp_path, paced, settings_of(sessions=2), make_items(2, turns=3))
    by_session = {}
    for one in seen:
        by_session.setdefault(one.session, []).append(one)
    for turns in by_session.values():
        assert [one.turn for one in turns] == [0, 1, 2]
        for earlier, later in itertools.pairwise(turns):
            assert later.intended_s == pytest.approx(earlier.ended_s)


def test_a_failure_is_an_observation(tmp_path):
    paced = Paced(0.0, 0.0, 2, refuse=frozenset({1}))
    with paced_server(paced):
        seen = run(tmp_path, paced, settings_of(sessions=3), make_items(3))
    assert [bool(one.error) for one in seen] == [False, True, False]
    assert "500: broken on purpose" in seen[1].error
    assert seen[1].right is None and seen[1].completion_tokens == 0


def test_every_arm_gets_equal_requests_in_alternating_order(tmp_path):
    paced = Paced(0.0, 0.0, 1)
    settings = settings_of(sessions=4, chunk=2, repeats=2, max_tokens=5)
    with paced_server(paced):
        seen = run(tmp_path, paced, settings, make_items(4), names=("a", "b"))
    orders = list(dict.fromkeys((o.block.repeat, o.block.chunk, o.block.arm) for o in seen))
    first = {place[:2]: place[2] for place in reversed(orders)}
    assert set(first.values()) == {"a", "b"}
    bodies = {arm: [] for arm in "ab"}
    for one, body in zip(seen, paced.bodies, strict=True):
        bodies[one.block.arm].append(body)
    assert bodies["a"] == bodies["b"] and bodies["a"][0]["max_tokens"] == 5


def test_order_rotates_and_turns_round():
    arms = [Arm(name, None, "") for name in "abc"]
    orders = {
        (n, r): "".join(a.name for a in in_turn(arms, n, r)) for n in range(3) for r in (0, 1)
    }
    assert [orders[n, 0] for n in range(3)] == ["abc", "bca", "cab"]
    assert [orders[n, 1] for n in range(3)] == ["cba", "acb", "bac"]


def test_warm_up_runs_other_sessions_first():
    settings = settings_of(sessions=2, warm=1)
    blocks = blocks_of(make_items(3), settings)
    assert blocks[0].repeat == WARM
    warm = {session[0].session for session in blocks[0].sessions}
    assert not warm & {s[0].session for block in blocks[1:] for s in block.sessions}
    with pytest.raises(ConfigError, match="3 conversations of chat are needed"):
        blocks_of(make_items(2), settings)


def test_a_killed_run_goes_on_where_it_stopped(tmp_path):
    class Killed(Exception):
        pass

    paced, settings = Paced(0.0, 0.0, 1), settings_of(sessions=4, chunk=2)
    items = make_items(4)

    def kill(done: int, total: int) -> None:
        if done == 1:
            raise Killed

    with paced_server(paced):
        arms = [Arm("a", HttpEndpoint(paced.url), "")]
        with pytest.raises(Killed), Journal(tmp_path, header_of(settings)) as journal:
            Runner(journal, settings, tokens={}, on_block=kill).run(arms, items)
        # The kill also left half a line, and the next block's first observation without its end.
        whole = read_journal(tmp_path / JOURNAL)
        orphan = next(r for r in whole if isinstance(r, Observation))
        orphan = msgspec.structs.replace(
            orphan, block=msgspec.structs.replace(orphan.block, chunk=1)
        )
        with (tmp_path / JOURNAL).open("ab") as file:
            file.write(msgspec.json.encode(orphan) + b'\n{"type": "observ')
        with Journal(tmp_path, header_of(settings)) as journal:
            Runner(journal, settings, tokens={}).run(arms, items)
    records = read_journal(tmp_path / JOURNAL)
    ends = [r for r in records if isinstance(r, BlockEnd)]
    assert [(end.block.chunk, end.attempt) for end in ends] == [(0, 0), (1, 1)]
    assert len(paced.bodies) == 4  # the finished block was not run again
    assert orphan in records  # nothing was dropped


def test_another_run_does_not_continue_this_folder(tmp_path):
    settings = settings_of()
    with Journal(tmp_path, header_of(settings)):
        pass
    with pytest.raises(ConfigError, match="another run"):
        Journal(tmp_path, header_of(msgspec.structs.replace(settings, max_tokens=3)))


def test_counters_of_a_server_are_kept_as_growth(tmp_path):
    metrics = "# TYPE x_total counter\nx_total 3\n"
    paced = Paced(0.0, 0.0, 1, metrics=metrics)
    with paced_server(paced):
        endpoint = HttpEndpoint(paced.url)
        assert endpoint.counters().values == {("x_total", ()): 3.0}
        paced.metrics = None
        assert endpoint.counters() is None


@pytest.mark.parametrize(
    ("text", "starts"),
    [("bursts:2/0.5", [0, 0, 0.5, 0.5, 1.0]), ("poisson:4", None)],
)
def test_arrivals_are_reproducible(text, starts):
    arrivals = parse_arrivals(text)
    found = arrivals.starts_s(5, seed=1)
    assert found == (starts or found) == arrivals.starts_s(5, seed=1)
    assert found == sorted(found)


def test_poisson_rate_is_the_one_asked_for():
    starts = parse_arrivals("poisson:4").starts_s(4000, seed=2)
    assert 4000 / starts[-1] == pytest.approx(4, rel=0.06)  # 4 standard errors


def test_trace_is_read_from_a_file(tmp_path):
    path = tmp_path / "trace"
    path.write_text("0\n0.5\n2\n", encoding="utf-8")
    arrivals = parse_arrivals(f"trace:{path}")
    assert arrivals.starts_s(2, seed=0) == [0, 0.5]
    with pytest.raises(ConfigError, match="give no 4 starts"):
        arrivals.starts_s(4, seed=0)


@pytest.mark.parametrize("text", ["closed:0", "poisson:-1", "bursts:4", "waves:2", "trace:absent"])
def test_unknown_arrivals_are_refused(text):
    with pytest.raises(ConfigError):
        parse_arrivals(text)
