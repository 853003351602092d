"""Parsers of reasoning and tool calls under random text, in every style and of every recipe.

Rules that hold whatever the model writes: the pieces in which text arrives change nothing; a call
has a name and arguments that are one JSON object; text that is no call reaches the client letter by
letter; what follows a malformed call is parsed as if it stood alone.
"""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_ray.contracts.messages import Delta
from flare_ray.frontend.openai.prepare import Prepared
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
from flare_ray.frontend.parsers.verdicts import FUNCTION_NAME
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.turn import Turn
from flare_ray.recipes import registry
from flare_ray.recipes.declaration import ChatFormat
from tests.support.chat_checkpoint import CHAT
from tests.support.fake_engine_client import byte_tokens

FEW, MANY = 60, 5000
REASONING = {"reasoning_open": "<think>", "reasoning_close": "</think>"}
TOOL_TAGS = {"tool_open": "<tool_call>", "tool_close": "</tool_call>"}
CHATS = {
    "arg_pairs": CHAT,
    "json": ChatFormat(**REASONING, **TOOL_TAGS, tool_style="json"),
    "xml_parameters": ChatFormat(**REASONING, **TOOL_TAGS, tool_style="xml_parameters"),
    **{recipe.name: recipe.chat for recipe in registry.recipes()},
}
STYLES = {name: chat for name, chat in CHATS.items() if chat.tool_open}
TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"type": "object"},
        },
    },
    "now": {},
}
TAGS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<function=", "</function>", "<parameter=", "</parameter>", ">"),
    *sorted(
        {
            tag
            for recipe in registry.recipes()
            for tag in (
                recipe.chat.tool_block_open,
                recipe.chat.tool_block_close,
                recipe.chat.tool_open,
                recipe.chat.tool_close,
                recipe.chat.arg_key_open,
                recipe.chat.arg_value_close,
            )
            if tag
        }
    ),
    *(' name="weather">', ' name="now"/>', ' name="days" string="false">'),
)
WORDS = (
    "weather",
    "now",
    "city",
    "days",
    "3",
    '{"name": "now"',
    "}",
    '"',
    "\\",
    "é€🙂",
    " ",
    "\n",
    "<",
)
texts = st.lists(st.sampled_from(TAGS + WORDS), max_size=30).map("".join)
plain = st.text(alphabet="ab €🙂\n\t.", max_size=12)
cuts_of = st.lists(st.integers(min_value=1, max_value=300), max_size=40)
values = st.fixed_dictionaries(
    {},
    optional={
        "city": st.text(alphabet='abc é€🙂"\\{}<>/', max_size=10),
        "days": st.integers(min_value=-(2**70), max_value=2**70),
        "where": st.dictionaries(st.sampled_from("xy"), st.integers() | st.none(), max_size=2),
    },
)
calls_of = st.lists(st.tuples(plain, values), max_size=4)


def parse(chat, text, *, inside=True, cuts=(), tools=TOOLS, in_parts=False):
    parser = ChatParser(chat, tools=tools, inside_reasoning=inside, in_parts=in_parts)
    places = [0, *sorted(c for c in set(cuts) if 0 < c < len(text)), len(text)]
    events = []
    for start, end in itertools.pairwise(places):
        for event in parser.feed(text[start:end]):
            append_event(events, event)
    for event in parser.finish():
        append_event(events, event)
    ended = (isinstance(e, ToolCall) or (isinstance(e, CallEnd) and e.complete) for e in events)
    assert parser.num_calls == sum(ended)
    return events


def assembled(events):
    """Events in parts as whole ones, and the calls that broke off: (events, (name, arguments))."""
    joined_events, broken, name, arguments = [], [], "", ""
    for event in events:
        if isinstance(event, CallStart):
            name, arguments = event.name, ""
        elif isinstance(event, CallArguments):
            arguments += event.text
        elif not isinstance(event, CallEnd):
            joined_events.append(event)
        elif event.complete:
            joined_events.append(ToolCall(event.index, name, arguments))
        else:
            broken.append((name, arguments))
    return joined_events, broken


def render(chat, arguments, name="weather"):
    """A call as a model of that style writes it."""
    raw = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    if chat.tool_style == "json":
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    elif chat.tool_style == "arg_pairs":
        body = name + "".join(
            f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in raw.items()
        )
    elif chat.tool_style == "attributes":
        body = f' name="{name}">\n' + "".join(
            f'{chat.arg_key_open} name="{k}" string="{str(isinstance(arguments[k], str)).lower()}">'
            f"{v}{chat.arg_value_close}\n"
            for k, v in raw.items()
        )
        whole = chat.tool_open + body + chat.tool_close
        return f"{chat.tool_block_open}\n{whole}\n{chat.tool_block_close}"
    else:
        parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in raw.items())
        body = f"\n<function={name}>\n{parameters}</function>\n"
    return chat.tool_open + body + chat.tool_close


def joined(events, kind):
    return "".join(event.text for event in events if isinstance(event, kind))


def check_pieces(name, data):
    chat = CHATS[name]
    text, inside = data.draw(texts), data.draw(st.booleans()) and bool(chat.reasoning_close)
    whole = parse(chat, text, inside=inside)
    assert parse(chat, text, inside=inside, cuts=data.draw(cuts_of)) == whole
    assert parse(chat, text, inside=inside, cuts=range(len(text))) == whole
    found = [event for event in whole if isinstance(event, ToolCall)]
    assert [call.index for call in found] == list(range(len(found)))
    for call in found:
        assert isinstance(json.loads(call.arguments), dict)
        assert FUNCTION_NAME.fullmatch(call.name)
    if inside and not found:
        delivered = joined(whole, ReasoningText) + joined(whole, ContentText)
        # A tag inside a call that came to nothing is text too.
        assert delivered in (text, text.replace(chat.reasoning_close, "", 1))


