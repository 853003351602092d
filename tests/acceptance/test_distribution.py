"""Sampled speculative output of the GLM recipe against exact probabilities (contract: S1, S2, V).

A vocabulary of twelve letters: every continuation of a prompt by three tokens is computed by brute
force from the oracle's teacher-forced logits, filtered here by sorting in float64. Requests with
seeds of their own go through `LLM` at a fixed width; the joint counts of their first three tokens
are compared by chi-square. Controls that must be caught show that the comparison can fail.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from flare_ray import LLM, SamplingParams
from flare_ray.device.speculation.proposal import Proposals
from tests.support.plain_rounds import plain_rounds as plain_rounds
from tests.support.served_glm import SAMPLED_LETTERS, engine_settings, sampled_glm

pytest.importorskip(
    "transformers.models.glm5_next",
    reason="the oracle is transformers' glm5_next (5.24); this transformers has none",
)
pytestmark = pytest.mark.timeout(300)

VOCABULARY = len(SAMPLED_LETTERS)
PROMPT = (0, 5, 3, 1, 7, 2, 4, 6)
TOKENS = 3
"""Tokens whose joint distribution is compared: one by the prefill, two or more by rounds."""
BUDGET = TOKENS + 3
"""Tokens asked for, so that the compared ones are verified beside deeper drafts."""
WIDTH = 5
LANES = 32
SAMPLES = 1920
MANY_SAMPLES = 6400
ALPHA = 1e-4  # false alarms per test; seeds are fixed, so a pass stays a pass
CAUGHT = 1e-9  # a control's p-value; far below ALPHA, so that a weak test is noticed
MIN_EXPECTED = 5.0  # cells below are merged, the usual bound of the chi-square approximation

FILTERS = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.85},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 8, "top_p": 0.9, "min_p": 0.03},
}
FAST = {(0.7, "top_k"), (1.0, "top_p"), (1.3, "min_p")}
EVERY = [
    pytest.param(t, f, SAMPLES, id=f"T{t}-{f}")
    for t, f in itertools.product((0.7, 1.0, 1.3), FILTERS)
    if (t, f) in FAST
] + [
    pytest.param(t, f, MANY_SAMPLES, id=f"T{t}-{f}-many", marks=pytest.mark.slow)
    for t, f in itertools.product((0.7, 1.0, 1.3), FILTERS)
]

Logits = np.ndarray
"""[V + 1, V + 1, V] float64: the last axis follows PROMPT, PROMPT a or PROMPT a b, where index V
stands for no token."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sampled_glm(tmp_path_factory.mktemp("sampled"))


@pytest.fixture(scope="module")
def logits(folder: Path) -> Logits:
    """Of every prefix, from one teacher-forced pass over all continuations by two tokens."""
    from tests.support.glm_oracle import TransformersGlm

    oracle = TransformersGlm(folder)
    pairs = list(itertools.product(range(VOCABULARY), repeat=2))
    rows = torch.tensor([[*PROMPT, *pair] for pair in pairs])
    with torch.no_grad():
        hidden = oracle.text(input_ids=rows, use_cache=False).last_hidden_state
        found = oracle.model.lm_head(hidden)[:, len(PROMPT) - 1 :].double().numpy()
    every = np.full((VOCABULARY + 1, VOCABULARY + 1, VOCABULARY), np.nan)
    for (a, b), row in zip(pairs, found, strict=True):
        every[VOCABULARY, VOCABULARY], every[a, VOCABULARY], every[a, b] = row
    return every


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, WIDTH) as llm:
        yield llm


def open_llm(folder: Path, width: int) -> LLM:
    speculation = {
        "draft_tokens": width - 1,
        "policy": "fixed",
        "fixed_width": width,
        "token_capacity": LANES * width,
    }
    settings = engine_settings(
        folder,
        concurrency=LANES,
        context_tokens=64,
        prefill_tokens=LANES * len(PROMPT),
        speculation=speculation,
    )
    return LLM(**settings)


