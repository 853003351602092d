"""The benchmark of reproducible acceptance at its smallest size."""

from benchmarks.sampling.reproducible import (
    CHECKPOINT,
    ENGINE,
    Measured,
    measure_pair,
)
from benchmarks.serving.acceptance import AcceptanceJob
from benchmarks.serving.workload import PROMPTS, load_prompts


def test_both_modes_are_measured_on_the_same_prompts():
    loaded = load_prompts(PROMPTS, CHECKPOINT)
    prompts = {name: loaded[name][:2] for name in ("story", "math")}
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
    found = Measured(pair, pair).reproducible_acceptance_ratio
    assert found == pair.ratio and 0.3 < found < 3.0
