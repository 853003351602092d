"""The whole engine of one process over a micro checkpoint: controller, rank, block drafts."""

from __future__ import annotations

import itertools

import pytest

from flare_ray.actors.inprocess import start_inprocess
from flare_ray.config import EngineConfig
from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from flare_ray.controller.verification.log import Chosen, read_log
from flare_ray.errors import ConfigError
from tests.actors.test_core import Consumer
from tests.support.deepseek_tiny import write_served

PROMPTS = (tuple(range(40, 60)), tuple(range(40, 120)), (70, 71, 72))
TOKENS = 30
GREEDY = SamplingSpec(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_served(tmp_path_factory.mktemp("served"))


def generated(folder, **settings) -> list[list[int]]:
    """Tokens of requests that share the engine, the first one asked twice."""
    config = EngineConfig(
        checkpoint=str(folder),
        device="cpu",
        dtype="float32",
        concurrency=2,
        context_tokens=256,
        prefill_tokens=32,
        **settings,
    )
    core = start_inprocess(config)
    names = itertools.count()
    try:
        consumers = [Consumer() for _ in range(len(PROMPTS) + 1)]
        for prompt, consumer in zip((*PROMPTS, PROMPTS[1]), consumers, strict=True):
            request = GenerationRequest(
                request_id=f"r{next(names)}",
                prompt_tokens=prompt,
                sampling=GREEDY,
                max_tokens=TOKENS,
                reply_to="",
                ignore_eos=True,
            )
            core.submit(request, consumer)
        for consumer in consumers:
            assert consumer.end().reason == "length"
        return [consumer.tokens for consumer in consumers]
    finally:
        core.shutdown(0.0)


@pytest.fixture(scope="module")
def plain(folder):
    return generated(folder, speculation={"families": "ordinary"})


FIXED = {"policy": "fixed", "fixed_width": 8}


@pytest.mark.parametrize(
    ("depth", "speculation"),
    [
        (1, {}),
        (2, FIXED),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(1, FIXED, marks=pytest.mark.slow),
    ],
)
def test_drafting_in_blocks_changes_no_greedy_text(folder, plain, depth, speculation):
    assert generated(folder, queue_depth=depth, speculation=speculation) == plain
    assert plain[1] == plain[3] and len(plain[0]) == TOKENS


def test_widths_between_verify_a_prefix_of_the_whole_block(folder, plain):
    speculation = {"widths": [1, 3, 8], "policy": "fixed", "fixed_width": 3}
    assert generated(folder, speculation=speculation) == plain


def test_packed_rounds_chosen_by_the_policy_change_no_greedy_text(folder, plain, tmp_path):
    log = tmp_path / "decisions.jsonl"
    speculation = {"packed_rows": [2, 4], "decision_log": str(log)}
    assert generated(folder, speculation=speculation) == plain
    offered = {
        entry.decision.shape.packed_capacity for entry in read_log(log) if isinstance(entry, Chosen)
    }
    compared = {
        shape.packed_capacity
        for entry in read_log(log)
        if isinstance(entry, Chosen)
        for shape in entry.decision.candidates
    }
    assert compared >= {0, 2, 4, 8}, "packings of one and of two lanes were candidates"
    assert offered - {0}, "some packed round ran"


def test_packed_rows_beyond_the_widest_round_are_refused_by_name(folder):
    with pytest.raises(ConfigError, match="packed_rows"):
        generated(folder, speculation={"packed_rows": [8]})
