"""Rounds that are replayed from recordings give the records of plain ones, bit by bit, in every
recipe: all widths, chunks, penalties, scores, copies, answered barriers, a restore."""

from __future__ import annotations

import pytest

from flare_ray.config import EngineConfig
from flare_ray.contracts.shapes import PROMPT_KINDS
from flare_ray.device.graphs.replays import Replays
from flare_ray.device.parallel.groups import SingleGroup
from flare_ray.device.prepare import prepare_rank
from tests.recipes.test_prefix_reuse import RECIPES
from tests.support import deepseek_tiny, qwen_tiny
from tests.support.mixed_rounds import GREEDY, PLAIN, SPECIAL, play
from tests.support.plain_rounds import run_plainly
from tests.support.scripted.harness import Driver

MIXES = ((PLAIN, SPECIAL), (PLAIN, PLAIN), (GREEDY, GREEDY))
PACKED = {"expert_weights": "packed", "tables": "disk"}
KEPT = {
    "deepseek, kept as stored": lambda folder: deepseek_tiny.write_quantised(folder, "packed"),
    "qwen, kept as stored": lambda folder: qwen_tiny.write_quantised(folder, "qwen-fused"),
}
TIMES = 3
"""A round is plain when it is first met and recorded the second time."""


@pytest.mark.parametrize("name", [*sorted(RECIPES), *KEPT])
def test_recorded_rounds_give_the_records_of_plain_ones(name, tmp_path, monkeypatch):
    config = EngineConfig(
        checkpoint=str({**RECIPES, **KEPT}[name](tmp_path / "checkpoint")),
        device="cpu",
        dtype="float32",
        concurrency=2,
        context_tokens=512,
        prefill_tokens=64,
        speculation={"draft_tokens": 3},
        **(PACKED if name in KEPT else {}),
    )
    replayed, run = [], Replays.run

    def counted(self, key, function, *, after=None):
        called = []
        result = run(self, key, lambda: called.append(1) or function(), after=after)
        replayed.append(not called)
        return result

    found = []
    for method in (counted, run_plainly):
        monkeypatch.setattr(Replays, "run", method)
        driver = Driver(prepare_rank(config, SingleGroup()))
        shapes = (s for s in driver.manifest.shapes if s.kind not in PROMPT_KINDS)
        widths = sorted({s.verify_width for s in shapes})
        for _ in range(TIMES):
            play(driver, widths, MIXES)
        found.append([(reply.rows, reply.scores) for (reply,) in driver.replies])
        driver.ranks[0].close()
    assert found[0] == found[1]
    assert sum(replayed) > len(replayed) / 3
