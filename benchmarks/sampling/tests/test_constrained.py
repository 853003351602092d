"""The benchmark at its smallest size."""

import jsonschema
import pytest

from benchmarks.sampling import constrained

pytest.importorskip("xgrammar", reason="the extra `grammar` is not installed")


@pytest.mark.slow
def test_smallest_run_gives_every_ratio_and_only_valid_answers():
    tallies = constrained.measure(constrained.load_tasks(4), passes=1)
    metrics = constrained.metrics_of(tallies)
    for bound in constrained.BOUNDS[:3]:
        assert isinstance(metrics[bound.metric], float)
    assert tallies["schema"].valid == tallies["schema"].finished > 0


def test_schema_of_an_example_admits_it_and_nothing_else():
    example = {"a": 1, "b": [{"c": "x"}], "d": None}
    schema = constrained.schema_of(example)
    jsonschema.validate(example, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**example, "e": 1}, schema)
