"""Chain verification: exact draw accounting, the emitted law, controls that must fail."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from flare_ray.device.sampling.chain import draw, verify_chain
from flare_ray.device.sampling.masks import apply_token_mask, mask_words
from flare_ray.device.sampling.philox import uniforms

ALPHA = 1e-4  # false alarms per chi-square test; seeds are fixed, so a pass stays a pass
LANES = 200_000
VOCABULARY = 7
DEPTH = 3


def distributions(seed):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(VOCABULARY, 0.8), DEPTH + 1).astype(np.float32)
    q = rng.dirichlet(np.full(VOCABULARY, 0.8), DEPTH).astype(np.float32)
    return torch.from_numpy(p), torch.from_numpy(q)


def run_chain(p, q, lengths, *, draft_q=None, reuse_draws=False):
    """Drafts from draft_q (default q) verified against p; returns (result, drafts)."""
    seeds = torch.arange(LANES)
    draft_draws = uniforms(seeds * 2 + 1, torch.zeros_like(seeds), DEPTH)
    accept_draws = uniforms(seeds * 2, torch.zeros_like(seeds), DEPTH + 2)
    if reuse_draws:
        accept_draws = torch.cat([draft_draws, accept_draws[:, :2]], 1)
    source = q if draft_q is None else draft_q
    drafts = torch.stack(
        [draw(source[k].expand(LANES, -1), draft_draws[:, k]) for k in range(DEPTH)], 1
    )
    result = verify_chain(
        p.expand(LANES, -1, -1), q.expand(LANES, -1, -1), drafts, lengths, accept_draws
    )
    return result, drafts


def worst_p_value(p, result, drafts, lengths):
    """Smallest p-value over rows: emitted token i given that row i was reached must follow p[i]."""
    emitted = torch.cat([drafts, drafts[:, :1]], 1)
    emitted[torch.arange(LANES), result.accepted] = result.token
    worst = 1.0
    for row in range(int(lengths.max()) + 1):
        tokens = emitted[result.accepted >= row, row]
        observed = torch.bincount(tokens, minlength=VOCABULARY).double()
        expected = p[row].double() * len(tokens)
        statistic = ((observed - expected) ** 2 / expected).sum().item()
        worst = min(worst, chi2.sf(statistic, VOCABULARY - 1))
    return worst


@pytest.mark.parametrize("length", range(DEPTH + 1))
def test_emitted_tokens_follow_the_target_at_every_length(length):
    p, q = distributions(length)
    lengths = torch.full((LANES,), length, dtype=torch.int64)
    result, drafts = run_chain(p, q, lengths)
    assert worst_p_value(p, result, drafts, lengths) > ALPHA
    assert result.accepted.max() <= length


def test_mixed_lengths_follow_the_target():
    p, q = distributions(11)
    lengths = torch.arange(LANES) % (DEPTH + 1)
    result, drafts = run_chain(p, q, lengths)
    for length in range(DEPTH + 1):
        chosen = lengths == length
        tokens = torch.where(result.accepted[chosen] == 0, result.token[chosen], drafts[chosen, 0])
        observed = torch.bincount(tokens, minlength=VOCABULARY).double()
        expected = p[0].double() * chosen.sum()
        assert chi2.sf(((observed - expected) ** 2 / expected).sum().item(), VOCABULARY - 1) > ALPHA


def test_reused_draws_are_caught():
    p, q = distributions(1)
    lengths = torch.full((LANES,), DEPTH, dtype=torch.int64)
    result, drafts = run_chain(p, q, lengths, reuse_draws=True)
    assert worst_p_value(p, result, drafts, lengths) < ALPHA


def test_q_off_by_a_temperature_is_caught():
    p, q = distributions(1)
    lengths = torch.full((LANES,), DEPTH, dtype=torch.int64)
    hotter = torch.softmax(q.log() / 1.3, -1)
    result, drafts = run_chain(p, q, lengths, draft_q=hotter)
    assert worst_p_value(p, result, drafts, lengths) < ALPHA


def model_chain(p, q, drafts, length, draws):
    """FlashInfer's chain as a loop: decisions, final draw number and token."""
    stop = length
    for i in range(length):
        if not np.float32(draws[i] * q[i, drafts[i]]) < p[i, drafts[i]]:
            stop = i
            break
    used = length + (stop < length)
    weights = np.maximum(p[stop] - (q[stop] if stop < length else 0), 0).astype(np.float64)
    edges = np.cumsum(weights)
    goal = float(draws[used]) * edges[-1]
    return stop, int(np.searchsorted(edges, goal, side="right")), np.abs(edges - goal).min()


