"""Eight requests through a page pool for three, in a real engine: all finish with the text that
each gets alone (contract: M7), greedy, penalised and sampled; at both queue depths."""

import time

import msgspec
import pytest

from flare_ray.actors.inprocess import start_inprocess
from flare_ray.config import EngineConfig
from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from tests.actors.test_core import Consumer
from tests.support.scripted_engine import scripted_config
from tests.support.served_glm import served_glm

CONTEXT = 256
REQUESTS = 8
BUDGET = 170
LIMIT_S = 20.0
GREEDY = SamplingSpec(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed=0)
SAMPLINGS = (
    GREEDY,
    msgspec.structs.replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.5),
    msgspec.structs.replace(GREEDY, temperature=0.8, top_k=0, seed=5),
    msgspec.structs.replace(GREEDY, temperature=0.8, top_k=0, seed=6, reproducible=True),
)
FIXED = {"families": "speculative", "draft_tokens": 2, "policy": "fixed"}
"""One width, so that sampled texts can be compared at all."""


def requests() -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"r{number}",
            prompt_tokens=tuple(10 + (7 * number + i * i) % 150 for i in range(40 + number)),
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
            max_tokens=BUDGET,
            ignore_eos=True,
        )
        for number in range(REQUESTS)
    ]


def texts(config: EngineConfig, *, together: bool) -> tuple[list[list[int]], float]:
    """Tokens of every request, and how many preemptions it took."""
    core = start_inprocess(config)
    try:
        consumers = [Consumer() for _ in range(REQUESTS)]
        for consumer, request in zip(consumers, requests(), strict=True):
            core.submit(request, consumer)
            if not together:
                consumer.end()
        if together:
            assert [consumer.end().reason for consumer in consumers] == ["length"] * REQUESTS
        # pages of the last one return when the round behind its end has drained
        until = time.monotonic() + LIMIT_S
        while (stats := core.stats()).free_pages < stats.total_pages:
            assert time.monotonic() < until, stats
            time.sleep(0.01)
        samples = core.snapshot().samples
        preemptions = sum(s.value for s in samples if s.name == "flare_preemptions")
        return [consumer.tokens for consumer in consumers], preemptions
    finally:
        core.shutdown(0.0)


@pytest.fixture(scope="module", params=["scripted", "glm-5.3-flash"])
def configure(request, checkpoint, tmp_path_factory):
    """Function that configures an engine of the recipe."""
    settings = {"context_tokens": CONTEXT, "concurrency": REQUESTS, "debug_checks": True}
    if request.param == "scripted":
        return lambda **fields: scripted_config(checkpoint, speculation=FIXED, **settings, **fields)
    folder = served_glm(tmp_path_factory.mktemp("glm"))
    return lambda **fields: EngineConfig(
        checkpoint=str(folder),
        device="cpu",
        dtype="float32",
        prefill_tokens=64,
        speculation=FIXED,
        **settings,
        **fields,
    )


@pytest.fixture(scope="module")
def alone(configure) -> list[list[int]]:
    tokens, preemptions = texts(configure(prefix_cache={"enabled": False}), together=False)
    assert preemptions == 0
    return tokens


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_eight_requests_through_a_pool_for_three_get_the_texts_that_they_get_alone(
    configure, alone, queue_depth
):
    config = configure(page_pool_tokens=3 * CONTEXT, queue_depth=queue_depth)
    tokens, preemptions = texts(config, together=True)
    assert preemptions > 0
    assert tokens == alone
