"""The recipe's chat template and call syntax against the published encoder's text.

The expected texts and digests were made by DeepSeek's own encoder (PyPI `deepseek-recipe` 0.2.0);
where that package is installed, every case is compared with it afresh.
"""

from __future__ import annotations

import hashlib
import itertools
import json

import pytest

from flare_ray.frontend.parsers.chat import ChatParser
from flare_ray.frontend.parsers.events import ContentText, ReasoningText, ToolCall
from flare_ray.frontend.templates.render import load_chat_template
from flare_ray.recipes.deepseek_v41.recipe import RECIPE

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
EFFORT = (
    "<｜System｜>Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the "
    "reasoning)\n\n"
)
CALLS = (
    "\n\n<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Oslo "x" <b></｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="deep" string="false">{"a": [1, true, null]}</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
    '<｜DSML｜ invoke name="now">\n\n</｜DSML｜ invoke>\n'
    "</｜DSML｜ calls>"
)
ARGUMENTS = {"city": 'Oslo "x" <b>', "days": 3, "deep": {"a": [1, True, None]}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "é", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    found = load_chat_template(tmp_path_factory.mktemp("none"), (), recipe=RECIPE.chat.template)
    assert found is not None
    return found


def user(text):
    return {"role": "user", "content": text}


def call(number, name, arguments):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


ROUND = [
    user("Weather?"),
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "look",
        "tool_calls": [call("1", "weather", ARGUMENTS), call("2", "now", {})],
    },
    {"role": "tool", "tool_call_id": "2", "content": "noon"},
    {"role": "tool", "tool_call_id": "1", "content": "sun"},
]
HELLO = {"role": "assistant", "content": "Hello", "reasoning_content": "greet"}
BRIEF = {"role": "system", "content": "Be brief."}
CASES = {
    "one turn": ([user("Hi")], None),
    "system": ([BRIEF, user("Hi"), HELLO, user("Bye")], None),
    "later system": ([user("Hi"), HELLO, BRIEF, user("Bye")], None),
    "two user turns": ([user("Hi"), user("there")], None),
    "tools": ([BRIEF, user("Hi")], TOOLS),
    "results": (ROUND, TOOLS),
    "after results": ([*ROUND, HELLO, user("Thanks"), *ROUND[1:]], TOOLS),
    "results then user": ([*ROUND, user("and?")], TOOLS),
}
SWITCHES = [
    {"enable_thinking": thinking, **({"reasoning_effort": effort} if effort else {})}
    for thinking, effort in itertools.product((True, False), (None, "low", "max"))
]
DIGESTS = {
    "one turn": "bcabe2322895305bfa37b4a1d15a9d3d4597f8e1242ae6b5c9527b5f34970426",
    "system": "236143a0973ad03ab3707b4f5fa5788154c4308a4bf9d7ef95a27beeb8823310",
    "later system": "f6b7ff91dcec50bc6621109933e41f0ee1888854ed86739d86b74a5deaca374a",
    "two user turns": "6082a79691e72d3f2869c29e91b4594ec49de0a4076dc591fef29a4864820fa2",
    "tools": "aa1fc315677cc3620a27a3fe55ec14841256b165e0cf37583ae34f946c52025d",
    "results": "1824348810533c6cbeea9c6f3cebef8706e193f83cad46b36f056ebbb4fdea07",
    "after results": "eaa53dac76ad5fbeeb52c7bcc50f8ada5c9b6b5ef8e0e2a3035fd991fe3e9e76",
    "results then user": "6e8703f839906a9cb19f950515e8fd41df8449b91c1370f9738f611705a32eb5",
}
"""SHA-256 of what the encoder makes of a case under every switch, joined by NUL."""


def digest(prompts: list[str]) -> str:
    return hashlib.sha256("\0".join(prompts).encode()).hexdigest()


def test_variables_are_the_two_that_a_client_may_set(template):
    assert template.variables == {"enable_thinking", "reasoning_effort"}


def test_thinking_opens_with_the_effort_and_ends_inside_reasoning(template):
    for options, number in (({}, 75), ({"reasoning_effort": "low"}, 50)):
        text = template.render([user("Hi")], tools=None, options=options)
        assert text == f"{BOS}{EFFORT.format(number)}<｜User｜>Hi<｜Assistant｜><think>"


