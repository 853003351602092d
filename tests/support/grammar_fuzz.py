"""Random schemas, patterns and parameter sets, and random walks through compiled grammars."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

WORDS = ("a", "name", "在线", "é\n", 'q"', "x_1")
PATTERNS = ("^[a-c]{1,3}$", "b+", "^a.c$", r"^\d{2}-\d{2}$", "(x|yz)*", r"^[^ab]{2}$", r"\w\s?")
LIMIT = 400


def random_schema(r: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of which some cannot be enforced, or match nothing."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern", "odd"]
    if depth < 3:
        kinds += ["object", "array", "anyOf", "allOf", "oneOf", "ref"] * 2
    kind = r.choice(kinds)
    if kind == "enum":
        return {"enum": [r.choice([*WORDS, 1, -2.5, True, None, {"k": []}]) for _ in range(2)]}
    if kind == "pattern":
        return {"type": "string", "pattern": r.choice(PATTERNS)}
    if kind == "odd":
        return r.choice(
            (
                {"not": {"type": "null"}},
                {"type": "array", "uniqueItems": True},
                {"type": "integer", "multipleOf": 3},
                {"enum": []},
                {"type": "string", "format": "date"},
                {"type": ["integer", "null"], "maximum": 5},
                {},
                {"type": "strung"},
                {"minLength": -1},
            )
        )
    if kind == "string":
        low = r.randint(0, 4)
        return {"type": "string", "minLength": low, "maxLength": low + r.randint(-1, 5)}
    if kind in ("integer", "number"):
        low = r.choice((r.randint(-200, 200), round(r.uniform(-5, 5), 2)))
        schema = {"type": kind, r.choice(("minimum", "exclusiveMinimum")): low}
        if r.random() < 0.7:
            high = low + r.choice((0, 1, 0.25, r.randint(0, 2000)))
            schema[r.choice(("maximum", "exclusiveMaximum"))] = high
        return schema
    if kind == "object":
        names = r.sample(WORDS, r.randint(0, 3))
        schema = {
            "type": "object",
            "properties": {name: random_schema(r, depth + 1) for name in names},
            "required": [name for name in names if r.random() < 0.5],
        }
        if r.random() < 0.5:
            schema["additionalProperties"] = r.choice((False, True, {"type": "boolean"}))
        if r.random() < 0.2:
            schema[r.choice(("minProperties", "maxProperties"))] = r.randint(0, 3)
        return schema
    if kind == "array":
        schema = {"type": "array", "items": random_schema(r, depth + 1)}
        if r.random() < 0.5:
            schema["minItems"] = r.randint(0, 2)
            schema["maxItems"] = r.randint(0, 4)
        if r.random() < 0.2:
            schema["prefixItems"] = [random_schema(r, depth + 1)]
        return schema
    if kind == "ref":
        inner = random_schema(r, depth + 1)
        return {"$ref": "#/$defs/d", "$defs": {"d": inner}} if not depth else {"$ref": "#"}
    if kind in ("anyOf", "allOf", "oneOf"):
        return {kind: [random_schema(r, depth + 1) for _ in range(r.randint(1, 2))]}
    return {"type": kind}


def random_regex(r: random.Random, depth: int = 0) -> str:
    """A pattern; some are malformed or use what is refused."""
    if depth > 2 or r.random() < 0.4:
        atoms = (
            "a",
            "é",
            r"\d",
            r"\w",
            ".",
            "[a-c]",
            "[^x]",
            r"\.",
            "在",
            " ",
            r"\b",
            "(?=a)",
            "(",
        )
        return r.choice(atoms[:10] * 6 + atoms[10:])
    parts = [random_regex(r, depth + 1) for _ in range(r.randint(1, 3))]
    joined = r.choice(("", "|")).join(parts)
    return f"({joined}){r.choice(('', '', '?', '*', '+', '{1,3}', '{0,40}'))}"


def random_walk(matcher, words: int, eos: int, r: random.Random) -> tuple[list[int], str]:
    """Tokens drawn evenly among the allowed ones, and how it ended: "end", "dead" or "limit".

    After a while what closes a document is preferred, so that most walks end.
    """
    closing = {ord('"') - 33, ord("}") - 33, ord("]") - 33, eos}
    rows = np.zeros((1, words), np.int32)
    tokens: list[int] = []
    for step in range(LIMIT):
        matcher.fill_mask(rows, 0)
        bits = np.unpackbits(rows[0].view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        if not allowed:
            return tokens, "dead"
        preferred = [token for token in allowed if token in closing]
        if step > 40 and preferred and r.random() < 0.7:
            allowed = preferred
        token = r.choice(allowed)
        matcher.commit(token)
        if token == eos:
            return tokens, "end"
        tokens.append(token)
    return tokens, "limit"
