"""Counters of the service, read from ``/metrics``; differences of two readings bound a phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from flare_ray.metrics.names import Kind, Series

_IDENTITY_LABELS = ("engine", "ingress", "model_name")
Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Exposition:
    """Every sample of one reading; of several engines the sum."""

    values: dict[Key, float]

    @classmethod
    def parse(cls, text: str) -> Exposition:
        """Read Prometheus text."""
        values: dict[Key, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = sorted(
                    pair for pair in sample.labels.items() if pair[0] not in _IDENTITY_LABELS
                )
                key = (sample.name, tuple(labels))
                values[key] = values.get(key, 0.0) + sample.value
        return cls(values)

    def since(self, earlier: Exposition) -> Exposition:
        """Growth of every sample; meaningless for gauges."""
        return Exposition(
            {key: value - earlier.values.get(key, 0.0) for key, value in self.values.items()}
        )

    def value(self, series: Series, labels: Mapping[str, str] | None = None) -> float:
        """A counter or gauge, summed over the samples that carry all of `labels`."""
        return self._sum(series.name + ("_total" if series.kind is Kind.COUNTER else ""), labels)

    def seconds(self, series: Series, labels: Mapping[str, str] | None = None) -> float:
        """Sum of a histogram's observations."""
        return self._sum(f"{series.name}_sum", labels)

    def observations(self, series: Series, labels: Mapping[str, str] | None = None) -> float:
        """Number of a histogram's observations."""
        return self._sum(f"{series.name}_count", labels)

    def by_label(self, series: Series, label: str) -> dict[str, float]:
        """A counter by the values of one label, zeros left out."""
        name = series.name + ("_total" if series.kind is Kind.COUNTER else "")
        found: dict[str, float] = {}
        for (sample, labels), value in self.values.items():
            if sample == name and value:
                place = dict(labels)[label]
                found[place] = found.get(place, 0.0) + value
        return found

    def quantile(self, series: Series, share: float) -> float | None:
        """Upper bound of the bucket that holds a quantile of a histogram, infinity beyond the last;
        None without observations."""
        buckets: dict[float, float] = {}
        for (sample, labels), value in self.values.items():
            if sample == f"{series.name}_bucket":
                bound = float(dict(labels)["le"])
                buckets[bound] = buckets.get(bound, 0.0) + value
        total = max(buckets.values(), default=0.0)
        if not total:
            return None
        return min(bound for bound, count in buckets.items() if count >= share * total)

    def _sum(self, name: str, labels: Mapping[str, str] | None) -> float:
        wanted = set((labels or {}).items())
        return sum(
            value
            for (sample, own), value in self.values.items()
            if sample == name and wanted <= set(own)
        )
