"""Which tokens a cell's grammar allows, found by another regular expression engine's search for a
whole text that goes on from a prefix; nothing here knows the project's own grammars."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import regex


def language(fields: Mapping[str, Any]) -> str:
    """Expression that the whole output of a request matches; "" = any output will do."""
    if "response_format" in fields:
        schema = fields["response_format"]["json_schema"]["schema"]
        assert set(schema) == {"type", "maxLength"} and schema["type"] == "string"
        return rf'"[^"\\\x00-\x1f]{{0,{schema["maxLength"]}}}"'
    pattern: str = fields.get("guided_regex", "")
    return pattern


@functools.cache
def allowed(pattern: str, text: str, vocabulary: Sequence[str], eos: int) -> np.ndarray:
    """[V] bool: tokens behind which `text` can still become a match, and `eos` if it is one."""
    compiled = regex.compile(pattern)
    found = np.array([bool(compiled.fullmatch(text + t, partial=True)) for t in vocabulary])
    found[eos] = compiled.fullmatch(text) is not None
    return found
