"""Whole engines of every recipe that copy drafts write what one-token execution writes
(contract: H2, H3, T2, K3, S8)."""

from __future__ import annotations

import pytest

from flare_ray.config import SpeculationConfig
from flare_ray.contracts.messages import Finished
from flare_ray.contracts.request import SamplingSpec
from flare_ray.controller.loop import Controller
from flare_ray.metrics.recorder import Recorder
from tests.recipes.test_engine_under_pressure import EVERY_RECIPE, RECIPES
from tests.support.engine_machine import (
    DRAFTS,
    GREEDY,
    PENALISED,
    DirectChannel,
    Engine,
    submit,
    tokens_of,
)
from tests.support.fake_manifest import CollectingOutput

PROMPT = (5, 9, 2, 9, 7, 1)
BUDGET = 40
REPRODUCIBLE = SamplingSpec(
    temperature=0.8, top_k=0, top_p=0.95, min_p=0.0, seed=7, reproducible=True
)
WORKS = [(PROMPT, BUDGET, sampling) for sampling in (GREEDY, PENALISED, REPRODUCIBLE)]
COPIES = {"history_drafts": True, "request_drafts": True}
ARMS = {
    "fixed": {**COPIES, "policy": "fixed"},
    "adaptive": COPIES,
    "alone": {**COPIES, "policy": "fixed", "learned_drafts": False},
}


def answers(engine: Engine, depth: int, **speculation) -> tuple[list[tuple[int, ...]], int]:
    """Texts of the works side by side, twice, and how many copies passed."""
    rank, _ = engine.rank(engine.manifest)
    settings = SpeculationConfig(families="speculative", **speculation)
    controller = Controller(
        rank.manifest,
        engine.config.model_copy(update={"queue_depth": depth, "speculation": settings}),
        channel=DirectChannel(rank, depth),
        output=CollectingOutput(),
        token_bytes=[bytes([token % 256]) for token in range(engine.manifest.vocab_size)],
        recorder=Recorder("engine", "copies"),
    )
    texts, accepted = [], 0
    for turn in range(2):
        names = [f"{turn}-{place}" for place in range(len(WORKS))]
        for name, work in zip(names, WORKS, strict=True):
            submit(controller, name, work)
        while controller.stats().pending_work:
            controller.step(0.0)
        controller.step(0.0)
        for name in names:
            end = controller._publisher._output.items(name)[-1]
            assert isinstance(end, Finished), end
            texts.append(tokens_of(controller, name))
            accepted += end.copies_accepted
    controller.check_integrity()
    return texts, accepted


@pytest.fixture(scope="module", params=EVERY_RECIPE)
def engine(request, tmp_path_factory) -> Engine:
    return RECIPES[request.param](tmp_path_factory.mktemp("checkpoint"))


def test_engines_that_copy_write_what_one_token_execution_writes(engine):
    expected, _ = answers(engine, 1, draft_tokens=0)
    for place, (name, speculation) in enumerate(ARMS.items()):
        found, accepted = answers(engine, 1 + place % 2, draft_tokens=DRAFTS, **speculation)
        assert found == expected, name
        # Which widths an adaptive policy takes follows from the machine's time.
        assert accepted > BUDGET * (name != "adaptive"), name
