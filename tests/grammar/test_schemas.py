"""What a schema's grammar admits validates; what cannot be enforced is refused by name."""

import importlib
import json
import random
import re
import time

import jsonschema
import pytest

from flare_ray.contracts.grammar import CallSyntax, ToolGrammar
from flare_ray.controller.grammar.calls import call_pieces
from flare_ray.controller.grammar.json_language import JsonLanguage
from flare_ray.controller.grammar.language import to_ebnf
from flare_ray.errors import InvalidRequest
from tests.support.grammar_engine import AMBIGUOUS_EBNF, EOS, VOCAB_SIZE
from tests.support.grammar_fuzz import random_regex, random_schema, random_walk

WORDS = -(-VOCAB_SIZE // 32)
MANY = 10_000
SOON_S = 3.0
"""Processor time; without a bound it were hours."""
FEW = 150


def walked(compiled, codec, seed: int) -> tuple[str, str]:
    tokens, how = random_walk(compiled.matcher(), WORDS, EOS, random.Random(seed))
    data = b"".join(codec.token_bytes[token] for token in tokens)
    return data.decode() if how == "end" else data.decode(errors="replace"), how


def check_schema(schema, compile_, codec, walks: int) -> int:
    """Walks that ended, all of which validate; -1 if the schema is refused."""
    try:
        compiled = compile_("json_schema", json.dumps(schema))
    except InvalidRequest as refusal:
        assert str(refusal)
        return -1
    ended = 0
    for seed in range(walks):
        text, how = walked(compiled, codec, seed)
        assert how != "dead", (schema, text)
        if how == "end":
            ended += 1
            jsonschema.validate(json.loads(text), schema)
    return ended


REFUSED = {
    "not": {"not": {"type": "null"}},
    "contains": {"type": "array", "contains": {}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "multipleOf": {"type": "integer", "multipleOf": 2},
    "if": {"if": {}, "then": {}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "format": {"type": "string", "format": "nonsense"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "no finite": {"type": "string", "minLength": 2, "maxLength": 1},
    "names no schema": {"$ref": "#/$defs/missing"},
    "of the schema itself": {"$ref": "http://example.org/x"},
    "itself without end": {"anyOf": [{"$ref": "#"}]},
    "look-around": {"type": "string", "pattern": "(?=a)"},
    "length": {"type": "string", "pattern": "a", "minLength": 3},
    "type": {"type": "strung"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(reason):
    with pytest.raises(InvalidRequest, match=re.escape(reason)):
        to_ebnf("root", JsonLanguage(REFUSED[reason]).rules)


MALFORMED = (
    {"allOf": [{"minLength": -1}, {"minLength": 3}]},
    {"type": "integer", "minLength": -1},
    {"type": "string", "minimum": "low"},
    {"type": "string", "pattern": 7},
    {"anyOf": [{"type": "null"}, {"type": "strung"}], "type": "null"},
    {"anyOf": []},
    {"enum": 1},
    {"required": "a"},
    {"properties": []},
    {"items": 3},
    {"type": "null", "$defs": {"unused": {"maxItems": 0.5}}},
    {"minimum": float("inf")},
    {"$ref": 1},
)


@pytest.mark.parametrize("schema", MALFORMED, ids=str)
def test_what_is_no_schema_is_refused_wherever_it_stands(schema, compile_):
    with pytest.raises(InvalidRequest, match="schema at #"):
        compile_("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "reference", ["#/properties", "#/properties/b/const", "#/allOf/0", "#/properties/", "#/items"]
)
def test_a_reference_names_a_schema(reference, compile_):
    schema = {"properties": {"a": {"$ref": reference}, "b": {"const": {}}}}
    with pytest.raises(InvalidRequest, match="names no"):
        compile_("json_schema", json.dumps(schema))


ADMITTED = (
    {"type": "integer", "maximum": 10**400},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"anyOf": [{"type": "null"}, {"const": 3}]}}},
    {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
    {"enum": ["在线", "café", "🙂", 'a"b\\', "\n", 1, None, {"x": [1]}]},
    {"type": "number", "minimum": 0.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": -0.2, "exclusiveMaximum": 0.1},
    {"type": "integer", "minimum": -17, "maximum": 1203},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": '^[\\x00-\\x7f]{2}"$'},
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    {"type": "object", "required": ["z"], "additionalProperties": {"type": "integer"}},
    {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 2},
    {
        "type": "array",
        "prefixItems": [{"type": "integer"}],
        "items": {"type": "null"},
        "minItems": 2,
    },
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"const": 2}}, "required": ["k"]},
        ]
    },
    {"type": "string", "format": "date-time"},
    {"type": ["string", "null", "integer"]},
    True,
)


