"""The benchmark of reproducible acceptance at its smallest size."""

from benchmarks.sampling.reproducible import (
    CHECKPOINT,
    ENGINE,
    measure_pair,
    with_seeds,
)
from benchmarks.serving.acceptance import AcceptanceJob
from benchmarks.serving.workload import PROMPTS, load_prompts


def test_both_modes_are_measured_on_the_same_prompts():
    loaded = load_prompts(PROMPTS, CHECKPOINT)
    prompts = {name: with_seeds(loaded[name][:1], 2) for name in ("story", "math")}
    job = AcceptanceJob(
        engine=ENGINE,
        checkpoint=CHECKPOINT,
        prompts=prompts,
        depth=3,
        max_tokens=12,
        temperature=None,
    )
    pair = measure_pair(job)
    assert set(pair.plain) == set(pair.reproducible) == set(prompts)
    assert all(part.rounds and part.offered for part in pair.plain.values())
    assert 0.3 < pair.ratio < 3.0
    assert set(pair.report()["by_category"]) == set(prompts)


def test_every_seed_of_a_prompt_has_a_place_of_its_own():
    prompts = load_prompts(PROMPTS, CHECKPOINT)["math"][:3]
    seeded = with_seeds(prompts, 2)
    assert [prompt.ids for prompt in seeded] == [prompt.ids for prompt in prompts] * 2
    assert len({prompt.place for prompt in seeded}) == 6
    assert len({(prompt.ids, prompt.seed) for prompt in seeded}) == 6
