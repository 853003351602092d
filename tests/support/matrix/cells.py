"""Axes, their values, and the cells they span."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_TOKENS = 14
PROMPT = (3, 1, 8)
TOKEN_SEQUENCE = (4, 5)
STOP_TOKEN = 6

REGEX = r'([a-fé]{1,4}(Xy|Yxx|Za|V[éa]|"))+(Wcd|gh?)?'
"""May end at many places, must end behind `Wcd` and `gh`; `Za` and `Va` are no tokens' texts: no
token may begin them."""
SCHEMA = {"type": "string", "maxLength": 8}
"""Counts characters, of which tokens hold one to three; `""` is shorter than `min_tokens`."""

AXES: dict[str, dict[str, dict[str, Any]]] = {
    "grammar": {
        "none": {},
        "regex": {"guided_regex": REGEX},
        "JSON schema": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "word", "schema": SCHEMA, "strict": True},
            }
        },
    },
    "stop": {
        "none": {},
        "string": {"stop": ["xa", "éV", "yb"]},
        "token sequence": {"stop_token_sequences": [list(TOKEN_SEQUENCE), [0, 9]]},
        "token id": {"stop_token_ids": [STOP_TOKEN]},
    },
    "logprobs": {"none": {}, "3": {"logprobs": 3}},
    "penalties": {
        "none": {},
        "all": {
            "repetition_penalty": 1.25,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.3,
            "min_tokens": 3,
            "bad_words": ["cd", "h"],
        },
    },
    "min_p": {"none": {}, "0.2": {"min_p": 0.2}},
    "logit_bias": {"none": {}, "two tokens": {"logit_bias": {"2": 1.5, "7": -100}}},
    "seed": {
        "none": {},
        "given": {"seed": ...},
        "given, plain": {"seed": ..., "reproducible": False},
    },
    "n": {"1": {}, "3": {"n": 3}},
    "stream": {"no": {}, "yes": {"stream": True, "stream_options": {"include_usage": True}}},
}
"""Value -> what it adds to a request, by axis. "penalties: all" holds bad words and min_tokens too;
"seed: given" runs in the reproducible mode, "none" and "given, plain" in the plain one; each cell
has a seed of its own, the same for every drafter."""

LAW_AXES = ("grammar", "penalties", "min_p", "logit_bias")
"""Axes that change what a token's probability is."""

DRAFTERS: dict[str, dict[str, Any]] = {
    "off": {"speculation": {"families": "ordinary"}},
    "learned, adaptive": {"speculation": {"draft_tokens": 7}, "queue_depth": 2},
    "learned, 7 drafts": {
        "speculation": {"draft_tokens": 7, "policy": "fixed", "fixed_width": 8},
    },
    "wrong, 4 drafts": {
        "speculation": {"draft_tokens": 4, "policy": "fixed", "fixed_width": 5},
        "queue_depth": 2,
    },
}
"""Engine settings by drafter; "off" is width one."""


@dataclass(frozen=True)
class Cell:
    """One value per axis, and greedy or sampled."""

    drafter: str
    values: tuple[tuple[str, str], ...]
    sampled: bool

    def __str__(self) -> str:
        named = ", ".join(f"{axis}={value}" for axis, value in self.values)
        return f"drafter={self.drafter}, {named}, {'sampled' if self.sampled else 'greedy'}"

    def value(self, axis: str) -> str:
        """The cell's value on an axis other than the drafter's."""
        return dict(self.values)[axis]

    @property
    def law_key(self) -> tuple[str, ...]:
        """Cells of equal key draw from the same conditional distributions by the same code."""
        return (self.drafter, self.value("seed"), *map(self.value, LAW_AXES))

    def body(self) -> dict[str, Any]:
        """The request."""
        fields: dict[str, Any] = {"prompt": list(PROMPT), "max_tokens": MAX_TOKENS, "top_p": 0.95}
        fields["temperature"] = 0.9 if self.sampled else 0
        for axis, value in self.values:
            fields |= AXES[axis][value]
        if "seed" in fields:
            fields["seed"] = zlib.crc32(repr(self.values).encode())
        if self.sampled and "stop" in fields:
            fields["include_stop_str_in_output"] = True
        return fields

    def with_drafter(self, drafter: str) -> Cell:
        """The same request to another engine."""
        return replace(self, drafter=drafter)


def every_cell() -> list[Cell]:
    """The whole product."""
    names = list(AXES)
    products = list(itertools.product(*(AXES[name] for name in names)))
    return [
        Cell(drafter, tuple(zip(names, values, strict=True)), sampled)
        for drafter in DRAFTERS
        for values in products
        for sampled in (False, True)
    ]


def covering(cells: Sequence[Cell], extra: int, seed: int) -> list[Cell]:
    """Cells in which every pair of values of two axes occurs, and `extra` more."""
    shuffled = list(cells)
    random.Random(seed).shuffle(shuffled)
    missing = {pair for cell in cells for pair in pairs(cell)}
    chosen, rest = [], []
    for cell in shuffled:
        new = missing.intersection(pairs(cell))
        (chosen if new else rest).append(cell)
        missing -= new
    return chosen + rest[:extra]


def pairs(cell: Cell) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Every pair of (axis, value) of a cell."""
    everything = (
        ("drafter", cell.drafter),
        *cell.values,
        ("temperature", "0.9" if cell.sampled else "0"),
    )
    return itertools.combinations(everything, 2)


def refusal(cell: Cell) -> str:
    """Why a cell is answered with 400, naming the pair; "" = it is served."""
    return ""
