"""A row's bits do not depend on its company: however a sequence is cut into chunks and rounds, at
whatever width, beside whatever lanes, with however many pages in view, every position has the
hidden state, logits and drafter's input, and leaves the state, of one plain pass.

Float32 on CPU. Where keys or products' inputs are rounded, a last bit would become a whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flare_ray.contracts.shapes import MAX_WIDTH, PAGE_TOKENS
from flare_ray.device.ops.linear import numba
from tests.support import deepseek_tiny
from tests.support.recipe_driver import Lane, RecipeDriver

LENGTH = 150
"""Tokens: three pages, beyond every variant's windows and selections."""
PAGES = 3
DEPTH = 3

CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "deepseek-rounded": lambda folder: deepseek_tiny.write_checkpoint(folder, "rounded"),
    "deepseek-pooled": lambda folder: deepseek_tiny.write_checkpoint(folder, "pooled"),
    "deepseek-quantised": lambda folder: deepseek_tiny.write_quantised(folder, "packed"),
}


@dataclass
class Trail:
    """What a lane's positions came to, by position: hidden state, logits, drafter's input."""

    rows: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)


class Listener:
    """A target whose rows are kept by slot."""

    def __init__(self, target) -> None:
        self._target = target
        self.trails: dict[int, Trail] = {}

    def forward(self, rows, state):
        output = self._target.forward(rows, state)
        for lane, slot in enumerate(rows.slots.tolist()):
            trail = self.trails.setdefault(slot, Trail())
            for row in range(int(rows.lengths[lane])):
                parts = (output.sampling, output.logits, output.feedback)
                values = tuple(part[lane, row].clone() for part in parts)
                trail.rows[int(rows.positions[lane, row])] = values
        return output

    def commit(self, *arguments):
        self._target.commit(*arguments)


@dataclass
class Played:
    """A sequence after its last token: its rows, its state, its drafts' logits."""

    trail: Trail
    state: dict[str, Tensor]
    drafts: list[Tensor]


