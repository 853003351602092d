"""Sources of text in answers and streams (`return_token_sources`), through everything that holds
text back: characters in bytes, tags, calls that come to nothing, stops inside tokens.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_ray.contracts.messages import Delta, Finished, TokenSource
from flare_ray.frontend.openai.choices import ChatChoiceBuilder, TextChoiceBuilder
from flare_ray.frontend.openai.logprobs import ScoredTokens
from flare_ray.frontend.openai.prepare import Prepared
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.sources import SOURCE_NAMES, SourcedText
from flare_ray.frontend.stream import merge_deltas
from flare_ray.frontend.turn import Turn
from tests.support.fake_engine_client import byte_tokens
from tests.unit.frontend.conftest import error_of, sse_chunks
from tests.unit.frontend.test_parser_fuzz import CHATS, TOOLS, texts

FEW = 60
TEXT = "</think>né €🙂!"


def source_of(letter):
    """Every letter has a source of its own, so that a span which is off by one shows."""
    return ord(letter) % len(TokenSource)


def sourced(text):
    """Tokens of one byte each with their sources; only a letter's last byte tells its own."""
    sources = []
    for letter in text:
        others = [(source_of(letter) + 1) % len(TokenSource)] * (len(letter.encode()) - 1)
        sources += [*others, source_of(letter)]
    return byte_tokens(text), bytes(sources)


def deltas(text, sizes):
    tokens, sources = sourced(text)
    start, steps = 0, itertools.cycle(sizes)
    while start < len(tokens):
        end = start + next(steps)
        yield Delta("r", tokens[start:end], sources=sources[start:end])
        start = end


def script(sizes, *, trim_bytes=0):
    def run(request):
        assert request.token_sources
        found = list(deltas(TEXT, sizes))
        last = found[-1]
        found[-1] = Delta("r", last.tokens, trim_bytes, sources=last.sources)
        yield from found
        yield Finished(request.request_id, "stop", 3, len(byte_tokens(TEXT)) + 1)

    return run


def check(spans, text):
    """They add up to the text, have the sources of its letters, and none could be joined."""
    spans = [(s["source"], s["text"]) if isinstance(s, dict) else (s.source, s.text) for s in spans]
    assert "".join(piece for _, piece in spans) == text
    assert all(a != b for (a, _), (b, _) in itertools.pairwise(spans))
    for source, piece in spans:
        assert piece
        assert {SOURCE_NAMES[source_of(letter)] for letter in piece} == {source}


@pytest.mark.parametrize("sizes", [[1], [3], [100]])
def test_chat_spans_add_up_to_reasoning_and_content_in_answer_and_stream(make_api, sizes):
    api = make_api(script(sizes))
    choice = api.chat(return_token_sources=True).json()["choices"][0]
    assert choice["message"]["content"] == "né €🙂!"
    check(choice["token_sources"]["content"], "né €🙂!")
    streamed = ""
    for chunk in api.chunks(return_token_sources=True):
        (part,) = chunk["choices"]
        content = part["delta"].get("content")
        if content:
            assert set(part["token_sources"]) == {"content"}
            check(part["token_sources"]["content"], content)
            streamed += content
    assert streamed == "né €🙂!"


@pytest.mark.parametrize("sizes", [[1], [3], [100]])
def test_text_spans_add_up_in_answer_and_stream(make_api, sizes):
    api = make_api(script(sizes))
    choice = api.complete(return_token_sources=True).json()["choices"][0]
    check(choice["token_sources"], TEXT)
    for chunk in sse_chunks(api.complete(return_token_sources=True, stream=True)):
        (part,) = chunk["choices"]
        check(part["token_sources"], part["text"])


def test_an_echo_is_the_prompts(make_api):
    api = make_api(script([2]))
    choice = api.complete(return_token_sources=True, echo=True).json()["choices"][0]
    first, *others = choice["token_sources"]
    assert first == {"source": "prompt", "text": "abc"}
    check(others, TEXT)


