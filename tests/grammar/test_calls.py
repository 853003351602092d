"""Tool calls under a grammar in the style of every family: one union of text, calls and the answer,
which the answer's own parser reads back to arguments that validate (contract: K1)."""

import json
import random

import jsonschema
import pytest

from flare_ray.contracts.grammar import GrammarSpec
from flare_ray.errors import InvalidRequest
from flare_ray.frontend.openai.structured import (
    AnswerSource,
    ChatPrompt,
    ToolUse,
    chat_grammar,
    tool_use,
)
from flare_ray.frontend.parsers import ContentText, ToolCall
from tests.support.fake_engine_client import byte_tokens
from tests.support.grammar_engine import EOS, VOCAB_SIZE, request, run, text_of
from tests.support.grammar_fuzz import random_walk
from tests.unit.frontend.test_parser_fuzz import STYLES, joined, parse, render

WORDS = -(-VOCAB_SIZE // 32)
WALKS = 12
WEATHER = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F", None]},
        "note": {"type": ["string", "null"]},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "now": {}}
TOOLS = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "now"}}
ANSWER = AnswerSource("json_schema", '{"const": {"a": 1}}', "response_format")
ARGUMENTS = {"place": "Rome", "days": 3}


def spec_of(style, choice, *, source=None, parallel=True) -> GrammarSpec:
    """The grammar of a chat whose prompt has closed reasoning."""
    chat = STYLES[style]
    prompt = ChatPrompt(chat, inside_reasoning=False)
    spec = chat_grammar(source, TOOLS, tool_use(choice, TOOLS), parallel=parallel, prompt=prompt)
    assert spec is not None
    return spec


def admits(matcher, text: str) -> bool:
    """Whether `text` is a whole output."""
    return all(matcher.try_token(token) for token in byte_tokens(text)) and matcher.can_end


def calls_in(style, text):
    events = parse(STYLES[style], text, inside=False, tools=SCHEMAS)
    return [e for e in events if isinstance(e, ToolCall)], joined(events, ContentText)


