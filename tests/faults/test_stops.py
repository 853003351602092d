"""Known faults about where an output ends (contract: K2, T3). Every test runs at several widths."""

from __future__ import annotations

import pytest

from tests.faults.conftest import prompt
from tests.support.fault_model import IDS, WIDTHS

at_every_width = pytest.mark.parametrize("width", WIDTHS)


@at_every_width
@pytest.mark.parametrize(("stop", "shown"), [("CDE", "AB"), ("CDX", "ABCDE")])
def test_h02_no_part_of_a_stop_is_streamed_and_held_text_is_released(chains, width, stop, shown):
    answer = chains(width).post(prompt=prompt("letters"), stop=[stop], stream=True)
    assert (answer.text, answer.choices[0]["finish_reason"]) == (shown, "stop")
    streamed = ""
    for chunk in answer.chunks:
        streamed += chunk["choices"][0]["text"]
        assert shown.startswith(streamed)


@at_every_width
@pytest.mark.parametrize(("include", "shown"), [(False, "foo"), (True, "foo;")])
def test_h03_stop_that_ends_inside_a_token_is_matched_there(chains, width, include, shown):
    answer = chains(width).post(
        prompt=prompt("semicolon"), stop=";", include_stop_str_in_output=include
    )
    assert (answer.text, answer.choices[0]["stop_reason"]) == (shown, ";")


@at_every_width
@pytest.mark.parametrize(
    "stop", [{"stop": ["4"]}, {"stop_token_ids": [IDS["4 "]]}, {"stop_token_sequences": [[]]}]
)
def test_h04_stops_inside_a_long_accepted_draft_give_one_text_and_one_count(chains, width, stop):
    if "stop_token_sequences" in stop:
        stop = {"stop_token_sequences": [[IDS["4 "], IDS["5 "]]]}
    answer = chains(width).post(prompt=prompt("count"), **stop)
    counted = 5 if "stop_token_sequences" in stop else 4
    assert (answer.text, answer.completion_tokens) == ("1 2 3 ", counted)


@at_every_width
@pytest.mark.parametrize("budget", range(1, 10))
def test_h06_accepted_drafts_never_pass_max_tokens(chains, width, budget):
    answer = chains(width).post(prompt=prompt("count"), max_tokens=budget, ignore_eos=True)
    assert answer.completion_tokens == budget
    assert answer.choices[0]["finish_reason"] == "length"
    assert answer.text == "".join(f"{n} " for n in range(1, min(budget, 8) + 1))


@at_every_width
@pytest.mark.parametrize(("ignore", "shown", "counted"), [(False, "ab", 3), (True, "abcd", 5)])
def test_h07_nothing_follows_an_eos_inside_an_accepted_block(chains, width, ignore, shown, counted):
    answer = chains(width).post(prompt=prompt("early"), ignore_eos=ignore, max_tokens=5, logprobs=0)
    assert (answer.text, answer.completion_tokens) == (shown, counted)
    tokens = [token for token in answer.choices[0]["logprobs"]["tokens"] if token]
    assert "".join(tokens) == shown


@at_every_width
def test_koboldcpp_1276_no_text_follows_the_end(chains, width):
    answer = chains(width).post(prompt=prompt("letters"), stream=True)
    assert (answer.text, answer.completion_tokens) == ("ABCDE", 0)  # no usage asked for


@at_every_width
def test_vllm_57052_token_prompts_obey_stops_too(chains, width):
    stopped = chains(width).post(prompt=prompt("count"), stop=["6"], stop_token_ids=[IDS["8 "]])
    assert stopped.text == "1 2 3 4 5 "


@at_every_width
def test_vllm_46118_special_tokens_among_the_drafts_do_no_harm(chains, width):
    """The drafter proposes the end and what lies behind it."""
    answers = chains(width).post_all([{"prompt": prompt("early")}, {"prompt": prompt("letters")}])
    assert [answer.text for answer in answers] == ["ab", "ABCDE"]


@pytest.mark.parametrize("width", [1, 8])
def test_probe01_max_tokens_of_nothing_one_and_beyond_the_context(chains, width):
    engine = chains(width)
    nothing = engine.post(prompt=prompt("letters"), max_tokens=0)
    assert (nothing.status, nothing.text, nothing.completion_tokens) == (200, "", 0)
    one = engine.post(prompt=prompt("letters"), max_tokens=1)
    assert (one.text, one.choices[0]["finish_reason"]) == ("A", "length")
    beyond = engine.post(prompt=prompt("letters"), max_tokens=1 << 20)
    assert (beyond.status, beyond.error["param"]) == (400, "max_tokens")
