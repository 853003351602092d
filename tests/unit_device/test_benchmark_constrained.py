"""The benchmark of constrained output at its smallest size."""

import pytest

from benchmarks.sampling.constrained import load_tasks, measure, metrics_of

pytest.importorskip("xgrammar", reason="the extra `grammar` is not installed")


def test_all_arms_answer_the_same_prompts_and_valid_documents_come_of_schemas():
    metrics = metrics_of(measure(load_tasks(4), passes=1))
    lanes = metrics["lanes"]
    assert set(lanes) == {"free", "schema", "half", "narrow", "free_half"}
    for arm in ("schema", "narrow"):
        assert 0 < lanes[arm]["finished"] == lanes[arm]["valid"]
    assert lanes["narrow"]["emitted_per_round"] <= 1.0 < lanes["schema"]["emitted_per_round"]
    assert all(metrics[name] > 0 for name in metrics if name != "lanes")
