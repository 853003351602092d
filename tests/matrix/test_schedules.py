"""The reproducible mode through whole engines: widths, batches, neighbours, queue depths, ranks,
prefix reuse and preemptions change no text (contract: S8)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flare_ray.metrics import names
from tests.support.matrix.model import SCRIPT, WRONG, checkpoint
from tests.support.matrix.run import Engine

pytestmark = pytest.mark.timeout(1800)

TOKENS_EACH = 225
POOL_TOKENS = 384
"""Six pages: two requests are let in on three each and come to need four."""
SEEDS = 4
LAWS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "bad_words": ["cd"]},
    {"temperature": 1.4, "logit_bias": {"2": 1.0}, "min_tokens": 20},
)
TIGHT = {"context_tokens": 256, "page_pool_tokens": POOL_TOKENS}


@dataclass(frozen=True)
class Way:
    """An engine that texts are made by."""

    name: str
    settings: dict[str, Any]
    wrong: bool = False

    def __str__(self) -> str:
        return self.name


def fixed(width: int) -> dict[str, Any]:
    return {"draft_tokens": 7, "policy": "fixed", "fixed_width": width}


WAYS = (
    Way("adaptive", {"speculation": {"draft_tokens": 7}, **TIGHT, "queue_depth": 2}),
    Way("width8-tp2", {"speculation": fixed(8), **TIGHT, "tensor_parallel_size": 2}),
    Way("width3", {"speculation": fixed(3), **TIGHT, "concurrency": 3}),
    Way("wrong-drafts", {"speculation": fixed(6), **TIGHT, "queue_depth": 2}, wrong=True),
    Way("no-cache", {"speculation": fixed(5), **TIGHT, "prefix_cache": {"enabled": False}}),
)


def body_of(seed: int, law: dict[str, Any]) -> dict[str, Any]:
    """A request whose prompt, law and seed follow from its number."""
    prompt = [(seed + 3 * i * i) % 14 for i in range(5 + 6 * (seed % 4))]
    base = {"prompt": prompt, "temperature": 0.9, "max_tokens": TOKENS_EACH, "ignore_eos": True}
    return {**base, "seed": seed, **law}


def neighbour(dice: random.Random) -> dict[str, Any]:
    """Company of either mode."""
    return {
        "prompt": [dice.randrange(14) for _ in range(dice.randint(1, 40))],
        "max_tokens": dice.choice([3, 60, 200]),
        "seed": dice.getrandbits(32),
        "reproducible": dice.random() < 0.5,
        "temperature": dice.choice([0, 1]),
        "logprobs": dice.choice([None, 2]),
    }


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> dict[tuple[int, int], str]:
    """Every text alone: width one, one request at a time, no drafter, pages to spare."""
    path = checkpoint(tmp_path_factory.mktemp("alone"), SCRIPT)
    engine = Engine(path, speculation={"families": "ordinary"}, concurrency=1)
    try:
        keys = [(seed, law) for seed in range(SEEDS) for law in range(len(LAWS))]
        answers = engine.post_all([body_of(seed, LAWS[law]) for seed, law in keys])
    finally:
        engine.close()
    found = {key: answer.text for key, answer in zip(keys, answers, strict=True)}
    assert len(set(found.values())) == len(found)
    return found


SCHEDULES = [pytest.param(1, way, id=f"{way}-once") for way in WAYS[:2]] + [
    pytest.param(200, way, id=f"{way}-two-hundred", marks=pytest.mark.slow) for way in WAYS
]


@pytest.mark.parametrize(("schedules", "way"), SCHEDULES)
def test_random_schedules_with_preemptions_give_one_text_per_seed(
    tmp_path: Path, schedules: int, way: Way, texts
):
    """Five ways of 200 schedules: a thousand, of ten thousand texts."""
    dice = random.Random(f"{way}")
    engine = Engine(checkpoint(tmp_path, WRONG if way.wrong else SCRIPT), **way.settings)
    try:
        for _ in range(schedules):
            keys = [(dice.randrange(SEEDS), dice.randrange(len(LAWS))) for _ in range(10)]
            company = [neighbour(dice) for _ in range(3)]
            order = [*enumerate(body_of(seed, LAWS[law]) for seed, law in keys)]
            mixed = [*order, *((-1, body) for body in company)]
            dice.shuffle(mixed)
            answers = engine.post_all([body for _, body in mixed])
            for (place, _), answer in zip(mixed, answers, strict=True):
                assert answer.status == 200
                assert place < 0 or answer.text == texts[keys[place]], (way, keys[place])
        assert preemptions(engine) > 0
    finally:
        engine.close()


def preemptions(engine: Engine) -> float:
    samples = engine.core.snapshot().samples
    return sum(sample.value for sample in samples if sample.name == names.PREEMPTIONS.name)
