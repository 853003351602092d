"""Chunks that only carry text are put together from ready-made bytes, which must be those of their
records."""

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_ray.contracts.messages import Delta, Finished
from flare_ray.contracts.record import TokenScore
from flare_ray.frontend.openai import answer, choices
from flare_ray.frontend.openai.answer import CHAT, COMPLETION, Answer
from flare_ray.frontend.openai.prepare import Echo, Prepared
from flare_ray.frontend.openai.responses import TextFrame, encode
from flare_ray.frontend.settings import ApiSettings
from tests.support.fake_engine_client import byte_tokens
from tests.unit.frontend.test_parser_fuzz import CHATS, TOOLS, texts

FEW = 60
SCORE = TokenScore(-0.5, (), ())
awkward = st.text(st.sampled_from('a"\\/\b\n\r\t\x00\x1f\x7f\u2028\u2029é€🙂�<>&'), max_size=40)
pieces = st.lists(st.integers(1, 9), min_size=1, max_size=20)


def deltas(data, sizes, *, scored=False, sourced=False):
    tokens, start, steps = byte_tokens(data), 0, itertools.cycle(sizes)
    while start < len(tokens):
        part = tokens[start : start + next(steps)]
        start += len(part)
        scores = (SCORE,) * len(part) if scored else ()
        yield Delta("r", part, scores=scores, sources=bytes(len(part)) if sourced else b"")


def stream(codec, chat, prepared, style, events, *, fast):
    """Every byte of a stream; the slow way encodes the record of every chunk."""
    options = ApiSettings(
        model_name='"content":"" é', codec=codec, chat=chat, max_body_bytes=1 << 20
    )

    class Stream:
        async def __aiter__(self):
            for event in events:
                yield event

    async def scenario():
        written = Answer(options, prepared, style)
        if not fast:
            for choice in written._choices:
                choice.frames = lambda delta, add=choice.add: written._chunk_frames(add(delta))
        return b"".join([piece async for piece in written.frames([Stream()])])

    return asyncio.run(scenario())


def both(codec, chat, prepared, style, events):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer.time, "time", lambda: 1_700_000_000.0)
        return [stream(codec, chat, prepared, style, events, fast=fast) for fast in (True, False)]


@pytest.fixture
def put_together(monkeypatch):
    """Texts of the chunks that were not encoded as records."""
    found = []

    class Watched(TextFrame):
        def around(self, text):
            found.append(text)
            return super().around(text)

    monkeypatch.setattr(choices, "TextFrame", Watched)
    return found


@pytest.mark.parametrize("name", CHATS)
@settings(max_examples=FEW)
@given(
    text=st.one_of(texts, awkward),
    sizes=pieces,
    inside=st.booleans(),
    tools=st.booleans(),
    usage=st.booleans(),
    more=st.sampled_from(["", "logprobs", "token_sources", "data_answer"]),
)
def test_a_chats_stream_has_the_bytes_of_its_records(
    codec, name, text, sizes, inside, tools, usage, more
):
    prepared = Prepared(
        "chatcmpl-1",
        (),
        (1,),
        True,
        usage,
        tools=TOOLS if tools else None,
        inside_reasoning=inside,
        **({more: True} if more else {}),
    )
    events = [
        *deltas(text, sizes, scored=more == "logprobs", sourced=more == "token_sources"),
        Finished("r", "stop", 1, 1),
    ]
    fast, slow = both(codec, CHATS[name], prepared, CHAT, events)
    assert fast == slow


@settings(max_examples=FEW)
@given(
    data=st.one_of(awkward.map(str.encode), st.binary(max_size=40)),
    sizes=pieces,
    usage=st.booleans(),
    trim=st.integers(0, 3),
    more=st.sampled_from(["", "logprobs", "token_sources", "echoes", "discards"]),
)
def test_a_completions_stream_has_the_bytes_of_its_records(codec, data, sizes, usage, trim, more):
    extra = {"": {}, "echoes": {"echoes": (Echo("the prompt", (1,)),)}}.get(more, {more: True})
    prepared = Prepared("cmpl-1", (), (1,), True, usage, **extra)
    found = list(deltas(data, sizes, scored=more == "logprobs", sourced=more == "token_sources"))
    if found:
        last = found[-1]
        found[-1] = Delta("r", last.tokens, trim, last.scores, sources=last.sources)
    events = [*found, Finished("r", "length", 1, 1)]
    fast, slow = both(codec, CHATS["arg_pairs"], prepared, COMPLETION, events)
    assert fast == slow


def shown(codec, put_together, text, style=CHAT, **fields):
    prepared = Prepared("chatcmpl-1", (), (1,), True, False, **fields)
    scored, sourced = bool(fields.get("logprobs")), bool(fields.get("token_sources"))
    events = [
        *deltas(text, [1], scored=scored, sourced=sourced),
        Finished("r", "stop", 1, 1),
    ]
    stream(codec, CHATS["arg_pairs"], prepared, style, events, fast=True)
    return "".join(put_together)


def test_content_and_reasoning_are_put_together_from_the_second_chunk_on(codec, put_together):
    assert shown(codec, put_together, "abc<d") == "bc<d"
    put_together.clear()
    assert shown(codec, put_together, "why</think>yes", inside_reasoning=True) == "hyyes"


def test_the_text_of_a_completion_is_put_together_from_the_first_chunk_on(codec, put_together):
    assert shown(codec, put_together, "a<tool_call>b", COMPLETION) == "a<tool_call>b"


@pytest.mark.parametrize("style", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("field", ["logprobs", "token_sources"])
def test_chunks_that_carry_more_than_text_are_records(codec, put_together, style, field):
    assert shown(codec, put_together, "abc", style, **{field: True}) == ""


def test_calls_are_records(codec, put_together):
    call = "<tool_call>look<arg_key>word</arg_key><arg_value>sun</arg_value></tool_call>"
    assert shown(codec, put_together, f"a{call}", tools=TOOLS) == ""


@settings(max_examples=FEW)
@given(text=awkward)
def test_a_text_is_written_as_its_record_writes_it(text):
    frame = TextFrame(b'data: {"a":"\\"text\\":\\"\\"","text":"","z":1}\n\n', "text")
    plain = encode({"a": '"text":""', "text": text, "z": 1})
    assert frame.around(text) == b"data: " + plain + b"\n\n"
