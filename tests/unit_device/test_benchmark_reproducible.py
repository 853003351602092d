"""The benchmark of reproducible acceptance at its smallest size."""

from benchmarks.sampling.reproducible import measure


def test_both_modes_are_measured_on_the_same_prompts():
    found = measure(per_category=1, max_tokens=12)
    for pair in (found.defaults, found.unfiltered):
        assert set(pair.plain) == set(pair.reproducible) and len(pair.plain) == 10
        assert all(part.rounds and part.offered for part in pair.plain.values())
    assert 0.5 < found.reproducible_acceptance_ratio < 2.0
