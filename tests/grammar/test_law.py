"""Masked rounds with drafts sample the target's conditional distribution, renormalised over allowed
tokens, at every width (contract: K1, S1, S2)."""

import numpy as np
import pytest
from scipy.special import softmax

from flare_ray.contracts.plan import LanePlan, MaskAnswer, PrefillLane, RoundPlan
from flare_ray.contracts.record import unpack_rows
from flare_ray.contracts.shapes import GraphKind
from flare_ray.controller.grammar.masks import walk_drafts
from flare_ray.device.sampling.masks import mask_words
from tests.round.test_distribution import ALPHA, CAUGHT, SCRIPT, VOCABULARY, p_value, transitions
from tests.support.scripted.harness import Driver, Sampling, Setup, scripted_rank

LANES, TOKENS = 8, 500
ALLOWED = np.random.default_rng(7).random((VOCABULARY, VOCABULARY)) < 0.6
ALLOWED[np.arange(VOCABULARY), (np.arange(VOCABULARY) + 1) % VOCABULARY] = True
"""Token t may be followed by the tokens of row t."""


class Successors:
    """A grammar of order one; never ends."""

    def __init__(self, token: int, *, shift: int = 0) -> None:
        self.path = [token]
        self.shift = shift

    def fill_mask(self, rows, row) -> None:
        allowed = np.roll(ALLOWED[self.path[-1]], self.shift)
        rows[row] = int(np.packbits(allowed, bitorder="little")[0])

    def try_token(self, token) -> bool:
        if not np.roll(ALLOWED[self.path[-1]], self.shift)[token]:
            return False
        self.path.append(token)
        return True

    def undo(self, tokens) -> None:
        del self.path[len(self.path) - tokens :]

    def commit(self, token) -> None:
        assert self.try_token(token)
        del self.path[:-1]

    def forced_tokens(self):
        allowed = np.flatnonzero(ALLOWED[self.path[-1]])
        return allowed[:1].tolist() * (len(allowed) == 1)

    has_ended = can_end = False


def masked_counts(width: int, sampling: Sampling, *, stale: bool = False) -> tuple[np.ndarray, int]:
    """Transition counts of LANES requests, and how many drafts were accepted.

    Args:
        stale: the control: every row of a round has the mask of its first one.
    """
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=LANES, context_tokens=1024)))
    words = mask_words(VOCABULARY)
    opened = [
        driver.open(
            (lane % VOCABULARY,),
            lane,
            budget=TOKENS,
            sampling=Sampling(sampling.temperature, sampling.top_k, sampling.top_p, 0.0, lane),
        )
        for lane in range(LANES)
    ]
    matchers = [Successors(request.prompt[-1]) for request, _, _ in opened]
    first = np.zeros((LANES, words), np.int32)
    for lane, matcher in enumerate(matchers):
        matcher.fill_mask(first, lane)
    lanes = [
        PrefillLane(r.slot, r.epoch, 0, r.prompt, True, mask_row=lane)
        for lane, (r, _, _) in enumerate(opened)
    ]
    plan = RoundPlan(
        next(driver.round_ids),
        driver.shape(GraphKind.PREFILL, LANES, 0, True),
        tuple(init for _, init, _ in opened),
        tuple(grant for _, _, grant in opened),
        prefill=tuple(lanes),
        context_pages=1,
        mask_block="block",
        mask_rows=LANES,
    )
    requests = [r for r, _, _ in opened]
    _take(requests, matchers, driver.submit(plan, first))
    accepted = 0
    while alive := [lane for lane, r in enumerate(requests) if not r.ended]:
        accepted += _masked_round(
            driver, [requests[i] for i in alive], [matchers[i] for i in alive], width, stale
        )
    counts = sum(transitions([r.prompt[-1], *r.tokens]) for r in requests)
    return counts, accepted


def _masked_round(driver, requests, matchers, width, stale) -> int:
    rows = np.zeros((len(requests) * width, mask_words(VOCABULARY)), np.int32)

    def barrier(round_id, drafts):
        limits, copies = [], []
        for lane, (matcher, tokens) in enumerate(zip(matchers, drafts, strict=True)):
            walk = walk_drafts(matcher, tokens, rows, lane * width)
            limits.append(walk.limit)
            copies.append(walk.copies)
            if stale:
                rows[lane * width : (lane + 1) * width] = rows[lane * width]
        return MaskAnswer(round_id, tuple(limits), tuple(copies) if any(copies) else ())

    if width == 1:
        for lane, matcher in enumerate(matchers):
            matcher.fill_mask(rows, lane)
    plan = RoundPlan(
        next(driver.round_ids),
        driver.shape(GraphKind.SPECULATIVE, len(requests), width, True, masked=True),
        lanes=tuple(
            LanePlan(r.slot, r.epoch, width - 1, mask_row=lane * width)
            for lane, r in enumerate(requests)
        ),
        context_pages=max(len(r.pages) for r in requests),
        mask_block="block",
        mask_rows=len(rows),
    )
    reply = driver.ranks[0].execute(plan, rows, barrier)
    records = unpack_rows(reply.rows)
    _take(requests, None if stale else matchers, records)
    if stale:
        for matcher, record in zip(matchers, records, strict=True):
            matcher.path = [record.tokens[-1]]
    return sum(record.accepted for record in records)


def _take(requests, matchers, records) -> None:
    for lane, (request, record) in enumerate(zip(requests, records, strict=True)):
        request.records.append(record)
        request.tokens.extend(record.tokens)
        for token in record.tokens if matchers else ():
            matchers[lane].commit(token)


def exact(sampling: Sampling) -> np.ndarray:
    """[V, V] mask, then temperature, then top-k."""
    logits = np.where(ALLOWED, SCRIPT.table().numpy().astype(np.float64), -np.inf)
    probs = softmax(logits / sampling.temperature, axis=1)
    if sampling.top_k:
        keep = np.argsort(-probs, axis=1, kind="stable")[:, : sampling.top_k]
        kept = np.zeros_like(probs)
        np.put_along_axis(kept, keep, np.take_along_axis(probs, keep, 1), 1)
        probs = kept / kept.sum(1, keepdims=True)
    return probs


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_samples_follow_the_renormalised_distribution(width, top_k):
    sampling = Sampling(temperature=0.8, top_k=top_k)
    counts, accepted = masked_counts(width, sampling)
    assert p_value(counts, exact(sampling)) > ALPHA
    assert bool(accepted) == (width > 1)


def test_one_mask_reused_for_every_position_is_caught():
    sampling = Sampling(temperature=0.8, top_k=0)
    counts, _ = masked_counts(4, sampling, stale=True)
    assert p_value(counts, exact(sampling)) < CAUGHT
