"""Stops: byte-level search, hold-back, and independence from how tokens fall into rounds."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from flare_ray.controller.stops import OutputStops
from tests.support.stop_reference import Stops, one_shot

GREEDY = SamplingSpec(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed=0)
WIDTHS = (1, 2, 4, 8)


def stops_of(table, eos=(), max_tokens=100, min_tokens=0, **fields):
    sampling = msgspec.structs.replace(GREEDY, min_tokens=min_tokens)
    request = GenerationRequest(
        request_id="r", prompt_tokens=(0,), sampling=sampling, max_tokens=max_tokens, **fields
    )
    return OutputStops(request, frozenset(eos), table)


def play(stops, tokens, chunk_sizes):
    """Push tokens in chunks; the visible deltas, and the end or None."""
    deltas, place = [], 0
    for size in chunk_sizes:
        visible = stops.push(tokens[place : place + size])
        deltas.append((visible.tokens, visible.trim_bytes))
        place += size
        if visible.end is not None:
            return deltas, visible.end
        if place >= len(tokens):
            break
    return deltas, None


def text_of(deltas, table):
    text = b""
    for tokens, trim in deltas:
        text += b"".join(table[token] for token in tokens)
        if trim:
            text = text[:-trim]
    return text


def in_rounds(width, count):
    return [width] * -(-count // width)


LETTERS = [b"A", b"B", b"C", b"D", b"E"]


def test_stop_string_is_not_streamed_before_it_is_recognised():
    deltas, end = play(stops_of(LETTERS, stop=(b"CDE",)), [0, 1, 2, 3, 4], in_rounds(1, 5))
    assert [tokens for tokens, _ in deltas] == [(0,), (1,), (), (), ()]
    assert (end.reason, end.stop_reason, end.completion_tokens) == ("stop", "CDE", 5)


def test_held_text_is_released_when_the_stop_can_no_longer_match():
    deltas, end = play(stops_of(LETTERS, stop=(b"CDX",)), [0, 1, 2, 3, 4], in_rounds(1, 5))
    assert [tokens for tokens, _ in deltas] == [(0,), (1,), (), (), (2, 3, 4)]
    assert end is None


def test_held_text_is_released_at_the_budget():
    stops = stops_of(LETTERS, stop=(b"CDX",), max_tokens=4)
    deltas, end = play(stops, [0, 1, 2, 3], in_rounds(1, 4))
    assert text_of(deltas, LETTERS) == b"ABCD"
    assert end.reason == "length"


def test_held_text_is_released_at_eos():
    stops = stops_of(LETTERS, eos=(4,), stop=(b"CDX",))
    deltas, end = play(stops, [0, 2, 3, 4], in_rounds(1, 4))
    assert text_of(deltas, LETTERS) == b"ACD"
    assert (end.reason, end.stop_reason, end.completion_tokens) == ("stop", None, 4)


@pytest.mark.parametrize(("include", "expected"), [(False, b"foo"), (True, b"foo;")])
def test_stop_that_ends_inside_a_token_trims_it(include, expected):
    table = [b"foo;bar"]
    stops = stops_of(table, stop=(b";",), include_stop=include)
    deltas, end = play(stops, [0], [1])
    assert text_of(deltas, table) == expected
    assert end.stop_reason == ";"


@pytest.mark.parametrize("width", WIDTHS)
def test_stop_inside_an_accepted_prefix_gives_the_same_text_and_count_for_every_width(width):
    table = [f"{n} ".encode() for n in range(10)]
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    deltas, end = play(stops_of(table, stop=(b"4",)), tokens, in_rounds(width, 8))
    assert text_of(deltas, table) == b"1 2 3 "
    assert end.completion_tokens == 4


@pytest.mark.parametrize("width", WIDTHS)
def test_token_without_bytes_before_a_stop_is_visible_for_every_width(width):
    table = [b"ab", b"", b"ST", b"OP"]
    deltas, _ = play(stops_of(table, stop=(b"STOP",)), [0, 1, 2, 1, 3], in_rounds(width, 5))
    assert sum((tokens for tokens, _ in deltas), ()) == (0, 1)


@pytest.mark.parametrize("width", WIDTHS)
def test_token_without_bytes_after_an_included_stop_is_hidden_for_every_width(width):
    table = [b"ab", b"", b"STOP"]
    stops = stops_of(table, stop=(b"STOP",), include_stop=True)
    deltas, end = play(stops, [0, 2, 1, 1], in_rounds(width, 4))
    assert sum((tokens for tokens, _ in deltas), ()) == (0, 2)
    assert end.completion_tokens == 2


def test_stop_that_completes_first_wins_over_the_one_that_begins_first():
    table = [b"xabcy"]
    _, end = play(stops_of(table, stop=(b"abcy", b"bc")), [0], [1])
    assert end.stop_reason == "bc"


def test_longest_stop_wins_among_those_that_complete_together():
    table = [b"xabc"]
    deltas, end = play(stops_of(table, stop=(b"c", b"abc", b"bc")), [0], [1])
    assert (text_of(deltas, table), end.stop_reason) == (b"x", "abc")


def test_stop_token_is_hidden_and_named():
    deltas, end = play(stops_of(LETTERS, stop_token_ids=(2,)), [0, 1, 2, 3], [4])
    assert sum((tokens for tokens, _ in deltas), ()) == (0, 1)
    assert (end.reason, end.stop_reason, end.completion_tokens) == ("stop", 2, 3)


def test_eos_is_text_under_ignore_eos():
    stops = stops_of(LETTERS, eos=(1,), ignore_eos=True, max_tokens=3)
    deltas, end = play(stops, [0, 1, 2], [3])
    assert sum((tokens for tokens, _ in deltas), ()) == (0, 1, 2)
    assert end.reason == "length"


def test_stop_token_counts_under_ignore_eos():
    stops = stops_of(LETTERS, eos=(1,), ignore_eos=True, stop_token_ids=(1,))
    _, end = play(stops, [0, 1, 2], [3])
    assert end.stop_reason == 1


def test_tokens_beyond_the_budget_are_ignored():
    deltas, end = play(stops_of(LETTERS, max_tokens=2), [0, 1, 2, 3], [4])
    assert sum((tokens for tokens, _ in deltas), ()) == (0, 1)
    assert (end.reason, end.completion_tokens) == ("length", 2)


def test_stop_across_a_multibyte_character_matches_bytes():
    table = [b"\xe2\x82", b"\xac", b"x"]
    deltas, end = play(stops_of(table, stop=("€".encode(),)), [2, 0, 1, 2], [1] * 4)
    assert text_of(deltas, table) == b"x"
    assert end.completion_tokens == 3


TABLE = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"bbb", b"c", b"abcab", b"", b"\xe2", b"\x82\xac"]
_SEQUENCE = st.lists(st.sampled_from([1, 2, 3, 9]), min_size=1, max_size=3).map(tuple)


@st.composite
def outputs(draw):
    ids = st.integers(0, len(TABLE) - 1)
    stop = st.binary(min_size=1, max_size=5).map(
        lambda raw: bytes(b"abc"[byte % 3] for byte in raw)
    )
    tokens = draw(st.lists(ids, min_size=1, max_size=40))
    return {
        "tokens": tokens,
        "chunks": draw(st.lists(st.integers(1, 8), min_size=40, max_size=40)),
        "stop": tuple(draw(st.lists(stop, max_size=3))),
        "stop_ids": tuple(draw(st.lists(ids, max_size=1))),
        "sequences": tuple(draw(st.lists(_SEQUENCE, max_size=2))),
        "min_tokens": draw(st.sampled_from([0, 0, 1, 3, 9])),
        "eos": tuple(draw(st.lists(ids, max_size=1))),
        "include_stop": draw(st.booleans()),
        "max_tokens": draw(st.integers(1, 45)),
    }


@given(outputs())
def test_any_chunking_equals_the_one_shot_reference(case):
    stops = stops_of(
        TABLE,
        eos=case["eos"],
        max_tokens=case["max_tokens"],
        stop=case["stop"],
        include_stop=case["include_stop"],
        stop_token_ids=case["stop_ids"],
        stop_sequences=case["sequences"],
        min_tokens=case["min_tokens"],
    )
    deltas, end = play(stops, case["tokens"], case["chunks"])
    text, reason, stop_reason, count = one_shot(
        case["tokens"],
        TABLE,
        Stops(
            eos=case["eos"],
            strings=case["stop"],
            ids=case["stop_ids"],
            sequences=case["sequences"],
            min_tokens=case["min_tokens"],
            include=case["include_stop"],
            max_tokens=case["max_tokens"],
        ),
    )
    if end is None:
        assert reason is None
        held = text[len(text_of(deltas, TABLE)) :]
        assert text.startswith(text_of(deltas, TABLE))
        longest = max(map(len, case["stop"]), default=1)
        longest += 3 * max(map(len, TABLE)) * bool(case["sequences"])
        assert len(held) < longest + max(map(len, TABLE))
    else:
        assert (end.reason, end.stop_reason, end.completion_tokens) == (reason, stop_reason, count)
        assert text_of(deltas, TABLE) == text


@given(outputs(), st.sampled_from([2, 3, 8]))
def test_visible_tokens_and_trim_do_not_depend_on_the_width(case, width):
    def outcome(size):
        stops = stops_of(
            TABLE,
            eos=case["eos"],
            max_tokens=case["max_tokens"],
            stop=case["stop"],
            include_stop=case["include_stop"],
            stop_token_ids=case["stop_ids"],
            stop_sequences=case["sequences"],
            min_tokens=case["min_tokens"],
        )
        deltas, end = play(stops, case["tokens"], in_rounds(size, 40))
        tokens = sum((tokens for tokens, _ in deltas), ())
        return tokens, sum(trim for _, trim in deltas), end

    assert outcome(1) == outcome(width)


@given(outputs())
def test_nothing_visible_is_ever_taken_back(case):
    stops = stops_of(TABLE, stop=case["stop"], include_stop=False, max_tokens=100)
    deltas, end = play(stops, case["tokens"], case["chunks"])
    streamed = b"".join(TABLE[token] for tokens, trim in deltas for token in tokens if not trim)
    if end is not None:
        assert text_of(deltas, TABLE).startswith(streamed)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("min_tokens", "ended"), [(0, 2), (1, 2), (2, 5), (4, 5), (5, None), (6, None)]
)
def test_stop_within_the_first_min_tokens_is_passed_over_at_every_width(width, min_tokens, ended):
    """B A B B A B: "BA" is complete after tokens 2 and 5."""
    table = [b"A", b"B"]
    stops = stops_of(table, stop=(b"BA",), min_tokens=min_tokens)
    deltas, end = play(stops, [1, 0, 1, 1, 0, 1], in_rounds(width, 6))
    assert (end.completion_tokens if end else None) == ended
    if ended:
        assert text_of(deltas, table) == b"BABBA"[: ended - 2]


@pytest.mark.parametrize("width", WIDTHS)
def test_stop_that_overlaps_one_passed_over_is_found(width):
    stops = stops_of([b"A"], stop=(b"AA",), min_tokens=3)
    deltas, end = play(stops, [0] * 8, in_rounds(width, 8))
    assert end.completion_tokens == 4
    assert text_of(deltas, [b"A"]) == b"AA"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("include", "shown"), [(False, (0,)), (True, (0, 1, 2))])
def test_stop_sequence_ends_the_output_across_rounds(width, include, shown):
    stops = stops_of(LETTERS, stop_sequences=((1, 2),), include_stop=include)
    deltas, end = play(stops, [0, 1, 2, 3], in_rounds(width, 4))
    assert sum((tokens for tokens, _ in deltas), ()) == shown
    assert (end.reason, end.stop_reason, end.completion_tokens) == ("stop", (1, 2), 3)


def test_begun_stop_sequence_is_held_back_and_released():
    deltas, end = play(stops_of(LETTERS, stop_sequences=((1, 2, 4),)), [0, 1, 2, 3], [1] * 4)
    assert [tokens for tokens, _ in deltas] == [(0,), (), (), (1, 2, 3)]
    assert end is None


@pytest.mark.parametrize("width", WIDTHS)
def test_string_wins_over_a_sequence_that_is_complete_in_the_same_token(width):
    stops = stops_of(LETTERS, stop=(b"C",), stop_sequences=((1, 2),))
    deltas, end = play(stops, [0, 1, 2], in_rounds(width, 3))
    assert (text_of(deltas, LETTERS), end.stop_reason) == (b"AB", "C")
