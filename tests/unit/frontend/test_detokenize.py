"""Incremental text equals the one-shot decode, whatever the pieces (known fault H-01)."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_ray.frontend.detokenize import IncrementalDetokenizer

FRAGMENTS = ("€", "🙂", "é", "a", " ", "\n", "中")


def text_of(pieces, *, groups=None):
    """Concatenated deltas of tokens whose bytes are `pieces`."""
    detokenizer = IncrementalDetokenizer(pieces)
    ids = list(range(len(pieces)))
    cuts = groups or [[i] for i in ids]
    return "".join(detokenizer.push(group) for group in cuts) + detokenizer.finish()


def test_h01_broken_character_before_a_space_gives_one_replacement_and_keeps_the_space():
    assert text_of([b"x ", b"\xe2\x82", b" "]) == "x \ufffd "


def test_h01_character_split_over_tokens_is_whole():
    assert text_of([b"\xe2\x82", b"\xac"]) == "€"


def test_nothing_is_shown_before_the_character_is_whole():
    detokenizer = IncrementalDetokenizer([b"\xe2\x82", b"\xac", b"!"])
    assert [detokenizer.push([i]) for i in range(3)] == ["", "€", "!"]


def test_token_without_text_inside_a_character_does_not_break_it():
    assert text_of([b"\xe2\x82", b"", b"\xac"]) == "€"


def test_token_past_the_table_has_no_text():
    detokenizer = IncrementalDetokenizer([b"a"])
    assert detokenizer.push([0, 7, 0]) == "aa"


def test_trim_shortens_the_last_token_only():
    detokenizer = IncrementalDetokenizer([b"foo", b"bar;baz"])
    assert detokenizer.push([0, 1], trim_bytes=4) == "foobar"


def test_trim_longer_than_the_token_leaves_nothing_of_it():
    detokenizer = IncrementalDetokenizer([b"foo", b"ba"])
    assert detokenizer.push([0, 1], trim_bytes=9) == "foo"


def test_unfinished_character_at_the_end_is_one_replacement():
    assert text_of([b"a\xf0\x9f\x99"]) == "a\ufffd"


@given(
    data=st.lists(
        st.one_of(st.sampled_from([f.encode() for f in FRAGMENTS]), st.binary(max_size=4))
    ).map(b"".join),
    cuts=st.lists(st.integers(min_value=0, max_value=60)),
)
def test_deltas_add_up_to_the_one_shot_decode(data, cuts):
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in itertools.pairwise(places)]
    assert text_of(pieces) == data.decode("utf-8", errors="replace")


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_grouping_of_tokens_into_deltas_changes_nothing(size):
    pieces = [bytes([byte]) for byte in "a€ 🙂中é".encode()]
    ids = list(range(len(pieces)))
    groups = [ids[i : i + size] for i in range(0, len(ids), size)]
    assert text_of(pieces, groups=groups) == "a€ 🙂中é"
