"""What a cell's answer must be, and how sampled answers are judged together.

Greedy: the only output the law allows, cut by the brute-force reference of stops. Sampled:
every token becomes a uniform number given its own history (`judge.uniforms`), and those of all
cells of one law are binned: a chi-square of fixed seeds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from scipy.stats import chi2, ncx2

from tests.support.matrix.cells import MAX_TOKENS, PROMPT, Cell
from tests.support.matrix.model import EOS, TABLE, TOKENS, ends_unsaid, law, own_logprobs, read_back
from tests.support.matrix.run import Answer
from tests.support.stop_reference import Stops, one_shot

BINS = 12
ALPHA = 1e-6
"""Level of one chi-square; seeds are fixed, so that a pass stays a pass."""
MIN_LAW_TOKENS = 350
MIN_MODE_TOKENS = 10_000
"""Tokens that the whole product brings to the chi-square of a law, and of a drafter and seed
mode."""
LOGPROB_ROUNDING = 2e-5


@dataclass(frozen=True, eq=False)
class Asked:
    """A request outside the matrix; its prompt is PROMPT."""

    fields: dict[str, Any]
    sampled: bool = True

    def body(self) -> dict[str, Any]:
        return self.fields


Case = TypeVar("Case", Cell, Asked)


def problem(cell: Cell | Asked, answer: Answer) -> str:
    """What is wrong with an answer by itself; "" = nothing."""
    if answer.status != 200:
        return f"status {answer.status}: {answer.error.get('message')}"
    body = cell.body()
    if len(answer.choices) != body.get("n", 1):
        return f"{len(answer.choices)} choices"
    total = 0
    for choice in answer.choices:
        tokens = drawn(body, choice)
        if not cell.sampled:
            tokens = greedy(body)
        visible, reason, stop_reason, count = one_shot(tokens, TABLE, stops_of(body))
        total += count - _unsaid_ends(body, tokens[:count])
        expected = (visible.decode(errors="replace"), reason, _json(stop_reason))
        found = (choice["text"], choice["finish_reason"], choice["stop_reason"])
        if found != expected:
            return f"{found}, expected {expected}"
        if found_problem := _logprob_problem(body, choice):
            return found_problem
    if answer.completion_tokens != total:
        return f"{answer.completion_tokens} completion tokens, expected {total}"
    return ""


def greedy(body: Mapping[str, Any]) -> list[int]:
    """At most MAX_TOKENS tokens that the law leaves no choice about."""
    output: list[int] = []
    while len(output) < MAX_TOKENS and EOS not in output:
        output.append(int(np.argmax(law(dict(body), PROMPT, output))))
    return output


def _unsaid_ends(body: Mapping[str, Any], tokens: Sequence[int]) -> int:
    """1 if the EOS at the end stands for an end without a token, else 0."""
    return int(tokens[-1] == EOS and ends_unsaid(dict(body), PROMPT, tokens[:-1]))


def drawn(body: Mapping[str, Any], choice: Mapping[str, Any]) -> list[int]:
    """Every token of an answer, the hidden one that ended it included."""
    tokens = read_back(choice["text"])
    reason, stop = choice["finish_reason"], choice["stop_reason"]
    if reason == "length" or isinstance(stop, str):
        return tokens
    if stop is None:
        return [*tokens, EOS]
    return [*tokens, *([stop] if isinstance(stop, int) else stop)]


def stops_of(body: Mapping[str, Any]) -> Stops:
    """The request's stops as the brute-force reference takes them."""
    return Stops(
        max_tokens=body["max_tokens"],
        eos=(EOS,),
        strings=[text.encode() for text in body.get("stop", ())],
        ids=body.get("stop_token_ids", ()),
        sequences=[tuple(s) for s in body.get("stop_token_sequences", ())],
        min_tokens=body.get("min_tokens", 0),
        include=body.get("include_stop_str_in_output", False),
    )


def _json(stop_reason: Any) -> Any:
    return list(stop_reason) if isinstance(stop_reason, tuple) else stop_reason


def _logprob_problem(body: Mapping[str, Any], choice: Mapping[str, Any]) -> str:
    """Log-probabilities must be the model's own, one entry a visible token."""
    found, tokens = choice["logprobs"], read_back(choice["text"])
    if "logprobs" not in body:
        return "" if found is None else "log-probabilities nobody asked for"
    if found["tokens"] != [TOKENS[token] for token in tokens]:
        return f"log-probabilities of {found['tokens']}, the text is {choice['text']!r}"
    for place, token in enumerate(tokens):
        exact = own_logprobs(PROMPT, tokens[:place])
        if abs(found["token_logprobs"][place] - exact[token]) > LOGPROB_ROUNDING:
            return f"log-probability of token {place} is {found['token_logprobs'][place]}"
        best = np.argsort(-exact, kind="stable")[: body["logprobs"]]
        wanted = {TOKENS[t] if t != EOS else "" for t in (*best, token)}
        if set(found["top_logprobs"][place]) != wanted:
            return f"alternatives of token {place}: {sorted(found['top_logprobs'][place])}"
    return ""


Law = Callable[[dict, Sequence[int], Sequence[int]], np.ndarray]


def uniforms(
    cell: Cell | Asked, answer: Answer, generator: np.random.Generator, exact: Law = law
) -> list[float]:
    """Each token's place among the more probable ones, spread over its own mass: uniform and
    independent under the exact law, whatever the histories were; -1 for an impossible token."""
    body, values = cell.body(), []
    for choice in answer.choices:
        tokens = drawn(body, choice)
        for place, token in enumerate(tokens):
            probs = exact(body, PROMPT, tokens[:place])
            order = np.argsort(-probs, kind="stable")
            below = probs[order[: int(np.flatnonzero(order == token)[0])]].sum()
            possible = probs[token] > 0
            values.append(below + generator.random() * probs[token] if possible else -1.0)
    return values


def p_values(
    answers: Mapping[Case, Answer],
    key: Callable[[Case], Any],
    exact: Law = law,
) -> dict[Any, tuple[float, int]]:
    """(p-value, tokens) of the sampled cells of each key."""
    generator = np.random.default_rng(5)
    pooled: dict[Any, list[float]] = defaultdict(list)
    for cell, answer in answers.items():
        if cell.sampled and answer.status == 200:
            pooled[key(cell)] += uniforms(cell, answer, generator, exact)
    return {name: (_p_value(values), len(values)) for name, values in pooled.items()}


def _p_value(values: Sequence[float]) -> float:
    if min(values) < 0:
        return 0.0
    counts, _ = np.histogram(np.clip(values, 0, 1), bins=BINS, range=(0, 1))
    expected = len(values) / BINS
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), BINS - 1))


def detectable(tokens: int, power: float = 0.99) -> float:
    """Smallest total variation, spread evenly over the bins, that `tokens` tokens reveal with the
    given power at ALPHA."""
    limit = chi2.isf(ALPHA, BINS - 1)
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if ncx2.sf(limit, BINS - 1, middle) < power else (low, middle)
    return math.sqrt(high / tokens) / 2
