"""Log-probabilities and reproducible texts of a real recipe, through `LLM`: prompts against rounds,
widths and ranks against each other (contract: K4, S8)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flare_ray import LLM, SamplingParams
from flare_ray.cli.outputs import RequestOutput
from tests.support.served_glm import engine_settings

pytestmark = pytest.mark.timeout(300)

PROMPT = "12 owls on a long road. 12 owls on a long road. "
TOLERANCE = 2e-4
"""Between chunks of a prompt, rounds of any width and ranks, which sum in another order."""
LENGTH = 90
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=3)
SEEDED = [
    SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(6)
]
WAYS = {
    "one": (1, {"families": "ordinary"}),
    "five": (1, {"draft_tokens": 4, "policy": "fixed", "fixed_width": 5}),
    "ranks": (2, {"draft_tokens": 7, "policy": "fixed", "fixed_width": 8}),
}


@pytest.fixture(scope="module", params=list(WAYS))
def llm(request, checkpoint) -> Iterator[LLM]:
    ranks, speculation = WAYS[request.param]
    settings = engine_settings(
        checkpoint, context_tokens=512, tensor_parallel_size=ranks, speculation=speculation
    )
    with LLM(**settings) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(checkpoint) -> tuple[RequestOutput, list[RequestOutput]]:
    """Greedy and seeded outputs at width one, one request at a time."""
    settings = engine_settings(
        checkpoint, context_tokens=512, concurrency=1, speculation={"families": "ordinary"}
    )
    with LLM(**settings) as llm:
        [greedy] = llm.generate(PROMPT, GREEDY)
        return greedy, [llm.generate(PROMPT, params)[0] for params in SEEDED]


def close(found, expected) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(abs(a.logprob - b.logprob) < TOLERANCE for a, b in pairs)


def test_emitted_logprobs_equal_one_token_execution(llm, plain):
    [output] = llm.generate(PROMPT, GREEDY)
    assert output.token_ids == plain[0].token_ids and len(output.logprobs) == LENGTH
    assert close(output.logprobs, plain[0].logprobs)
    assert all(
        score.top_ids[0] == token
        for token, score in zip(output.token_ids, output.logprobs, strict=True)
    )


def test_prompt_logprobs_equal_those_of_the_same_tokens_when_generated(llm, plain):
    """The output as a prompt: several chunks, with and without the prefix in the cache."""
    whole = [*llm.encode(PROMPT), *plain[0].token_ids]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    for _ in range(2):
        [output] = llm.generate([whole], params)
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(whole)
        assert close(output.prompt_logprobs[-LENGTH:], plain[0].logprobs)
        llm.generate([whole], SamplingParams(temperature=0, max_tokens=1))


def test_a_seed_has_one_text_for_every_width_and_number_of_ranks(llm, plain):
    outputs = llm.generate([PROMPT] * len(SEEDED), SEEDED)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain[1]]
    assert len({output.token_ids for output in outputs}) == len(SEEDED)


def test_scores_are_absent_where_nobody_asks(llm):
    [output] = llm.generate("so ", SamplingParams(max_tokens=2))
    assert output.logprobs is None and output.prompt_logprobs is None
