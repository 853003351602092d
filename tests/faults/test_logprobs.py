"""Known faults about log-probabilities (contract: K4)."""

from __future__ import annotations

import math

import pytest

from tests.faults.conftest import prompt
from tests.support.fault_model import WIDTHS, fixed
from tests.support.matrix.model import SCRIPT, TOKENS, checkpoint, own_logprobs
from tests.support.matrix.run import Engine

PROMPT = (3, 1, 8, 0, 2, 5)
ROUNDING = 2e-5


@pytest.fixture(scope="module", params=[1, 6])
def random_table(request, tmp_path_factory):
    engine = Engine(checkpoint(tmp_path_factory.mktemp("micro"), SCRIPT), **fixed(request.param))
    yield engine
    engine.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_h10_every_accepted_token_has_its_entry(chains, width, stream):
    answer = chains(width).post(
        prompt=prompt("loop"), logprobs=2, max_tokens=12, stream=stream, temperature=0
    )
    found = answer.choices[0]["logprobs"]
    assert {len(values) for values in found.values()} == {12}
    assert "".join(found["tokens"]) == answer.text
    for chunk in answer.chunks:
        part = chunk["choices"][0]
        assert "".join(part["logprobs"]["tokens"]) == part["text"]


def test_trtllm_18401_logprobs_with_drafts_do_not_hang(chains):
    bodies = [{"prompt": prompt("loop"), "logprobs": 20, "max_tokens": 40}] * 12
    assert all(len(a.choices[0]["logprobs"]["tokens"]) == 40 for a in chains(8).post_all(bodies))


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_h11_filtered_alternatives_are_finite_numbers(tmp_path, mode):
    """`read` refuses constants that JSON does not have."""
    path = checkpoint(tmp_path, SCRIPT)
    engine = Engine(path, **fixed(4), sampling={"logprobs": mode})
    try:
        answer = engine.post(
            prompt=list(PROMPT), top_p=0.01, logprobs=5, max_tokens=6, ignore_eos=True, seed=1
        )
    finally:
        engine.close()
    best = answer.choices[0]["logprobs"]["top_logprobs"]
    lowest = [min(entry.values()) for entry in best]
    assert answer.status == 200 and all(math.isfinite(value) for value in lowest)
    assert set(lowest) == {-9999.0} if mode == "processed" else min(lowest) > -20
    own = answer.choices[0]["logprobs"]["token_logprobs"]
    assert (max(map(abs, own)) < 1e-6) is (mode == "processed")  # only one token is left


def teacher_forced(tokens):
    return [None] + [own_logprobs(tokens[:i], ())[tokens[i]] for i in range(1, len(tokens))]


def assert_close(found, expected):
    assert found[0] is None and len(found) == len(expected)
    assert all(abs(a - b) < ROUNDING for a, b in zip(found[1:], expected[1:], strict=True)), (
        found,
        expected,
    )


def test_h12_echo_scores_the_prompt_and_generates_nothing(random_table):
    answer = random_table.post(prompt=list(PROMPT), max_tokens=0, echo=True, logprobs=1)
    assert answer.text == "".join(TOKENS[token] for token in PROMPT)
    assert answer.completion_tokens == 0
    assert_close(answer.choices[0]["logprobs"]["token_logprobs"], teacher_forced(PROMPT))


def test_h12_prompt_logprobs_have_one_null(random_table):
    answer = random_table.post(prompt=list(PROMPT), max_tokens=0, prompt_logprobs=1)
    entries = answer.choices[0]["prompt_logprobs"]
    own = [e and e[str(t)]["logprob"] for t, e in zip(PROMPT, entries, strict=True)]
    assert_close(own, teacher_forced(PROMPT))


def test_h12_prompt_is_scored_although_the_prefix_cache_holds_it(random_table):
    """A prompt of several pages and chunks, known before, scored, and known again."""
    long = [(i * i + 3 * i) % 14 for i in range(150)]
    fields = {"prompt": long, "temperature": 0, "max_tokens": 3}
    plain = random_table.post(**fields)
    again = random_table.post(**fields)
    assert again.cached_tokens > 64
    scored = random_table.post(**fields, echo=True, logprobs=0)
    found = scored.choices[0]["logprobs"]["token_logprobs"]
    assert_close(found[: len(long)], teacher_forced(long))
    assert scored.cached_tokens == 0
    assert scored.text == "".join(TOKENS[t] for t in long) + plain.text
    assert random_table.post(**fields).text == again.text == plain.text


def test_sglang_28798_and_28794_more_alternatives_than_tokens_are_those_there_are(random_table):
    answer = random_table.post(prompt=list(PROMPT), logprobs=20, max_tokens=4, ignore_eos=True)
    assert answer.status == 200
    assert all(len(entry) == len(TOKENS) for entry in answer.choices[0]["logprobs"]["top_logprobs"])
    assert random_table.post(prompt=list(PROMPT), logprobs=21).error["param"] == "logprobs"


def test_tpu_inference_3572_logprobs_of_zero_alternatives(chains):
    answer = chains(4).post(prompt=prompt("letters"), logprobs=0)
    found = answer.choices[0]["logprobs"]
    assert answer.status == 200 and found["top_logprobs"] == [{}] * 5
    assert found["token_logprobs"] == [0.0] * 5
