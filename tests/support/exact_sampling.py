"""What a request's next token must follow, written as a plain loop over one history.

The oracle of every sampling test: no batch, no drafts, no device state. `p_value` judges sampled
outputs whose law depends on their whole history, through the probability integral transform.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import chi2

from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Sampling

BINS = 16


def next_logits(
    script: Script, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """[V] float64 after penalties, rules and bans, for the token behind prompt and output."""
    tokens = [*prompt, *output]
    before = tokens[-2] if script.order == 2 and len(tokens) > 1 else 0
    row = script.table()[before * script.vocab_size + tokens[-1]].numpy().astype(np.float64)
    counts = Counter(output)
    for token in range(script.vocab_size):
        if token in counts or token in prompt:
            row[token] *= sampling.repetition if row[token] <= 0 else 1 / sampling.repetition
        row[token] -= counts[token] * sampling.frequency + (counts[token] > 0) * sampling.presence
    for rule in sampling.rules:
        if len(tokens) - 1 < rule.before:
            row[rule.token] += rule.addend
    for word in sampling.bad_words:
        prefix = list(word[:-1])
        if not prefix or list(output[-len(prefix) :]) == prefix:
            row[word[-1]] = -np.inf
    return row


def filtered(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """[V] float64 probabilities by sorting: temperature, top-k, top-p, min-p."""
    scaled = logits.astype(np.float64) / sampling.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    kept = np.zeros(len(probs), dtype=bool)
    best = order[: sampling.top_k or len(probs)]
    mass, goal = 0.0, sampling.top_p * probs[best].sum()
    for token in best:
        kept[token] = True
        mass += probs[token]
        if mass >= goal:
            break
    kept &= probs >= sampling.min_p * probs.max()
    return np.where(kept, probs, 0.0) / probs[kept].sum()


def greedy_text(
    script: Script, sampling: Sampling, prompt: Sequence[int], tokens: int
) -> list[int]:
    """The only output that top-k 1 allows."""
    output: list[int] = []
    while len(output) < tokens:
        output.append(int(np.argmax(next_logits(script, sampling, prompt, output))))
        if output[-1] in script.eos_ids:
            break
    return output


Law = Callable[[Sequence[int], Sequence[int]], np.ndarray]
"""(prompt, output so far) -> [V] exact probabilities of the next token."""


def p_value(outputs: Sequence[tuple[Sequence[int], Sequence[int]]], law: Law, seed: int) -> float:
    """Chi-square of the transformed draws over BINS equal bins; 0 if an impossible token appeared.

    Given its history each token becomes a uniform number: the mass of the tokens more probable than
    it (ties by id), plus a random part of its own. Under the exact law all of them are independent
    and uniform, whatever the histories were.
    """
    generator = np.random.default_rng(seed)
    values = []
    for prompt, output in outputs:
        for place, token in enumerate(output):
            probs = law(prompt, output[:place])
            if probs[token] <= 0:
                return 0.0
            order = np.argsort(-probs, kind="stable")
            rank = int(np.flatnonzero(order == token)[0])
            below = probs[order[:rank]].sum()
            values.append(below + generator.random() * probs[token])
    counts, _ = np.histogram(np.clip(values, 0, 1), bins=BINS, range=(0, 1))
    expected = len(values) / BINS
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), BINS - 1))
