"""Instruments: values, labels, snapshots."""

import msgspec
import pytest

from flare_ray.errors import ContractViolation
from flare_ray.metrics import names
from flare_ray.metrics.recorder import Recorder, Snapshot


def sample_of(recorder, series, *labels):
    found = [s for s in recorder.snapshot().samples if (s.name, s.labels) == (series.name, labels)]
    assert len(found) == 1
    return found[0]


def test_counter_adds_up_and_one_handle_serves_equal_labels():
    recorder = Recorder("engine", "e1")
    recorder.counter(names.REQUESTS_FAILED, "cancelled").add()
    recorder.counter(names.REQUESTS_FAILED, "cancelled").add(2)
    recorder.counter(names.REQUESTS_FAILED, "deadline").add(5)
    assert sample_of(recorder, names.REQUESTS_FAILED, "cancelled").value == 3


def test_gauge_keeps_the_last_value():
    recorder = Recorder("engine", "e1")
    recorder.gauge(names.PAGES_FREE).set(4)
    recorder.gauge(names.PAGES_FREE).set(2)
    assert sample_of(recorder, names.PAGES_FREE).value == 2


@pytest.mark.parametrize(("value", "bucket"), [(0.0005, 0), (0.001, 0), (0.0011, 1), (1e9, -1)])
def test_histogram_counts_in_the_first_bucket_that_holds_the_value(value, bucket):
    recorder = Recorder("engine", "e1")
    recorder.histogram(names.END_TO_END).observe(value)
    sample = sample_of(recorder, names.END_TO_END)
    assert sample.buckets[bucket] == 1 and sum(sample.buckets) == 1
    assert sample.value == value


@pytest.mark.parametrize(
    "misuse",
    [
        lambda recorder: recorder.gauge(names.GENERATION_TOKENS),
        lambda recorder: recorder.counter(names.END_TO_END),
        lambda recorder: recorder.histogram(names.PAGES_FREE),
        lambda recorder: recorder.counter(names.REQUESTS_FAILED),
        lambda recorder: recorder.counter(names.GENERATION_TOKENS, "extra"),
    ],
)
def test_misuse_of_a_series_is_our_own_bug(misuse):
    with pytest.raises(ContractViolation):
        misuse(Recorder("engine", "e1"))


def test_snapshot_crosses_a_process_boundary():
    recorder = Recorder("engine", "e1")
    recorder.counter(names.REQUESTS_FAILED, "cancelled").add()
    recorder.histogram(names.END_TO_END).observe(0.2)
    snapshot = recorder.snapshot()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=Snapshot) == snapshot


def test_snapshot_does_not_change_afterwards():
    recorder = Recorder("engine", "e1")
    histogram = recorder.histogram(names.END_TO_END)
    histogram.observe(0.2)
    snapshot = recorder.snapshot()
    histogram.observe(0.2)
    assert sum(snapshot.samples[0].buckets) == 1


def test_declared_series_have_unique_names_and_fitting_fields():
    series = names.declared()
    spelled = [n for one in series for n in (one.name, one.alias) if n]
    assert len(spelled) == len(set(spelled))
    for one in series:
        assert bool(one.buckets) == (one.kind is names.Kind.HISTOGRAM), one.name
        assert list(one.buckets) == sorted(set(one.buckets)), one.name
        assert one.help.endswith("."), one.name
        assert not one.name.endswith("_total"), one.name
