"""Reasoning, content and calls of a chat answer, however the text is cut into pieces."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_ray.frontend.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatParser,
    ContentText,
    ReasoningText,
    ToolCall,
)
from flare_ray.frontend.parsers.events import append_event
from flare_ray.recipes.declaration import ChatFormat
from tests.support.chat_checkpoint import CHAT

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["metric", "7"]},
            "hint": {"type": ["string", "null"]},
            "extra": {"$ref": "#/$defs/extra"},
            "either": {"anyOf": [{"type": "string"}, {"type": "array"}]},
        },
        "$defs": {"extra": {"type": "object"}},
    },
    "now": {},
}
JSON_CHAT = ChatFormat(tool_open="<tool_call>", tool_close="</tool_call>", tool_style="json")
PIECES = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "weather",
    "city",
    "days",
    "3",
    "Paris €",
    " ",
    "\n",
    "<",
    "<tool",
    "{",
    '"',
    "text",
)


def in_parts(text, pieces, *, chat=CHAT):
    """Events of a call that arrives piece by piece behind `text`, a list per piece."""
    parser = ChatParser(chat, tools=TOOLS, inside_reasoning=False, in_parts=True)
    parser.feed(text)
    return [parser.feed(piece) for piece in pieces]


def parse(text, *, chat=CHAT, tools=TOOLS, inside=True, cuts=()):
    """Joined events of `text` fed in pieces that end at `cuts`."""
    parser = ChatParser(chat, tools=tools, inside_reasoning=inside)
    places = [0, *sorted(c for c in set(cuts) if 0 < c < len(text)), len(text)]
    events = []
    for start, end in itertools.pairwise(places):
        for event in parser.feed(text[start:end]):
            append_event(events, event)
    for event in parser.finish():
        append_event(events, event)
    return events


def call(name, index=0, **arguments):
    return (index, name, arguments)


def flat(events):
    """Events as plain values, call arguments decoded."""
    names = {ContentText: "content", ReasoningText: "reasoning"}
    return [
        (e.index, e.name, json.loads(e.arguments))
        if isinstance(e, ToolCall)
        else (names[type(e)], e.text)
        for e in events
    ]


def pair(key, value):
    return f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"


def test_reasoning_opened_by_the_prompt_ends_at_its_tag():
    assert flat(parse("why</think>so")) == [("reasoning", "why"), ("content", "so")]


def test_reasoning_that_never_closes_stays_reasoning():
    assert flat(parse("why is <thi")) == [("reasoning", "why is <thi")]


def test_reasoning_opened_by_the_answer_is_found_at_its_start_only():
    assert flat(parse("<think>a</think>b", inside=False)) == [("reasoning", "a"), ("content", "b")]
    assert flat(parse("b <think>a</think>", inside=False)) == [("content", "b <think>a</think>")]


def test_answer_without_reasoning_is_content():
    assert flat(parse("just text", inside=False)) == [("content", "just text")]


def test_call_inside_reasoning_ends_it():
    text = "hm<tool_call>now</tool_call>done"
    assert flat(parse(text)) == [("reasoning", "hm"), call("now"), ("content", "done")]


def test_string_argument_is_raw_and_others_are_json():
    text = f"<tool_call>weather{pair('city', '12')}{pair('days', '12')}</tool_call>"
    assert flat(parse(text, inside=False)) == [call("weather", city="12", days=12)]


@pytest.mark.parametrize(
    ("key", "raw", "value"),
    [
        ("city", '"quoted"', '"quoted"'),
        ("city", " keep  space\n", " keep  space\n"),
        ("days", "three", "three"),
        ("units", "7", "7"),
        ("hint", "null", None),
        ("hint", "nullable", "nullable"),
        ("extra", '{"a": [1, 2]}', {"a": [1, 2]}),
        ("either", "[1]", [1]),
        ("either", "5", "5"),
        ("undeclared", "5", 5),
        ("undeclared", "five", "five"),
        ("undeclared", "NaN", "NaN"),
        ("days", "1e999", "1e999"),
        ("city", "a </tool_call> b <tool_call>", "a </tool_call> b <tool_call>"),
    ],
)
def test_argument_value_follows_the_schema(key, raw, value):
    text = f"<tool_call>weather{pair(key, raw)}</tool_call>"
    assert flat(parse(text, inside=False)) == [call("weather", **{key: value})]


def test_number_is_delivered_with_all_its_digits():
    text = f"<tool_call>weather{pair('days', '123456789012345678901234567890')}</tool_call>"
    (event,) = parse(text, inside=False)
    assert event.arguments == '{"days": 123456789012345678901234567890}'


def test_call_without_arguments():
    assert flat(parse("<tool_call>now</tool_call>", inside=False)) == [call("now")]


def test_parallel_calls_are_numbered_and_text_around_them_is_kept():
    text = "first<tool_call>now</tool_call>\n<tool_call>weather\n" + pair("city", "Rome")
    text += "\n</tool_call>last"
    assert flat(parse(text, inside=False)) == [
        ("content", "first"),
        call("now"),
        ("content", "\n"),
        call("weather", 1, city="Rome"),
        ("content", "last"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>two words</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>{}</tool_call>",
        "<tool_call>weather<arg_key>city</arg_key>Rome</tool_call>",
        "<tool_call>weather<arg_key>city<arg_value>Rome</arg_value></tool_call>",
        f"<tool_call>weather{pair('city', 'Rome')} and more</tool_call>",
        f"<tool_call>weather{pair('city', 'Rome')}{pair('city', 'Oslo')}</tool_call>",
        f"<tool_call>weather{pair('', 'Rome')}</tool_call>",
        f"<tool_call>weather{pair('city', 'Rome')}",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Ro",
        "<tool_call>wea",
        "<tool_call>",
        "<tool_cal",
    ],
)
def test_malformed_or_unfinished_call_is_content_and_nothing_is_lost(text):
    assert flat(parse(text, inside=False)) == [("content", text)]


def test_call_after_a_malformed_one_is_still_found():
    text = "<tool_call>two words <tool_call>now</tool_call>"
    assert flat(parse(text, inside=False)) == [("content", "<tool_call>two words "), call("now")]


def test_call_quoted_inside_a_value_is_never_executed_when_its_own_call_is_malformed():
    inner = "<tool_call>now</tool_call>"
    broken = f"<tool_call>weather{pair('city', inner)} oops</tool_call>"
    assert flat(parse(broken, inside=False)) == [("content", broken)]
    cut_off = f"<tool_call>weather<arg_key>city</arg_key><arg_value>{inner}"
    assert flat(parse(cut_off, inside=False)) == [("content", cut_off)]


def test_calls_are_content_when_none_are_looked_for():
    text = "<tool_call>now</tool_call>"
    assert flat(parse(text, tools=None, inside=False)) == [("content", text)]
    assert flat(parse(f"a{text}</think>b", tools=None)) == [
        ("reasoning", f"a{text}"),
        ("content", "b"),
    ]


def test_text_is_handed_out_as_soon_as_it_cannot_be_a_tag():
    parser = ChatParser(CHAT, tools=TOOLS, inside_reasoning=False)
    assert parser.feed("a <to") == [ContentText("a ")]
    assert parser.feed("y") == [ContentText("<toy")]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"name": "now", "arguments": {}}', call("now")),
        ('\n{"name": "now"}\n', call("now")),
        (
            '{"name": "weather", "arguments": {"city": "</tool_call>"}}',
            call("weather", city="</tool_call>"),
        ),
    ],
)
def test_json_call(body, expected):
    text = f"<tool_call>{body}</tool_call>"
    assert flat(parse(text, chat=JSON_CHAT, inside=False)) == [expected]


@pytest.mark.parametrize(
    "body", ["now", '{"name": 3}', '{"name": "now", "arguments": []}', '{"name": "now"', "[]", ""]
)
def test_malformed_json_call_is_content(body):
    text = f"<tool_call>{body}</tool_call>"
    assert flat(parse(text, chat=JSON_CHAT, inside=False)) == [("content", text)]


texts = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)
cuts_of = st.lists(st.integers(min_value=1, max_value=200), max_size=40)


@given(text=texts, cuts=cuts_of, inside=st.booleans())
def test_pieces_change_nothing_arg_pairs(text, cuts, inside):
    assert parse(text, cuts=cuts, inside=inside) == parse(text, inside=inside)


@given(text=texts, cuts=cuts_of, reasoning=st.booleans())
def test_pieces_change_nothing_json(text, cuts, reasoning):
    chat = JSON_CHAT
    if reasoning:
        chat = dataclasses.replace(chat, reasoning_open="<think>", reasoning_close="</think>")
    assert parse(text, chat=chat, cuts=cuts, inside=False) == parse(text, chat=chat, inside=False)


@given(text=texts, inside=st.booleans())
def test_one_letter_at_a_time_changes_nothing(text, inside):
    assert parse(text, cuts=range(len(text)), inside=inside) == parse(text, inside=inside)


@given(text=texts)
def test_without_tags_that_took_effect_every_letter_is_delivered(text):
    events = parse(text, tools=None, inside=False)
    delivered = "".join(event.text for event in events)
    if not text.lstrip().startswith("<think>"):
        assert delivered == text


def test_scanning_a_long_value_is_linear():
    """A value of 200,000 letters in pieces of four; a scanner that starts over takes minutes."""
    parser = ChatParser(CHAT, tools=TOOLS, inside_reasoning=False)
    parser.feed("<tool_call>weather<arg_key>city</arg_key><arg_value>")
    for _ in range(50_000):
        assert not parser.feed("abcd")
    (event,) = parser.feed("</arg_value></tool_call>")
    assert json.loads(event.arguments) == {"city": "abcd" * 50_000}


def test_a_string_argument_is_handed_out_as_it_grows():
    pieces = ["Pa", 'ris "', " </arg", "_value>", "</tool_call>"]
    found = in_parts("<tool_call>weather<arg_key>city</arg_key><arg_value>", pieces)
    assert found == [
        [CallStart(0, "weather"), CallArguments(0, '{"city": "Pa')],
        [CallArguments(0, 'ris \\"')],
        [CallArguments(0, " ")],
        [CallArguments(0, '"')],
        [CallArguments(0, "}"), CallEnd(0, complete=True)],
    ]


def test_an_argument_that_is_no_string_comes_when_it_is_complete():
    opening = "<tool_call>weather<arg_key>days</arg_key><arg_value>"
    found = in_parts(opening, ["1", "2</arg_value>"])
    assert found == [[], [CallStart(0, "weather"), CallArguments(0, '{"days": 12')]]


@pytest.mark.parametrize("name", ["unknown", "now"])
def test_a_call_of_which_nothing_is_certain_comes_as_a_whole(name):
    found = in_parts(f"<tool_call>{name}", ["<arg_key>a</arg_key><arg_value>x", "</arg_value>"])
    parser = ChatParser(CHAT, tools=TOOLS, inside_reasoning=False, in_parts=True)
    whole = parser.feed(f"<tool_call>{name}{pair('a', 'x')}</tool_call>")
    assert found[0] == []
    assert whole == [CallStart(0, name), CallArguments(0, '{"a": "x"}'), CallEnd(0, complete=True)]


def test_a_call_quoted_in_reasoning_is_never_handed_out_in_parts():
    text = "hm <tool_call>weather<arg_key>city</arg_key><arg_value>x</arg_value> and so on"
    parser = ChatParser(CHAT, tools=TOOLS, inside_reasoning=True, in_parts=True)
    events = parser.feed(text)
    for event in parser.finish():
        append_event(events, event)
    assert events == [ReasoningText(text)]


def test_a_call_cut_off_inside_a_string_keeps_what_was_written():
    parser = ChatParser(CHAT, tools=TOOLS, inside_reasoning=False, in_parts=True)
    events = parser.feed("<tool_call>weather<arg_key>city</arg_key><arg_value>Rome </arg")
    for event in parser.finish():
        append_event(events, event)
    arguments = CallArguments(0, '{"city": "Rome </arg')
    assert events == [CallStart(0, "weather"), arguments, CallEnd(0, complete=False)]
    assert parser.num_calls == 0
