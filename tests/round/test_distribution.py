"""Sampled speculative output against exact target probabilities, with controls that must fail.

A table of order one makes the output a Markov chain: given the token before, the next one follows
the filtered row exactly, whatever was drafted (contract: S1, S2, S9, V).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from flare_ray.contracts.plan import LanePlan, MaskAnswer
from flare_ray.device.speculation import lanes as lanes_module
from flare_ray.device.speculation import proposal as proposal_module
from flare_ray.device.speculation import round as round_module
from flare_ray.device.speculation.proposal import Proposals
from tests.round.test_masks import mask_of
from tests.support.exact_sampling import filtered
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Sampling, Setup, scripted_rank

VOCABULARY = 8
LANES = 16
ALPHA = 1e-4  # false alarms per test; seeds are fixed, so a pass stays a pass
CAUGHT = 1e-9  # a control's p-value; far below ALPHA, so that a weak test is noticed
MIN_EXPECTED = 5.0  # cells below are merged, the usual bound of the chi-square approximation
SCRIPT = Script(vocab_size=VOCABULARY, order=1, seed=2, spread=1.0, draft_noise=0.8)


def p_value(counts: np.ndarray, exact: np.ndarray) -> float:
    """Chi-square over all rows; 0 if a token without probability was emitted."""
    statistic, degrees = 0.0, 0
    for observed, probs in zip(counts, exact, strict=True):
        expected = probs * observed.sum()
        if observed[probs == 0].any():
            return 0.0
        large = expected >= MIN_EXPECTED
        cells = [(observed[large], expected[large])]
        if expected[~large].sum() > 0:
            cells.append((observed[~large].sum(), expected[~large].sum()))
        statistic += sum(((o - e) ** 2 / e).sum() for o, e in cells)
        degrees += max(int(large.sum()) + len(cells) - 2, 0)
    return float(chi2.sf(statistic, degrees))


def transitions(tokens: list[int]) -> np.ndarray:
    counts = np.zeros((VOCABULARY, VOCABULARY))
    for before, after in itertools.pairwise(tokens):
        counts[before, after] += 1
    return counts


def sampled_counts(
    sampling: Sampling,
    width: int,
    *,
    tokens: int = 6000,
    ceiling: int | None = None,
    copies: tuple[int, ...] = (),
) -> np.ndarray:
    """Transition counts of LANES requests with seeds of their own.

    Args:
        copies: tokens that every round copies, whatever its text (-1 = the drafter's stays).
    """
    budget = tokens // LANES
    driver = Driver(
        scripted_rank(SCRIPT, Setup(slots=LANES, context_tokens=1024, prefill_tokens=32))
    )
    requests = driver.prefill(
        [
            driver.open(
                (lane % VOCABULARY,),
                lane,
                budget=budget,
                sampling=Sampling(
                    sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, lane
                ),
            )
            for lane in range(LANES)
        ]
    )
    while alive := [r for r in requests if not r.ended]:
        drafts, sources = width - 1 if ceiling is None else ceiling, (2,) * len(copies)
        lanes = [LanePlan(r.slot, r.epoch, drafts, copies, sources) for r in alive]
        driver.round(alive, width, lanes=lanes)
    return sum(transitions([*r.prompt, *r.tokens]) for r in requests)


def exact_rows(sampling: Sampling) -> np.ndarray:
    return np.stack([filtered(row, sampling) for row in SCRIPT.table().numpy()])


FILTERS = {
    "none": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "all": {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("filters", FILTERS)
def test_sampled_output_follows_the_exact_target(temperature, filters):
    fields = {"top_k": 0, **FILTERS[filters]}
    sampling = Sampling(temperature=temperature, **fields)
    counts = sampled_counts(sampling, width=5)
    assert p_value(counts, exact_rows(sampling)) > ALPHA


@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_every_width_follows_the_exact_target(width):
    sampling = Sampling(temperature=1.0, top_k=0)
    counts = sampled_counts(sampling, width)
    assert p_value(counts, exact_rows(sampling)) > ALPHA


@pytest.mark.parametrize("ceiling", range(8))
def test_every_shorter_length_follows_the_exact_target(ceiling):
    sampling = Sampling(temperature=1.0, top_k=0, top_p=0.9)
    counts = sampled_counts(sampling, 8, ceiling=ceiling, tokens=4000)
    assert p_value(counts, exact_rows(sampling)) > ALPHA


@pytest.mark.parametrize("copies", [(3,), (-1, 5), (1, 2, 3, 4)], ids=str)
def test_output_with_copied_drafts_follows_the_exact_target(copies):
    counts = sampled_counts(PLAIN, 5, copies=copies)
    assert p_value(counts, exact_rows(PLAIN)) > ALPHA


def test_constrained_output_follows_the_masked_target():
    """A mask per output position: even positions allow one half, odd ones another."""
    counts, exact = masked_counts(shift=0)
    assert p_value(counts, exact) > ALPHA


# Controls: the same statistic must catch each of these.

PLAIN = Sampling(temperature=1.0, top_k=0)


def caught(counts: np.ndarray) -> bool:
    return p_value(counts, exact_rows(PLAIN)) < CAUGHT


def test_draft_draws_reused_for_acceptance_are_caught(monkeypatch):
    original = round_module.round_draws

    def reused(lanes, depth):
        draws = original(lanes, depth)
        draws.accept = torch.cat((draws.draft, draws.accept[:, :2]), dim=1)
        return draws

    monkeypatch.setattr(round_module, "round_draws", reused)
    assert caught(sampled_counts(PLAIN, 5))


def test_draws_reused_in_every_round_are_caught(monkeypatch):
    monkeypatch.setattr(lanes_module, "OFFSET_STRIDE", 0)
    assert caught(sampled_counts(PLAIN, 5))


def test_q_off_by_a_temperature_is_caught(monkeypatch):
    original = Proposals.draw

    def hotter(self, depth, logits):
        token = original(self, depth, logits)
        self.q[:, depth] = torch.softmax(logits / 1.3, -1)
        return token

    monkeypatch.setattr(Proposals, "draw", hotter)
    assert caught(sampled_counts(PLAIN, 5, tokens=16000))


def test_a_copy_verified_against_the_drafters_q_is_caught(monkeypatch):
    monkeypatch.setattr(proposal_module, "write_point_masses", lambda q, tokens, chosen: None)
    assert caught(sampled_counts(PLAIN, 5, copies=(1, 2, 3)))


def test_one_stale_state_row_is_caught(monkeypatch):
    """The column that stays live is the one before the last accepted input's."""
    original = round_module.advance

    def stale(store, lanes, move, *, keeps_pairs):
        move.column = (move.column - 1).clamp(min=0)
        return original(store, lanes, move, keeps_pairs=keeps_pairs)

    monkeypatch.setattr(round_module, "advance", stale)
    assert caught(sampled_counts(PLAIN, 5))


def test_one_wrong_mask_is_caught():
    counts, exact = masked_counts(shift=1)
    assert p_value(counts, exact) < CAUGHT


def test_barred_drafts_counted_as_rejections_are_caught(monkeypatch):
    """Full-length verification with the unoffered tests made to fail is no length-aware law: the
    last row's token then comes from max(p - q, 0) instead of p."""
    original = round_module.accept_chain

    def barred(logits, q, drafts, offered, *, params, draws):
        depth = drafts.shape[1]
        column = torch.arange(depth + 2)
        beyond = (column >= offered.unsqueeze(1)) & (column < depth)
        draws.accept = torch.where(beyond, 1e30, draws.accept)
        full = torch.full_like(offered, depth)
        return original(logits, q, drafts, full, params=params, draws=draws)

    monkeypatch.setattr(round_module, "accept_chain", barred)
    assert caught(sampled_counts(PLAIN, 8, ceiling=2))


def masked_counts(*, shift: int) -> tuple[np.ndarray, np.ndarray]:
    """Transitions into even output positions, whose masks allow tokens 0..4; odd ones 3..7."""
    halves = np.zeros((2, VOCABULARY), dtype=bool)
    halves[0, :5] = True
    halves[1, 3:] = True
    width, budget = 4, 400
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=LANES, context_tokens=1024)))
    opened = [
        driver.open((0,), lane, budget=budget, sampling=Sampling(1.0, 0, seed=lane))
        for lane in range(LANES)
    ]
    requests = driver.prefill(opened)
    rows: list[np.ndarray] = []

    def cut(round_id, drafts):
        """Nothing is verified from the first draft on that its row forbids."""
        limits = []
        for lane, tokens in enumerate(drafts):
            allowed = [rows[lane * width + place][token] for place, token in enumerate(tokens)]
            limits.append([*allowed, False].index(False))
        return MaskAnswer(round_id, tuple(limits), ())

    driver.barrier = cut
    while alive := [r for r in requests if not r.ended]:
        rows.clear()
        lanes = []
        for request in alive:
            lanes.append(LanePlan(request.slot, request.epoch, 3, mask_row=len(rows)))
            first = len(request.tokens) + shift
            rows += [halves[(first + row) % 2] for row in range(width)]
        driver.round(alive, width, lanes=lanes, masks=mask_of(np.stack(rows)))
    counts = np.zeros((VOCABULARY, VOCABULARY))
    for request in requests:
        for position, (before, after) in enumerate(itertools.pairwise(request.tokens), start=1):
            if position % 2 == 0:
                counts[before, after] += 1
    masked = np.where(halves[0], SCRIPT.table().numpy(), -1e9)
    return counts, np.stack([filtered(row, PLAIN) for row in masked])


def test_reference_filters_are_not_those_under_test():
    """The exact rows above come from a sort in float64; a hand-made row fixes their meaning."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    assert np.allclose(filtered(logits, Sampling(1.0, 2)), [4 / 7, 3 / 7, 0, 0])
    assert np.allclose(filtered(logits, Sampling(1.0, 0, top_p=0.65)), [4 / 7, 3 / 7, 0, 0])
    assert np.allclose(filtered(logits, Sampling(1.0, 0, min_p=0.3)), [4 / 9, 3 / 9, 2 / 9, 0])
