"""The answer part of a grammar as EBNF (contract: K1)."""

from __future__ import annotations

import json

from flare_ray.contracts.grammar import GrammarSpec
from flare_ray.controller.grammar.json_language import JsonLanguage
from flare_ray.controller.grammar.language import Expr, to_ebnf
from flare_ray.controller.grammar.regex import regex_language
from flare_ray.controller.grammar.shapes import check_shapes
from flare_ray.errors import InvalidRequest


def answer_ebnf(spec: GrammarSpec) -> str:
    """EBNF of the answer, for every kind that has one.

    Raises:
        InvalidRequest: its source is malformed, contradicts itself or cannot be enforced.
    """
    if spec.kind == "ebnf":
        return spec.source
    if spec.kind == "regex":
        rules: dict[str, Expr] = {}
        rules["root"] = regex_language(spec.source, rules, search=False)
        return to_ebnf("root", rules)
    try:
        schema = json.loads(spec.source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"schema: it is not JSON: {error}", code="invalid_grammar") from error
    check_shapes(schema)
    return to_ebnf("root", JsonLanguage(schema).rules)
