"""Known faults about streams."""

from __future__ import annotations

import pytest

from tests.faults.conftest import prompt
from tests.support.fault_model import WIDTHS


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("options", "usage"),
    [(None, 0), ({}, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 6)],
)
def test_h05_usage_comes_only_where_it_is_asked_for(chains, width, options, usage):
    fields = {} if options is None else {"stream_options": options}
    answer = chains(width).post(prompt=prompt("letters"), stream=True, **fields)
    assert answer.completion_tokens == usage
    *earlier, last = answer.chunks
    assert bool(last.get("usage")) is bool(usage)
    assert all(chunk.get("usage") is None for chunk in earlier)


def test_sglang_954_chunks_before_the_usage_carry_null(chains):
    answer = chains(4).post(
        prompt=prompt("count"), stream=True, stream_options={"include_usage": True}
    )
    usage = [chunk["usage"] for chunk in answer.chunks]
    assert len(usage) > 2 and usage[:-1] == [None] * (len(usage) - 1)
    assert answer.completion_tokens == 9


@pytest.mark.parametrize("width", WIDTHS)
def test_h15_every_choice_has_one_finish_chunk_and_nothing_after_it(chains, width):
    """`read` checks the order of chunks; the choices end at one place here, elsewhere below."""
    answer = chains(width).post(prompt=prompt("count"), n=3, stream=True)
    assert [choice["text"] for choice in answer.choices] == ["1 2 3 4 5 6 7 8 "] * 3


def test_ray_52745_and_52746_forty_streams_at_once_all_come_whole(chains):
    bodies = [{"prompt": prompt("count"), "stream": True} for _ in range(40)]
    assert {answer.text for answer in chains(8).post_all(bodies)} == {"1 2 3 4 5 6 7 8 "}