def check_calls(name, data):
    """What a model may write comes out as it was meant, between text that stays text."""
    chat, written = STYLES[name], data.draw(calls_of)
    thought, answer = data.draw(plain), data.draw(plain)
    text = thought + chat.reasoning_close + answer
    text += "".join(render(chat, arguments) + after for after, arguments in written)
    events = parse(chat, text, cuts=data.draw(cuts_of))
    calls = [e for e in events if isinstance(e, ToolCall)]
    assert [json.loads(call.arguments) for call in calls] == [arguments for _, arguments in written]
    assert joined(events, ReasoningText) == thought
    assert joined(events, ContentText) == answer + "".join(after for after, _ in written)


def check_damage(name, data):
    """Letters of a good answer lost, doubled or replaced."""
    chat = STYLES[name]
    text = list(
        "".join(render(chat, arguments) + after for after, arguments in data.draw(calls_of))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        if text:
            place = data.draw(st.integers(0, len(text) - 1))
            text[place] = data.draw(st.sampled_from(["", text[place] * 2, "<", ">", "x", "é"]))
    damaged = "".join(text)
    whole = parse(chat, damaged, inside=False)
    assert parse(chat, damaged, inside=False, cuts=data.draw(cuts_of)) == whole
    if not any(isinstance(event, ToolCall) for event in whole):
        assert joined(whole, ContentText) == damaged


def check_parts(name, data):
    """Calls in parts: equal to whole ones, unless one broke off, which nobody can take for one."""
    chat = STYLES[name]
    text, inside = data.draw(texts), data.draw(st.booleans())
    if data.draw(st.booleans()):
        written = data.draw(calls_of)
        text = "".join(render(chat, arguments) + after for after, arguments in written) + text
    parts = parse(chat, text, inside=inside, in_parts=True)
    cuts = data.draw(cuts_of)
    assert parse(chat, text, inside=inside, cuts=cuts, in_parts=True) == parts
    assert parse(chat, text, inside=inside, cuts=range(len(text)), in_parts=True) == parts
    events, broken = assembled(parts)
    if not broken:
        assert events == parse(chat, text, inside=inside)
    for tool, arguments in broken:
        assert tool in TOOLS
        with pytest.raises(json.JSONDecodeError):
            json.loads(arguments)


CHECKS = [(check_pieces, name) for name in CHATS]
CHECKS += [(check, name) for check in (check_calls, check_damage, check_parts) for name in STYLES]
NAMES = [f"{check.__name__.removeprefix('check_')}-{name}" for check, name in CHECKS]


@pytest.mark.parametrize(("check", "name"), CHECKS, ids=NAMES)
@settings(max_examples=FEW)
@given(data=st.data())
def test_rule_holds(check, name, data):
    check(name, data)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("check", "name"), CHECKS, ids=NAMES)
@settings(max_examples=MANY)
@given(data=st.data())
def test_rule_holds_long(check, name, data):
    check(name, data)


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("rest", ["", "not a call ", "<think>", "{]"])
def test_call_after_a_malformed_one_is_found_and_the_malformed_one_is_content(name, rest):
    chat = STYLES[name]
    broken = (chat.tool_block_open or chat.tool_open) + rest
    if name == "json" and rest == "{]":
        # JSON that goes wrong is noticed at the closing tag: the call ends there.
        broken += chat.tool_close
    events = parse(chat, broken + render(chat, {"city": "Rome"}), inside=False)
    content, call = events
    assert content == ContentText(broken)
    assert json.loads(call.arguments) == {"city": "Rome"}


@pytest.mark.parametrize("name", STYLES)
def test_malformed_call_inside_reasoning_stays_reasoning(name):
    """Models quote the tags they were taught when they think about them."""
    chat = STYLES[name]
    opening = chat.tool_block_open or chat.tool_open
    thought = f"a {opening} tag here{chat.tool_block_close or chat.tool_close} opens it"
    assert parse(chat, f"{thought}</think>so") == [ReasoningText(thought), ContentText("so")]
    assert parse(chat, f"a {opening}") == [ReasoningText(f"a {opening}")]


@pytest.mark.parametrize("name", STYLES)
def test_call_that_never_ends_is_content(name):
    chat = STYLES[name]
    text = render(chat, {"city": "Rome", "days": 3})
    for end in range(1, text.rindex(chat.tool_close) + len(chat.tool_close)):
        assert parse(chat, text[:end], inside=False) == [ContentText(text[:end])]


@settings(max_examples=FEW)
@given(text=texts, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_tokens_that_split_letters_change_neither_text_nor_counts(codec, text, sizes):
    """H-01 and its kin: one byte a token, deltas of any size."""
    settings_ = ApiSettings(model_name="tiny", codec=codec, chat=CHAT, max_body_bytes=1 << 20)
    prepared = Prepared("r", (), (1,), False, False, tools=TOOLS, inside_reasoning=True)
    tokens, results = byte_tokens(text), []
    for pattern in (sizes, [1], [max(len(tokens), 1)]):
        turn, events, start, steps = Turn(settings_, prepared), [], 0, itertools.cycle(pattern)
        while start < len(tokens):
            step = next(steps)
            for event in turn.add(Delta("r", tokens[start : start + step])):
                append_event(events, event)
            start += step
        for event in turn.end():
            append_event(events, event)
        results.append((events, turn.reasoning_tokens))
    assert results[0] == results[1] == results[2]
    assert results[0][0] == parse(CHAT, text)


def test_every_recipe_is_fuzzed():
    assert {recipe.name for recipe in registry.recipes()} <= set(CHATS)
    assert all(dataclasses.is_dataclass(chat) for chat in CHATS.values())
