"""Whole engines of one process over captured programs: texts are those of eager float32 programs
(contract: G4, G6, T6, M7)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from flare_ray.actors.inprocess import start_inprocess
from flare_ray.config import EngineConfig
from flare_ray.contracts.messages import Finished
from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from tests.actors.test_core import Consumer
from tests.gpu.captured import config_of
from tests.support.served_glm import served_glm

pytestmark = pytest.mark.gpu

GREEDY = {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
SAMPLED = {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0}
TEXT = "the cache keeps what the rounds before have made of it, and more. " * 4
MICRO_TEXT = tuple(TEXT.encode())
PROMPTS = {"short": 3, "page": 64, "beyond": 70, "long": 200}
MAX_TOKENS = 48
ENGINES = {
    "fixed": {"speculation": {"policy": "fixed"}},
    "fixed, two queued": {"speculation": {"policy": "fixed"}, "queue_depth": 2},
    "adaptive": {},
    "adaptive, two queued": {"queue_depth": 2},
    "no drafts": {"speculation": {"families": "ordinary"}, "queue_depth": 2},
    "tiers": {
        "prefix_cache": {"device_bytes": 1 << 20, "host_bytes": 64 << 20},
        "queue_depth": 2,
        "page_pool_tokens": 1024,
    },
}


DEMO = Path(__file__).parents[2] / "deployments" / "demo" / "glm"
DEMO_TEXT = (
    "You are given a list of numbers and asked for their sum. Write a function in Python that "
    "returns it, then explain each line. def total(values): result = 0; for value in values: "
    "result += value. The list may be empty, in which case the sum is zero. Numbers are integers "
    "between one and a hundred, and the list holds at most a thousand of them. Please answer with "
    "the code first and the explanation after it."
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return served_glm(tmp_path_factory.mktemp("micro") / "glm")


def requests(turn: int, text: Sequence[int]) -> list[GenerationRequest]:
    """Greedy and position-keyed requests, whose texts follow from nothing but themselves."""
    made = []
    for name, length in PROMPTS.items():
        for kind, values in (("greedy", GREEDY), ("sampled", SAMPLED)):
            made.append(
                GenerationRequest(
                    request_id=f"{name}-{kind}-{turn}",
                    prompt_tokens=tuple(text[:length]),
                    sampling=SamplingSpec(**values, seed=length, reproducible=kind == "sampled"),
                    max_tokens=MAX_TOKENS,
                )
            )
    return made


def texts(config: EngineConfig, text: Sequence[int] = MICRO_TEXT) -> dict[str, list[int]]:
    """Everything twice, so that the second turn continues from kept prefixes."""
    core = start_inprocess(config)
    found: dict[str, list[int]] = {}
    try:
        for turn in range(2):
            consumers = {request.request_id: Consumer() for request in requests(turn, text)}
            for request in requests(turn, text):
                core.submit(request, consumers[request.request_id])
            for name, consumer in consumers.items():
                end = consumer.end()
                assert isinstance(end, Finished), end
                found[name] = consumer.tokens
    finally:
        core.shutdown(0.0)
    return found


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, list[int]]:
    return texts(config_of(folder, eager=True))


@pytest.mark.parametrize("name", ENGINES)
def test_captured_engine_says_what_an_eager_one_says(folder, expected, name):
    found = texts(config_of(folder, **ENGINES[name]))
    assert found == expected


def test_turns_of_one_request_are_equal(expected):
    assert all(expected[name] == expected[name[:-1] + "1"] for name in expected if name[-1] == "0")


def test_captured_engine_says_what_the_cpu_says(folder, expected):
    on_cpu = texts(config_of(folder, eager=True, device="cpu", debug_checks=False))
    assert on_cpu == expected


@pytest.fixture(scope="module")
def demo_text() -> tuple[int, ...]:
    tokens = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(DEMO_TEXT * 3).ids
    assert len(tokens) >= max(PROMPTS.values())
    return tuple(tokens)


@pytest.fixture(scope="module")
def demo_expected(demo_text) -> dict[str, list[int]]:
    return texts(config_of(DEMO, eager=True), demo_text)


@pytest.mark.parametrize("name", ["fixed, two queued", "adaptive"])
def test_captured_demo_says_what_an_eager_one_says(demo_text, demo_expected, name):
    assert texts(config_of(DEMO, **ENGINES[name]), demo_text) == demo_expected


def test_demo_on_a_device_says_what_it_says_on_the_cpu(demo_text, demo_expected):
    on_cpu = texts(config_of(DEMO, eager=True, device="cpu", debug_checks=False), demo_text)
    differing = [name for name in on_cpu if on_cpu[name] != demo_expected[name]]
    assert not differing