@pytest.mark.parametrize("style", STYLES)
class TestCallsOfAStyle:
    @pytest.mark.parametrize("parallel", [True, False])
    def test_demanded_calls_parse_and_validate(self, style, parallel, compile_spec, codec):
        compiled = compile_spec(spec_of(style, "required", parallel=parallel))
        ended = 0
        for seed in range(WALKS):
            tokens, how = random_walk(compiled.matcher(), WORDS, EOS, random.Random(seed))
            assert how != "dead"
            if how != "end":
                continue
            ended += 1
            text = b"".join(codec.token_bytes[token] for token in tokens).decode()
            calls, content = calls_in(style, text)
            assert calls and not content.strip(), text
            assert parallel or len(calls) == 1
            for call in calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        assert ended

    def test_auto_admits_text_a_call_and_text_before_a_call(self, style, compile_spec):
        call = render(STYLES[style], ARGUMENTS)
        compiled = compile_spec(spec_of(style, "auto"))
        for text in ("just text", call, "first this: " + call):
            assert admits(compiled.matcher(), text), text
        calls, content = calls_in(style, "first this: " + call)
        assert [json.loads(c.arguments) for c in calls] == [ARGUMENTS]
        assert content == "first this: "

    @pytest.mark.parametrize(
        "wrong",
        [{"days": 3}, {"place": "Rome", "days": 30}, {"place": "Rome", "days": 3, "x": 1}],
        ids=["missing", "range", "undeclared"],
    )
    def test_no_choice_admits_arguments_that_do_not_validate(self, style, wrong, compile_spec):
        for choice in ("auto", "required"):
            matcher = compile_spec(spec_of(style, choice)).matcher()
            assert not admits(matcher, render(STYLES[style], wrong))

    def test_undeclared_functions_are_not_called(self, style, compile_spec):
        for choice in ("auto", "required"):
            matcher = compile_spec(spec_of(style, choice)).matcher()
            assert not admits(matcher, render(STYLES[style], {}, name="other"))

    def test_a_named_choice_admits_this_function_alone(self, style, compile_spec):
        compiled = compile_spec(spec_of(style, NAMED))
        assert admits(compiled.matcher(), render(STYLES[style], {}, name="now"))
        assert not admits(compiled.matcher(), render(STYLES[style], ARGUMENTS))
        assert not admits(compiled.matcher(), "text")

    def test_required_admits_no_answer_without_a_call(self, style, compile_spec):
        compiled = compile_spec(spec_of(style, "required", source=ANSWER))
        assert not admits(compiled.matcher(), '{"a": 1}')
        assert not admits(compiled.matcher(), "text")
        assert admits(compiled.matcher(), render(STYLES[style], ARGUMENTS))

    def test_auto_beside_a_schema_admits_a_call_or_the_answer(self, style, compile_spec):
        compiled = compile_spec(spec_of(style, "auto", source=ANSWER))
        assert admits(compiled.matcher(), '{"a": 1}')
        assert admits(compiled.matcher(), render(STYLES[style], ARGUMENTS))
        assert not admits(compiled.matcher(), "text")

    def test_none_admits_the_answer_alone(self, style, compile_spec):
        compiled = compile_spec(spec_of(style, "none", source=ANSWER))
        assert admits(compiled.matcher(), '{"a": 1}')
        assert not admits(compiled.matcher(), render(STYLES[style], ARGUMENTS))

    def test_two_calls_only_where_parallel_calls_are_on(self, style, compile_spec):
        chat = STYLES[style]
        two = render(chat, ARGUMENTS) + render(chat, ARGUMENTS)
        if chat.tool_block_open:
            two = two.replace(f"\n{chat.tool_block_close}{chat.tool_block_open}", "")
        assert len(calls_in(style, two)[0]) == 2
        for parallel in (True, False):
            matcher = compile_spec(spec_of(style, "required", parallel=parallel)).matcher()
            assert admits(matcher, two) == parallel

    def test_full_width_equals_width_one(self, style, engines, codec):
        spec = spec_of(style, "required", parallel=False)
        outcomes = [
            run(
                engines(speculation={"policy": "fixed", "fixed_width": width}),
                [request(f"call {style}", spec, max_tokens=260)],
            )[0]
            for width in (1, 6)
        ]
        assert outcomes[0].tokens == outcomes[1].tokens
        assert outcomes[1].end.drafts_accepted > 0
        if outcomes[0].end.reason == "stop":
            (call,), _ = calls_in(style, text_of(outcomes[0], codec))
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


ATTRIBUTES = next(name for name, chat in STYLES.items() if chat.tool_style == "attributes")


@pytest.mark.parametrize(
    ("name", "value", "raw", "admitted"),
    [
        ("unit", "C", "true", True),
        ("unit", '"C"', "false", False),
        ("unit", "null", "false", True),
        ("unit", "null", "true", False),
        ("note", "null", "true", True),
        ("note", "null", "false", True),
        ("note", "7", "false", False),
    ],
)
def test_keys_say_whether_their_value_is_a_string(name, value, raw, admitted, compile_spec):
    chat = STYLES[ATTRIBUTES]
    extra = f'{chat.arg_key_open} name="{name}" string="{raw}">{value}{chat.arg_value_close}\n'
    text = render(chat, ARGUMENTS).replace(chat.tool_close, extra + chat.tool_close)
    matcher = compile_spec(spec_of(ATTRIBUTES, "required")).matcher()
    assert admits(matcher, text) == admitted
    if admitted:
        ((call,), _) = calls_in(ATTRIBUTES, text)
        expected = value if raw == "true" else json.loads(value)
        assert json.loads(call.arguments)[name] == expected


def test_names_that_no_tag_can_hold_are_refused_by_name():
    tools = [
        {
            "type": "function",
            "function": {
                "name": "f",
                "strict": True,
                "parameters": {"type": "object", "properties": {'a"b': {"type": "null"}}},
            },
        }
    ]
    prompt = ChatPrompt(STYLES[ATTRIBUTES], inside_reasoning=False)
    with pytest.raises(InvalidRequest, match="cannot be written in a call") as refusal:
        chat_grammar(None, tools, ToolUse(shown=True), parallel=True, prompt=prompt)
    assert refusal.value.param == "tools[0].function.parameters"