class Company:
    """A driver whose target is listened to, and the sequence that it plays."""

    def __init__(self, folder: Path) -> None:
        self.driver = RecipeDriver(folder, slots=4)
        self.listener = self.driver.target = Listener(self.driver.target)
        generator = torch.Generator().manual_seed(11)
        high = self.driver.geometry.vocab_size - 8
        self.tokens = torch.randint(3, high, (4, LENGTH), generator=generator).tolist()
        self.alone = self.play([LENGTH])

    def play(
        self, cuts: list[int], *, others: int = 0, padded: int = 0, columns: int = PAGES
    ) -> Played:
        """Consume the sequence in runs of `cuts` tokens, the last one repeated.

        Runs up to the widest round are rounds, with one more row that is rejected where it fits.

        Args:
            others: lanes of other sequences beside it; padded: inactive ones.
            columns: pages in view.
        """
        self.listener.trails.clear()
        lanes = self.driver.fresh(1 + others, pages=PAGES)
        at, remaining = 0, list(cuts)
        while at < LENGTH:
            size = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            size = min(size, LENGTH - at)
            self._consume(lanes, at, size, padded, columns)
            at += size
        sink = self.driver.propose(
            lanes, [lane.slot + 5 for lane in lanes], DEPTH, padded=padded, columns=columns
        )
        trail = self.listener.trails[lanes[0].slot]
        assert len(trail.rows) >= LENGTH
        drafts = [logits[0] for logits in sink.logits]
        return Played(trail, self._state(lanes[0]), drafts)

    def _consume(self, lanes: list[Lane], at: int, size: int, padded: int, columns: int) -> None:
        rows = [self.tokens[n][at : at + size] for n in range(len(lanes))]
        if size > MAX_WIDTH:
            self.driver.prefill(lanes, rows, padded=padded, columns=columns)
            return
        if size < MAX_WIDTH and at + size < LENGTH:
            rows = [[*row, (self.tokens[n][at + size] + 7) % 100 + 3] for n, row in enumerate(rows)]
        verified = self.driver.verify(lanes, rows, padded=padded, columns=columns)
        self.driver.commit(verified, [size] * len(lanes))

    def _state(self, lane: Lane) -> dict[str, Tensor]:
        """What later rows may read."""
        found = {}
        for group in self.driver.store.spec_groups:
            tensor = self.driver.state[group.name]
            if group.kind == "page":
                flat = tensor[lane.pages].flatten(0, 1)
                found[group.name] = flat[: LENGTH * group.shape[0] // PAGE_TOKENS].clone()
            elif group.kind == "ring":
                back = torch.arange(max(LENGTH - group.entries + MAX_WIDTH, 0), LENGTH)
                found[group.name] = tensor[lane.slot, back % group.entries].clone()
        return found


@pytest.fixture(scope="module", params=CHECKPOINTS)
def company(request: pytest.FixtureRequest, tmp_path_factory) -> Company:
    """One checkpoint's driver, its sequence played as one chunk."""
    return Company(CHECKPOINTS[request.param](tmp_path_factory.mktemp("checkpoint")))


def differences(got: Played, wanted: Played) -> list[str]:
    """Names of what differs in any bit."""
    parts = ("hidden state", "logits", "drafter's input")
    found = [
        f"{part} of position {at}"
        for at in range(LENGTH)
        for part, a, b in zip(parts, got.trail.rows[at], wanted.trail.rows[at], strict=True)
        if not torch.equal(a, b)
    ]
    found += [n for n, value in got.state.items() if not torch.equal(value, wanted.state[n])]
    pairs = zip(got.drafts, wanted.drafts, strict=True)
    return found + [f"draft {n}" for n, (a, b) in enumerate(pairs) if not torch.equal(a, b)]


@pytest.mark.parametrize(
    "how",
    [
        {"cuts": [37, 5, 1, 1, 1, 80, 1]},
        {"cuts": [LENGTH], "others": 2, "padded": 1},
        {"cuts": [65, 3, 8, 2, 7, 50, 4], "others": 1, "columns": PAGES + 4},
    ],
    ids=["cuts and rounds", "lanes", "more pages in view"],
)
def test_rows_have_the_bits_of_one_plain_pass(company, how):
    assert differences(company.play(**how), company.alone) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cuts=st.lists(st.integers(1, LENGTH), min_size=1, max_size=6),
    others=st.integers(0, 3),
    padded=st.integers(0, 2),
    columns=st.integers(PAGES, PAGES + 5),
)
def test_rows_have_the_bits_of_one_plain_pass_in_any_company(
    company, cuts, others, padded, columns
):
    found = company.play(cuts, others=others, padded=padded, columns=columns)
    assert differences(found, company.alone) == []


def test_comparison_catches_another_order_of_one_sum(tmp_path, monkeypatch):
    """Negative control: a product that sums from the end where there are few rows."""
    monkeypatch.setattr(numba, "multiply_parts", backwards_for_few_rows)
    company = Company(CHECKPOINTS["deepseek-pooled"](tmp_path / "checkpoint"))
    assert differences(company.play([37, 5, 1, 80, 1]), company.alone)


def backwards_for_few_rows(x: Tensor, panels: Tensor, columns: int) -> Tensor:
    """`multiply_parts`, whose sums run over the inputs in order, in either order."""
    parts = x.unflatten(1, (panels.shape[0], -1))
    few = x.shape[0] <= MAX_WIDTH
    order = range(parts.shape[2] - 1, -1, -1) if few else range(parts.shape[2])
    weights = panels.float().transpose(-1, -2).flatten(1, 2)[:, :columns]
    total = torch.zeros(x.shape[0], panels.shape[0], columns)
    for place in order:
        total += parts[:, :, place, None] * weights[None, :, :, place]
    return total.flatten(1)
