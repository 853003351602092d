"""Faults that users of such servers report, and their whole kinds (design: known faults)."""

import json
import logging

import jsonschema
import pytest

from flare_ray.controller.grammar.json_language import JsonLanguage
from flare_ray.controller.grammar.language import to_ebnf
from flare_ray.metrics import names
from tests.support.grammar_engine import END_OF_REASONING

JSON_OBJECT = {"type": "json_object"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "maxLength": 6},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def test_h13_forbidden_drafts_are_cut_without_a_storm_of_log_lines(api, caplog, capfd):
    with caplog.at_level(logging.WARNING):
        for seed in range(4):
            answer = api.complete(response_format=JSON_OBJECT, seed=seed, max_tokens=60)
            assert answer.status_code == 200
    assert not caplog.records
    assert "grammar_matcher" not in capfd.readouterr().err
    assert api.core.recorder.counter(names.SPEC_CUT_TOKENS).value > 0


def test_h14_escapes_and_utf8_of_a_schema_give_one_grammar(api):
    schema = {"enum": ["在线", "café", "🙂"]}
    written = [json.dumps(schema, ensure_ascii=ascii_only) for ascii_only in (False, True)]
    grammars = [to_ebnf("root", JsonLanguage(json.loads(text)).rules) for text in written]
    assert grammars[0] == grammars[1]
    for text in written:
        answer = api.complete(guided_json=text, max_tokens=40)
        assert json.loads(answer.json()["choices"][0]["text"]) in schema["enum"]


def test_xgrammar_286_raw_control_characters_are_not_in_strings(api):
    schema = {"type": "string", "minLength": 30, "maxLength": 40}
    for seed in range(3):
        text = api.complete(guided_json=schema, seed=seed, max_tokens=400).json()["choices"][0]
        assert text["finish_reason"] == "stop"
        assert 30 <= len(json.loads(text["text"], strict=True)) <= 40


@pytest.mark.parametrize(
    ("begun", "legal"),
    [
        (b'"\\', b'"\\/bfnrtu'),
        (b'"\\u', b"0123456789abcdefABCDEF"),
        (b'"\\u12', b"0123456789abcdefABCDEF"),
        (b'"\xed', bytes(range(0x80, 0xA0))),
        (b'"\xe0', bytes(range(0xA0, 0xC0))),
        (b'"\xf4', bytes(range(0x80, 0x90))),
        (b'"', bytes([*range(0x20, 0x80), *range(0xC2, 0xF5)])),
    ],
    ids=["escape", "hexadecimal", "third digit", "surrogate", "overlong", "above", "raw"],
)
def test_lattice_931_bytes_of_no_json_string_are_forbidden(compile_, codec, begun, legal):
    matcher = compile_("json_schema", '{"type": "string"}').matcher()
    byte_of = {token: piece[0] for token, piece in enumerate(codec.token_bytes) if len(piece) == 1}
    for byte in begun:
        matcher.commit(next(token for token in byte_of if byte_of[token] == byte))
    admitted = set()
    for token, byte in byte_of.items():
        if matcher.try_token(token):
            matcher.undo(1)
            admitted.add(byte)
    assert admitted
    assert admitted <= set(legal)


def test_imp_1563_escapes_of_a_document_stay_escapes(api):
    value = {"s": ["\x01?", "\x7f\u2028é", '🙂"\\']}
    text = api.complete(guided_json={"const": value}, max_tokens=100).json()["choices"][0]["text"]
    assert "\\u0001" in text
    assert json.loads(text) == value


def test_imp_1563_escapes_in_a_call_stay_escapes(api):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "const": ["\x01?", "é\x1f"]}},
        "required": ["a"],
    }
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    body = api.chat(
        tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=200
    ).json()
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": ["\x01?", "é\x1f"]}


def finish_reasons(answer, stream: bool) -> list[str]:
    if not stream:
        return [choice["finish_reason"] for choice in answer.json()["choices"]]
    events = [e.removeprefix("data: ") for e in answer.text.split("\n\n") if "{" in e]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return [c["finish_reason"] for c in choices if c["finish_reason"] is not None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str
)
def test_vllm_25054_calls_that_were_demanded_finish_as_calls(api, choice, stream):
    answer = api.chat(
        tools=[WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=400,
        stream=stream,
    )
    assert finish_reasons(answer, stream) == ["tool_calls"]


def test_xgrammar_122_definitions_do_not_give_empty_output(api):
    schema = {
        "$defs": {
            "p": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        },
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/p"}},
        "required": ["a"],
    }
    answer = api.complete(response_format=schema_format(schema), max_tokens=200)
    document = json.loads(answer.json()["choices"][0]["text"])
    jsonschema.validate(document, schema)
    assert document


def test_vllm_44006_strict_tools_advance_over_whole_calls(api):
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        body = api.chat(
            tools=[WEATHER], tool_choice=choice, max_tokens=400, parallel_tool_calls=False
        ).json()
        message = body["choices"][0]["message"]
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        for call in message["tool_calls"]:
            assert call["function"]["name"] == "weather"
            jsonschema.validate(
                json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"]
            )


def test_one_call_at_most_where_parallel_calls_are_off(api):
    body = api.chat(
        tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=300
    ).json()
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1


def test_vllm_46118_control_tokens_in_drafts_do_not_end_the_request(api):
    """The scripted drafter proposes any of 272 tokens, control tokens among them."""
    answers = [api.complete(guided_regex="[a-z]{40}", seed=seed) for seed in range(4)]
    assert all(a.status_code == 200 for a in answers)
    assert all(len(a.json()["choices"][0]["text"]) == 40 for a in answers)


def test_vllm_52620_schemas_under_concurrency_give_no_500(api):
    bodies = [
        {
            "model": "tiny",
            "prompt": "ab",
            "seed": seed,
            "max_tokens": 40,
            "response_format": schema_format({"type": "array", "items": {"enum": [seed, "x"]}}),
        }
        for seed in range(12)
    ]
    assert {answer.status_code for answer in api.post("/v1/completions", bodies)} == {200}


def test_grammar_begins_behind_the_end_of_reasoning(api):
    body = api.chat(
        response_format=schema_format({"const": {"a": 1}}),
        max_tokens=60,
        logit_bias={str(END_OF_REASONING): 3},
        temperature=0,
    ).json()
    message = body["choices"][0]["message"]
    if body["choices"][0]["finish_reason"] == "stop":
        assert json.loads(message["content"]) == {"a": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_impossible_schema_is_400_and_names_the_reason(api, stream):
    answer = api.complete(response_format=schema_format({"enum": []}), stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("response_format", "invalid_grammar")
    assert "no finite text" in error["message"]


def test_argument_tags_inside_a_json_answer_are_text(api):
    schema = {"const": "<tool_call>weather</tool_call>"}
    texts = 0
    for seed in range(6):
        choice = api.chat(
            response_format=schema_format(schema), tools=[WEATHER], max_tokens=400, seed=seed
        ).json()["choices"][0]
        if choice["finish_reason"] == "length":
            continue  # a real call, whose random arguments did not end: it is given back as text
        message = choice["message"]
        if not message.get("tool_calls"):
            assert json.loads(message["content"]) == schema["const"]
            texts += 1
    assert texts, "no answer was the document: nothing was tried"