def sample(llm: LLM, count: int, *, temperature: float, filters: dict) -> Counter:
    """How often each run of three tokens came first, over requests with seeds 0, 1, 2, ..."""
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=BUDGET,
            ignore_eos=True,
            reproducible=False,  # a seed alone would leave the chain's test out
            **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters},
        )
        for seed in range(count)
    ]
    outputs = llm.generate([PROMPT] * count, params)
    accepted = sum(output.speculation.drafts_accepted for output in outputs)
    offered = sum(output.speculation.drafts_offered for output in outputs)
    assert 0.1 < accepted / offered < 0.9, f"{accepted} of {offered}: hardly anything is tried"
    return Counter(output.token_ids[:TOKENS] for output in outputs)


def filtered(row: np.ndarray, temperature: float, filters: dict) -> np.ndarray:
    """Temperature, top-k, top-p, min-p, by sorting."""
    scaled = row / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    best = order[: filters.get("top_k") or len(probs)]
    ahead = np.cumsum(probs[best]) - probs[best]
    best = best[ahead < filters.get("top_p", 1.0) * probs[best].sum()]
    kept = np.zeros(len(probs), dtype=bool)
    kept[best] = True
    kept &= probs >= filters.get("min_p", 0.0) * probs.max()
    return np.where(kept, probs, 0.0) / probs[kept].sum()


def exact(logits: Logits, *, temperature: float, filters: dict) -> np.ndarray:
    """[V, V, V] probability of every run of three tokens."""
    none = VOCABULARY
    first = filtered(logits[none, none], temperature, filters)
    joint = np.zeros((VOCABULARY,) * TOKENS)
    for a in np.flatnonzero(first):
        second = filtered(logits[a, none], temperature, filters)
        for b in np.flatnonzero(second):
            joint[a, b] = first[a] * second[b] * filtered(logits[a, b], temperature, filters)
    assert abs(joint.sum() - 1.0) < 1e-9
    return joint


def p_value(counts: Counter, joint: np.ndarray) -> float:
    """Chi-square of the counts; 0 if a run without probability came out."""
    total = sum(counts.values())
    expected = joint * total
    observed = np.zeros_like(joint)
    for run, count in counts.items():
        observed[run] = count
    if observed[joint == 0].any():
        return 0.0
    large = expected >= MIN_EXPECTED
    cells = [(observed[large], expected[large])]
    if expected[~large].sum() >= MIN_EXPECTED:
        cells.append((observed[~large].sum()[None], expected[~large].sum()[None]))
    statistic = sum(float(((o - e) ** 2 / e).sum()) for o, e in cells)
    degrees = sum(len(e) for _, e in cells) - 1
    assert degrees >= 10, f"{degrees} degrees of freedom: the comparison is empty"
    return float(chi2.sf(statistic, degrees))


@pytest.mark.parametrize(("temperature", "name", "count"), EVERY)
def test_sampled_speculative_output_follows_the_exact_target(llm, logits, temperature, name, count):
    law = {"temperature": temperature, "filters": FILTERS[name]}
    assert p_value(sample(llm, count, **law), exact(logits, **law)) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 3, 8])
def test_every_width_follows_the_exact_target(folder, logits, width):
    law = {"temperature": 1.0, "filters": FILTERS["all"]}
    with open_llm(folder, width) as llm:
        assert p_value(sample(llm, MANY_SAMPLES, **law), exact(logits, **law)) > ALPHA


# Controls: the same statistic must catch each of these.

PLAIN = {"temperature": 1.0, "filters": FILTERS["top_p"]}


def hotter_q(draw: Callable) -> Callable:
    """Drafts are drawn from q, and verified as if from a hotter one."""

    def wrong(self: Proposals, depth: int, logits: torch.Tensor) -> torch.Tensor:
        token = draw(self, depth, logits)
        self.q[:, depth] = torch.softmax(logits / 2.0, -1)
        return token

    return wrong


def test_q_off_by_a_temperature_is_caught(llm, logits, plain_rounds, monkeypatch):
    monkeypatch.setattr(Proposals, "draw", hotter_q(Proposals.draw))
    assert p_value(sample(llm, SAMPLES, **PLAIN), exact(logits, **PLAIN)) < CAUGHT


@pytest.mark.slow
def test_neighbouring_temperature_is_caught(llm, logits):
    other = {**PLAIN, "temperature": 1.2}
    assert p_value(sample(llm, SAMPLES, **other), exact(logits, **PLAIN)) < CAUGHT