@pytest.mark.parametrize("schema", ADMITTED, ids=range(len(ADMITTED)))
def test_generated_documents_validate(schema, compile_, codec):
    assert check_schema(schema, compile_, codec, walks=20) > 0


DOUBLING = {"type": "array", "items": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}}
SIBLINGS = {"$ref": "#", "minProperties": 0}
WIDENING = {"type": "object", "properties": {"a": SIBLINGS, "b": SIBLINGS}}
ENDLESS = {"anyOf": [{"$ref": "#/$defs/e"}, {"$ref": "#/$defs/e"}]}


@pytest.mark.parametrize("schema", [DOUBLING, WIDENING], ids=["allOf", "siblings"])
def test_references_that_double_with_every_level_are_refused_at_once(schema, compile_):
    started = time.process_time()
    with pytest.raises(InvalidRequest, match=r"too large|deeper"):
        compile_("json_schema", json.dumps(schema))
    assert time.process_time() - started < SOON_S


@pytest.mark.parametrize("style", ["json", "xml_parameters"])
@pytest.mark.parametrize("schema", [DOUBLING, WIDENING, ENDLESS], ids=["allOf", "siblings", "end"])
def test_tools_with_such_references_are_refused_at_once(schema, style):
    parameters = {
        "type": "object",
        "properties": {name: {"$ref": "#/$defs/e"} for name in "abcd"},
        "$defs": {"e": json.loads(json.dumps(schema).replace('"#"', '"#/$defs/e"'))},
    }
    syntax = CallSyntax(style=style, tool_open="<tool_call>", tool_close="</tool_call>")
    started = time.process_time()
    with pytest.raises(InvalidRequest):
        call_pieces(ToolGrammar("f", json.dumps(parameters)), syntax)
    assert time.process_time() - started < SOON_S


def test_a_grammar_whose_masks_take_long_is_refused(compile_, monkeypatch):
    adapter = importlib.import_module("flare_ray.actors.grammar.xgrammar")
    monkeypatch.setattr(adapter, "MASK_LIMIT_S", 0.002)
    monkeypatch.setattr(adapter, "TRIED_TOKENS", 60)
    compile_("ebnf", "root ::= [a-z]+")
    with pytest.raises(InvalidRequest, match="masks take more than"):
        compile_("ebnf", AMBIGUOUS_EBNF)


def test_constants_of_other_types_are_not_taken_for_equal(compile_):
    schema = {"allOf": [{"properties": {"a": {"const": value}}} for value in (1, True)]}
    schema = {"type": "object", "required": ["a"], **schema}
    with pytest.raises(InvalidRequest):
        compile_("json_schema", json.dumps(schema))


def test_recursion_that_cannot_end_is_refused():
    endless = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
    with pytest.raises(InvalidRequest, match="no finite"):
        to_ebnf("root", JsonLanguage(endless).rules)


@pytest.mark.parametrize(
    "count", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_random_schemas_validate_or_are_refused(count, compile_, codec):
    results = [
        check_schema(random_schema(random.Random(seed)), compile_, codec, walks=2)
        for seed in range(count)
    ]
    assert sum(r > 0 for r in results) > count / 4
    assert any(r < 0 for r in results)


@pytest.mark.parametrize(
    "count", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_random_patterns_match_or_are_refused(count, compile_, codec):
    matched = 0
    for seed in range(count):
        pattern = random_regex(random.Random(seed))
        try:
            compiled = compile_("regex", pattern)
        except InvalidRequest as refusal:
            assert str(refusal)
            continue
        text, how = walked(compiled, codec, seed)
        assert how != "dead", pattern
        if how == "end":
            matched += 1
            assert re.fullmatch(pattern, text), (pattern, text)
    assert matched > count / 3
