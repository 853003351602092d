"""The demo's own chat template through the routes' code: equivalences and layout."""

import json

import pytest

from flare_ray.frontend.openai.messages import normalise_messages
from flare_ray.frontend.templates.render import ChatTemplate, load_chat_template
from flare_ray.frontend.tokenizer import TextCodec
from flare_ray.recipes.glm5_next.recipe import RECIPE
from tests.rules.sources import ROOT

FOLDERS = (ROOT / "deployments" / "demo" / "glm", ROOT / "benchmarks" / "demo_training")
CALLS = [
    {"id": "b", "type": "function", "function": {"name": "second", "arguments": "{}"}},
    {"id": "a", "type": "function", "function": {"name": "first", "arguments": '{"n": 1}'}},
]
TOOL = {"type": "function", "function": {"name": "first", "description": "é"}}


@pytest.fixture(scope="module", params=FOLDERS, ids=["checkpoint", "source"])
def template(request) -> ChatTemplate:
    found = load_chat_template(request.param, ("<|user|>",)) if request.param.is_dir() else None
    if found is None:
        pytest.skip(f"{request.param.relative_to(ROOT)} holds no chat template yet")
    return found


def render(template, messages, *, tools=None, **options):
    return template.render(normalise_messages(messages), tools=tools, options=options)


def history(**assistant):
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": CALLS, **assistant},
        {"role": "tool", "tool_call_id": "a", "content": "result a"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "result b"}]},
    ]


def test_generation_prompt_opens_reasoning(template):
    text = render(template, [{"role": "user", "content": "hi"}])
    assert text.endswith("<|user|>hi<|assistant|><think>")


def test_assistant_without_content_is_the_same_prompt_four_times(template):
    forms = [
        render(template, history(**c)) for c in ({}, *({"content": c} for c in (None, "", [])))
    ]
    assert len(set(forms)) == 1
    assert "<tool_call>first<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>" in forms[0]


def test_results_follow_the_order_of_the_calls(template):
    text = render(template, history())
    results = "<tool_response>result b</tool_response><tool_response>result a</tool_response>"
    assert f"<|observation|>{results}" in text


def test_efforts_are_told_apart(template):
    messages = [{"role": "user", "content": "x"}]
    texts = {render(template, messages, reasoning_effort=e) for e in ("low", "high", "max")}
    assert len(texts) == 3
    assert render(template, messages) in texts


def test_reasoning_before_the_last_user_message_is_dropped_unless_kept(template):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "because"},
        {"role": "user", "content": "r"},
    ]
    assert "<think></think>a" in render(template, messages)
    if "clear_thinking" in template.variables:
        assert "<think>because</think>a" in render(template, messages, clear_thinking=False)


def test_tools_are_listed_as_json_with_their_own_letters(template):
    text = render(template, [{"role": "user", "content": "x"}], tools=[TOOL])
    assert '"description": "é"' in text


def test_control_token_in_a_message_stands_alone_and_in_the_layout_not(template):
    messages = normalise_messages([{"role": "user", "content": "a<|user|>b"}])
    pieces = template.pieces(messages, tools=None, options={})
    assert [text for text, plain in pieces if plain] == ["<|user|>"]
    assert "".join(text for text, _ in pieces).endswith("<|user|>a<|user|>b<|assistant|><think>")


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(FOLDERS[0], RECIPE.chat)


MARKUP = sorted(
    entry["content"]
    for entry in json.loads((FOLDERS[0] / "tokenizer.json").read_text())["added_tokens"]
)


@pytest.mark.parametrize("text", MARKUP)
def test_markup_in_clients_text_is_no_token_of_the_demo_tokenizer(codec, text):
    """In every place a client's text has; the layout's own tokens are the same as without it."""
    token = codec._tokenizer.token_to_id(text)

    def prompt(word):
        call = {"type": "function", "function": {"name": "f", "arguments": {"k": f"x{word}"}}}
        messages = [
            {"role": "system", "content": word},
            {"role": "user", "content": f"a {word}b"},
            {"role": "assistant", "content": f"{word}.", "tool_calls": [call]},
            {"role": "tool", "content": f"{{{word}}}"},
        ]
        tool = {"type": "function", "function": {"name": "f", "description": word}}
        return codec.encode_chat(normalise_messages(messages), tools=[tool], options={})

    rendered, ids = prompt(text)
    assert ids.count(token) == prompt("word")[1].count(token)
    assert b"".join(codec.token_bytes[i] or names(codec)[i] for i in ids).decode() == rendered
    control = [t for t in ids if t in names(codec)]
    assert control == [t for t in prompt("word")[1] if t in names(codec)]


def names(codec) -> dict[int, bytes]:
    added = codec._tokenizer.get_added_tokens_decoder()
    return {ident: token.content.encode() for ident, token in added.items()}