def test_chat_mode_closes_reasoning_at_once(template):
    text = template.render([user("Hi")], tools=None, options={"enable_thinking": False})
    assert text == f"{BOS}<｜User｜>Hi<｜Assistant｜></think>"


def test_earlier_reasoning_is_dropped_without_tools(template):
    text = template.render(CASES["system"][0], tools=None, options={})
    assert text == (
        f"{BOS}{EFFORT.format(75)}Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello{EOS}"
        "<｜User｜>Bye<｜Assistant｜><think>"
    )


def test_calls_and_results_are_written_as_published(template):
    text = template.render(ROUND, tools=TOOLS, options={})
    assert text.endswith(
        f"<｜User｜>Weather?<｜Assistant｜><think>look</think>{CALLS}{EOS}<｜User｜>"
        "<tool_result>sun</tool_result>\n\n<tool_result>noon</tool_result><｜Assistant｜><think>"
    )
    assert '{"name": "weather", "description": "é", "parameters": {"type": "object", ' in text


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_the_recorded_digest_of_the_published_encoder(template, case):
    messages, tools = CASES[case]
    texts = [template.render(messages, tools=tools, options=options) for options in SWITCHES]
    assert digest(texts) == DIGESTS[case]


@pytest.mark.parametrize("case", CASES)
def test_every_case_equals_the_published_encoder(template, case):
    package = pytest.importorskip("deepseek_recipe", reason="DeepSeek's encoder is not installed")
    messages, tools = CASES[case]
    version = package.ModelVersion.DeepseekV41Flash
    conversion = package.ConversionOptions().with_model_alias("m", version)
    published = []
    for options in SWITCHES:
        body = json.loads(json.dumps({"model": "m", "messages": messages}))
        for message in body["messages"]:
            for made in message.get("tool_calls", ()):
                made["function"]["arguments"] = json.dumps(made["function"]["arguments"])
        switch = "enabled" if options["enable_thinking"] else "disabled"
        body["thinking"] = {"type": switch}
        body |= {"tools": tools} if tools else {}
        body |= {k: v for k, v in options.items() if k == "reasoning_effort"}
        conversation = package.ChatCompletionRequest(json.dumps(body)).convert(conversion)
        wanted = package.DeepseekV41Encoding().render_conversation(conversation.conversation)
        assert template.render(messages, tools=tools, options=options) == wanted.prompt
        published.append(wanted.prompt)
    assert digest(published) == DIGESTS[case]


def parsed(text: str, sizes=None, *, inside: bool = False):
    parser = ChatParser(RECIPE.chat, tools={"weather": SCHEMA, "now": {}}, inside_reasoning=inside)
    events, at = [], 0
    for size in sizes or (len(text),):
        events += parser.feed(text[at : at + size])
        at += size
    return events + parser.feed(text[at:]) + parser.finish()


def joined(events):
    """Text by kind, and calls with their arguments read."""
    content = "".join(e.text for e in events if isinstance(e, ContentText))
    reasoning = "".join(e.text for e in events if isinstance(e, ReasoningText))
    calls = [(e.name, json.loads(e.arguments)) for e in events if isinstance(e, ToolCall)]
    return reasoning, content, calls


WHOLE = ("look", "Let me see.\n\n", [("weather", ARGUMENTS), ("now", {})])


@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_a_run_of_calls_is_read_however_it_is_cut(size):
    text = f"look</think>Let me see.{CALLS}"
    sizes = (size,) * (len(text) // size)
    assert joined(parsed(text, sizes, inside=True)) == WHOLE


def test_a_call_without_arguments_may_close_itself():
    text = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="now"/>\n</｜DSML｜ calls>'
    assert joined(parsed(text)) == ("", "", [("now", {})])


@pytest.mark.parametrize(
    "text",
    [
        "<｜DSML｜ calls>\nnothing of the kind",
        "<｜DSML｜ calls>\n</｜DSML｜ calls>",
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="now" more>',
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="city">x',
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter na',
        '<｜DSML｜ invoke name="now">\n</｜DSML｜ invoke>',
    ],
)
def test_what_is_no_call_stays_text(text):
    for sizes in (None, (1,) * len(text)):
        assert joined(parsed(text, sizes)) == ("", text, [])


def test_a_value_that_is_no_json_stays_a_string():
    text = CALLS.replace(">3<", ">three<")
    assert joined(parsed(text))[2][0][1]["days"] == "three"
