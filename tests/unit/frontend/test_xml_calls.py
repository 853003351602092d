"""Tool calls written as functions with named parameters, however the text is cut into pieces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_ray.frontend.parsers import ChatParser
from flare_ray.recipes.registry import get
from tests.unit.frontend.test_parsers import TOOLS, call, flat, parse

CHAT = get("qwen3.8-flash").chat
PIECES = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "</function>"),
    *("<parameter=", "</parameter>", ">", "now", "city", "days", "3", "Paris €", " ", "\n", "<"),
)


def written(name: str, **parameters: str) -> str:
    """A call as the family's template writes it."""
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def parsed(text: str, **how):
    return parse(text, chat=CHAT, **how)


def test_reasoning_then_content_then_a_call():
    text = f"plan\n</think>\n\nok {written('weather', city='Rome', days='3')}"
    assert flat(parsed(text)) == [
        ("reasoning", "plan\n"),
        ("content", "\n\nok "),
        call("weather", city="Rome", days=3),
    ]


def test_with_thinking_off_the_answer_is_content():
    assert flat(parsed("hello", inside=False)) == [("content", "hello")]


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("Rome", "Rome"),
        ("\n two lines\n\nof it \n", "\n two lines\n\nof it \n"),
        ("", ""),
        ("7", "7"),
        ("</function></tool_call><parameter=days>", "</function></tool_call><parameter=days>"),
    ],
)
def test_a_string_is_what_stands_between_the_line_breaks(raw, value):
    text = written("weather", city=raw)
    assert flat(parsed(text, inside=False)) == [call("weather", city=value)]


def test_other_types_are_json_by_the_tools_schema():
    text = written("weather", days="3", extra='{"a": [1]}', hint="null", units="7")
    wanted = call("weather", days=3, extra={"a": [1]}, hint=None, units="7")
    assert flat(parsed(text, inside=False)) == [wanted]


def test_calls_without_parameters_and_without_layout():
    text = "<tool_call><function=now></function></tool_call>" + written("now")
    assert flat(parsed(text, inside=False)) == [call("now"), call("now", 1)]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>now</tool_call>",
        "<tool_call><function=></function></tool_call>",
        "<tool_call><function=two words></function></tool_call>",
        "<tool_call><function=now></tool_call>",
        "<tool_call><function=now></function> more</tool_call>",
        "<tool_call><function=now><parameter=></parameter></function></tool_call>",
        "<tool_call><function=now><parameter=a\n>1</parameter></function></tool_call>",
        written("weather", city="a").replace("</function>", "x</function>"),
        written("weather", city="a").replace(
            "</function>", "<parameter=city>b</parameter></function>"
        ),
        written("weather", city="a").removesuffix("</tool_call>"),
        "<tool_call><function=weather><parameter=city>Ro",
        "<tool_call>\n<func",
    ],
)
def test_malformed_or_unfinished_call_is_content_and_nothing_is_lost(text):
    assert flat(parsed(text, inside=False)) == [("content", text)]


texts = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)
cuts_of = st.lists(st.integers(min_value=1, max_value=200), max_size=40)


@given(text=texts, cuts=cuts_of, inside=st.booleans())
def test_pieces_change_nothing(text, cuts, inside):
    text = f"<tool_call><function=weather>{text}"
    assert parsed(text, cuts=cuts, inside=inside) == parsed(text, inside=inside)


@given(city=st.text(st.characters(exclude_categories=["Cs"]), max_size=40), cuts=cuts_of)
def test_any_string_arrives_as_it_was_written(city, cuts):
    if "</parameter>" not in city:
        text = written("weather", city=city)
        assert flat(parsed(text, cuts=cuts, inside=False)) == [call("weather", city=city)]


def test_scanning_a_long_value_is_linear():
    """A value of 200,000 letters in pieces of four; a scanner that starts over takes minutes."""
    parser = ChatParser(CHAT, tools=TOOLS, inside_reasoning=False)
    parser.feed("<tool_call><function=weather><parameter=city>")
    for _ in range(50_000):
        assert not parser.feed("abcd")
    (event,) = parser.feed("</parameter></function></tool_call>")
    assert json.loads(event.arguments) == {"city": "abcd" * 50_000}
