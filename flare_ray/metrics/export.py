"""Prometheus text from recorders' snapshots, whichever process they were taken in (contract: A5).

An ingress replica renders the snapshots of every engine beside its own, so that `/metrics` answers
equally whichever replica is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from flare_ray.metrics.names import Kind, Series, declared
from flare_ray.metrics.recorder import Sample, Snapshot

CONTENT_TYPE = CONTENT_TYPE_LATEST
MODEL_LABEL = "model_name"


def render(snapshots: Sequence[Snapshot], *, model_name: str, compat: bool) -> bytes:
    """Prometheus exposition text.

    Each sample carries its process label (`engine="..."` or `ingress="..."`) and `model_name`.
    Counters carry no `_created` companion: tools that sum every line of a stem would add its
    timestamp.

    Args:
        model_name: name that clients send as `model`.
        compat: also export each series that has an alias under it (`compat_metrics`).
    """
    registry = _Families(tuple(_families(snapshots, model_name, compat)))
    return generate_latest(registry)


class _Families(Collector):
    """The only method of a registry that text generation calls."""

    def __init__(self, families: tuple[Metric, ...]) -> None:
        self._metrics = families

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _families(snapshots: Sequence[Snapshot], model_name: str, compat: bool) -> Iterator[Metric]:
    by_name: dict[str, list[tuple[str, str, Sample]]] = {}
    for snapshot in snapshots:
        for sample in snapshot.samples:
            entry = (snapshot.process, snapshot.identity, sample)
            by_name.setdefault(sample.name, []).append(entry)
    for series in declared():
        entries = by_name.get(series.name, ())
        processes = sorted({process for process, _, _ in entries})
        for name in (series.name, series.alias) if compat else (series.name,):
            for process in processes if name else ():
                rows = [(who, sample) for what, who, sample in entries if what == process]
                yield _family(name, series, (process, MODEL_LABEL), model_name, rows)


def _family(
    name: str,
    series: Series,
    own_labels: tuple[str, ...],
    model_name: str,
    rows: list[tuple[str, Sample]],
) -> Metric:
    labels = (*own_labels, *series.labels)
    if series.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, series.help, labels=labels)
        for identity, sample in rows:
            values = (identity, model_name, *sample.labels)
            histogram.add_metric(values, _cumulative(series, sample), sum_value=sample.value)
        return histogram
    number: CounterMetricFamily | GaugeMetricFamily
    if series.kind is Kind.COUNTER:
        number = CounterMetricFamily(name, series.help, labels=labels)
    else:
        number = GaugeMetricFamily(name, series.help, labels=labels)
    for identity, sample in rows:
        number.add_metric((identity, model_name, *sample.labels), sample.value)
    return number


def _cumulative(series: Series, sample: Sample) -> list[tuple[str, float]]:
    running = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*series.buckets, float("inf")), sample.buckets, strict=True):
        running += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), running))
    return buckets