def test_a_stop_inside_the_last_token_ends_the_last_span(make_api):
    api = make_api(script([100], trim_bytes=1))
    choice = api.complete(return_token_sources=True).json()["choices"][0]
    check(choice["token_sources"], TEXT[:-1])


def test_half_a_character_at_the_end_belongs_to_its_last_token(make_api):
    half = byte_tokens("€".encode()[:2])

    def run(request):
        yield Delta("r", half, sources=bytes([TokenSource.TARGET, TokenSource.HISTORY]))
        yield Finished("r", "length", 3, 2)

    choice = make_api(run).complete(return_token_sources=True).json()["choices"][0]
    assert choice["token_sources"] == [{"source": "history", "text": "�"}]


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_nothing_is_told_unasked(api, path):
    for fields in ({}, {"return_token_sources": False}, {"return_token_sources": None}):
        choice = getattr(api, path)(**fields).json()["choices"][0]
        assert "token_sources" not in choice
        assert not api.client.requests[-1].token_sources


def test_the_option_is_a_boolean(api):
    error = error_of(api.chat(return_token_sources="yes"), 400)
    assert error["param"] == "return_token_sources"


def test_merged_deltas_keep_the_sources_of_both():
    merged = merge_deltas([Delta("r", (1, 2), sources=b"\0\1"), Delta("r", (3,), sources=b"\2")])
    assert merged == [Delta("r", (1, 2, 3), sources=b"\0\1\2")]


def unencoded(chunks):
    raise AssertionError(f"only records are wanted here, got {chunks} to encode")


def chat_builder(codec, chat, *, inside, in_parts, tools=TOOLS):
    options = ApiSettings(model_name="tiny", codec=codec, chat=chat, max_body_bytes=1 << 20)
    prepared = Prepared(
        "r", (), (1,), in_parts, False, tools=tools, inside_reasoning=inside, token_sources=True
    )
    scored = ScoredTokens(codec.token_bytes, wanted=False)
    return ChatChoiceBuilder(0, Turn(options, prepared), scored, unencoded, call_prefix="call")


@pytest.mark.parametrize("name", CHATS)
@settings(max_examples=FEW)
@given(
    text=texts,
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    inside=st.booleans(),
    in_parts=st.booleans(),
)
def test_spans_follow_letters_through_tags_calls_and_lost_calls(
    codec, name, text, sizes, inside, in_parts
):
    builder = chat_builder(codec, CHATS[name], inside=inside, in_parts=in_parts)
    finished = Finished("r", "length", 1, 1)
    chunks = [chunk for delta in deltas(text, sizes) for chunk in builder.add(delta)]
    for chunk in [*chunks, *builder.end(finished)]:
        for kind in ("content", "reasoning_content"):
            shown = getattr(chunk.delta, kind)
            if shown:
                check(getattr(chunk.token_sources, kind), shown)
    whole_builder = chat_builder(codec, CHATS[name], inside=inside, in_parts=False)
    for delta in deltas(text, sizes):
        whole_builder.add(delta)
    whole = whole_builder.whole(finished)
    if whole.message.content:
        check(whole.token_sources.content, whole.message.content)
    if whole.message.reasoning_content:
        check(whole.token_sources.reasoning_content, whole.message.reasoning_content)


@settings(max_examples=FEW)
@given(text=texts, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_spans_of_plain_text_follow_its_letters(codec, text, sizes):
    scored = ScoredTokens(codec.token_bytes, wanted=False)
    text_source = SourcedText(codec.token_bytes, traced=True)
    builder = TextChoiceBuilder(0, text_source, scored, unencoded)
    parts = [part for delta in deltas(text, sizes) for part in builder.add(delta)]
    parts += builder.end(Finished("r", "length", 1, 1))
    for part in parts:
        check(part.token_sources, part.text)
    assert "".join(part.text for part in parts) == text