def test_decisions_and_draw_numbers_equal_the_loop_model():
    rng = np.random.default_rng(3)
    lanes, vocabulary, depth = 400, 64, 5
    p = rng.dirichlet(np.full(vocabulary, 0.3), (lanes, depth + 1)).astype(np.float32)
    q = rng.dirichlet(np.full(vocabulary, 0.3), (lanes, depth)).astype(np.float32)
    p[:, :depth] = 0.6 * q + 0.4 * p[:, :depth]
    drafts = np.stack([[rng.choice(vocabulary, p=r / r.sum()) for r in lane] for lane in q])
    lengths = rng.integers(0, depth + 1, lanes)
    draws = uniforms(torch.arange(lanes) + 99, torch.arange(lanes) * 12, depth + 2)
    got = verify_chain(
        torch.from_numpy(p),
        torch.from_numpy(q),
        torch.from_numpy(drafts),
        torch.from_numpy(lengths),
        draws,
    )
    for lane in range(lanes):
        stop, token, margin = model_chain(
            p[lane], q[lane], drafts[lane], lengths[lane], draws[lane].numpy()
        )
        assert got.accepted[lane] == stop
        assert got.token[lane] == token or margin < 1e-5


def test_uniform_of_one_between_equal_point_masses_emits_the_draft():
    point = torch.zeros(1, 2, 32)
    point[..., 3] = 1.0
    draws = uniforms(torch.tensor([16390493]), torch.tensor([0]), 3)
    assert draws[0, 0] == 1.0
    got = verify_chain(point, point[:, :1], torch.tensor([[3]]), torch.tensor([1]), draws)
    assert got.accepted.item() == 0
    assert got.token.item() == 3


def test_copied_token_with_point_mass_keeps_the_target_law():
    p, _ = distributions(5)
    lengths = torch.full((LANES,), 1, dtype=torch.int64)
    q = torch.zeros(1, VOCABULARY)
    q[0, 2] = 1.0
    draws = uniforms(torch.arange(LANES), torch.zeros(LANES, dtype=torch.int64), 3)
    copied = torch.full((LANES, 1), 2)
    result = verify_chain(
        p[:2].expand(LANES, -1, -1), q.expand(LANES, -1, -1), copied, lengths, draws
    )
    first = torch.where(result.accepted == 1, 2, result.token)
    observed = torch.bincount(first, minlength=VOCABULARY).double()
    expected = p[0].double() * LANES
    assert chi2.sf(((observed - expected) ** 2 / expected).sum().item(), VOCABULARY - 1) > ALPHA


def test_draw_with_uniform_one_gives_the_last_token_of_positive_weight():
    weights = torch.tensor([[0.0, 0.3, 0.7, 0.0, 0.0]])
    assert draw(weights, torch.tensor([1.0])).item() == 2


@pytest.mark.parametrize("vocabulary", [31, 32, 33, 100])
def test_token_mask_hides_exactly_the_cleared_bits(vocabulary):
    rng = np.random.default_rng(vocabulary)
    allowed = rng.random((2, 3, vocabulary)) < 0.5
    words = np.zeros((2, 3, mask_words(vocabulary)), dtype=np.uint32)
    for index in np.argwhere(allowed):
        words[index[0], index[1], index[2] // 32] |= np.uint32(1 << (index[2] % 32))
    logits = torch.zeros(2, 3, vocabulary)
    mask = torch.from_numpy(words.view(np.int32))
    got = apply_token_mask(logits, mask, torch.tensor([True, False]))
    assert torch.equal(got[0] == 0, torch.from_numpy(allowed[0]))
    assert (got[1] == 0).all()
    assert math.isinf(got[0][~torch.from_numpy(allowed[0])].max()) or allowed[0].all()
