"""Which recordings are kept, and when one may be replayed."""

from __future__ import annotations

import dataclasses

import torch

from flare_ray.device.graphs import replays
from flare_ray.device.graphs.replays import Replays, coarse
from flare_ray.device.speculation.inputs import FilterBounds, HostFacts


@dataclasses.dataclass
class Half:
    value: torch.Tensor


class Counted:
    """A function in two parts over static tensors; counts how often Python runs each."""

    def __init__(self) -> None:
        self.x, self.out = torch.zeros(4), torch.zeros(4)
        self.runs = [0, 0]

    def first(self) -> Half:
        self.runs[0] += 1
        return Half(self.x * 2)

    def second(self, half: Half) -> None:
        self.runs[1] += 1
        torch.add(half.value, 1, out=self.out)

    def play(self, held: Replays, value: float, name: str = "a") -> None:
        self.x.fill_(value)
        half = held.run((name, 1), self.first)
        held.run((name, 2), lambda: self.second(half), after=half)
        assert self.out.tolist() == [2 * value + 1] * 4


def test_a_program_is_plain_once_recorded_the_second_time_and_replayed_from_then_on():
    counted, held = Counted(), Replays()
    for value in range(8):
        counted.play(held, float(value))
    # The second part reads what the first returned, so it is recorded behind the recorded one.
    assert counted.runs == [2, 3]
    assert len(held) == 2


def test_the_least_recently_used_recording_is_dropped_and_made_again(monkeypatch):
    monkeypatch.setattr(replays, "MOST_RECORDINGS", 4)
    counted, held = Counted(), Replays()
    for round_ in range(6):
        for name in ("a", "b"):
            counted.play(held, float(round_), name)
    before = list(counted.runs)
    for name in ("c", "d", "a"):
        for value in range(5):
            counted.play(held, float(value), name)
    assert len(held) == 4
    assert counted.runs[0] > before[0] + 4
    counted.play(held, 7.0, "b")


def test_keys_met_once_are_forgotten_in_time(monkeypatch):
    monkeypatch.setattr(replays, "MOST_MET", 3)
    counted, held = Counted(), Replays()
    for number in range(6):
        held.run(number, counted.first)
    held.run(0, counted.first)
    assert len(held) == 0


def test_runs_say_whether_they_were_replays():
    counted, held = Counted(), Replays()
    seen = []
    for _ in range(4):
        held.run("a", counted.first)
        seen.append(held.replayed)
    assert seen == [False, False, True, True]
    held.run("b", counted.first)
    assert not held.replayed


def facts_of(pages: int, **filters: int) -> HostFacts:
    return HostFacts(pages, 4, False, False, True, FilterBounds(**filters), publishes=False)


def test_recordings_hold_the_pages_they_serve_and_are_few():
    for columns in (1, 5, 17, 64, 4096):
        served = [coarse(facts_of(n), columns).context_pages for n in range(1, columns + 1)]
        assert all(
            pages <= found <= columns
            for pages, found in zip(range(1, columns + 1), served, strict=True)
        )
        assert len(set(served)) <= max(columns.bit_length() - 2, 1)


def test_recordings_serve_neighbouring_bounds_and_keep_what_a_bound_means():
    wide = coarse(facts_of(1, max_top_k=50, max_rules=3, max_bad_words=5), 64).filters
    assert (wide.max_top_k, wide.max_rules, wide.max_bad_words) == (64, 4, 8)
    for bound in (0, 1):
        assert coarse(facts_of(1, max_top_k=bound), 64).filters.max_top_k == bound
    assert coarse(facts_of(1), 64).publishes
