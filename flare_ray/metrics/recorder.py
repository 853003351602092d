"""Counters, gauges and histograms of one process, cheap enough for the round's hot path.

One thread writes a recorder; any thread may take a snapshot. There is no lock: each instrument
keeps one number or one list that only the writer changes, and a reader copies it in a single
interpreter operation. A snapshot is therefore exact per instrument, and instruments may be one
update apart.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable

import msgspec

from flare_ray.errors import ContractViolation
from flare_ray.metrics.names import Kind, Series


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One instrument's value.

    Attributes:
        name: name of its `Series`.
        labels: label values in the series' order.
        value: counter or gauge value; sum of a histogram.
        buckets: observations per bucket, the last one unbounded; empty unless a histogram.
    """

    name: str
    labels: tuple[str, ...]
    value: float
    buckets: tuple[int, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """All instruments of one process; msgpack-encodable, so that it can cross processes.

    Attributes:
        process: "engine" or "ingress", the label under which `identity` is exported.
        identity: identity of the process; a new one after each restart.
    """

    process: str
    identity: str
    samples: tuple[Sample, ...]


class Counter:
    """A number that only rises."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        """Raise by `amount` >= 0."""
        self.value += amount


class Gauge:
    """A number that is set."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def set(self, value: float) -> None:
        """Replace the value."""
        self.value = value


class Histogram:
    """Counts of observations by bucket, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0

    def observe(self, value: float) -> None:
        """Count `value` in the first bucket whose upper bound is not below it."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


class Recorder:
    """Instruments of one process, created on first use; hold on to what `counter`, `gauge` and
    `histogram` return instead of asking again on a hot path.

    Args:
        process: "engine" or "ingress".
        identity: exported as that label's value.
        clock: monotonic nanoseconds; the process reads its time here so that latencies and
            decisions agree.
    """

    def __init__(
        self,
        process: str,
        identity: str,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.process = process
        self.identity = identity
        self.clock = clock
        self._counters: dict[tuple[str, tuple[str, ...]], Counter] = {}
        self._gauges: dict[tuple[str, tuple[str, ...]], Gauge] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], Histogram] = {}

    def counter(self, series: Series, *labels: str) -> Counter:
        """The counter of `series` with these label values.

        Raises:
            ContractViolation: another kind of series, or another number of labels.
        """
        _check(series, Kind.COUNTER, labels)
        return self._counters.setdefault((series.name, labels), Counter())

    def gauge(self, series: Series, *labels: str) -> Gauge:
        """The gauge of `series`; raises as `counter`."""
        _check(series, Kind.GAUGE, labels)
        return self._gauges.setdefault((series.name, labels), Gauge())

    def histogram(self, series: Series, *labels: str) -> Histogram:
        """The histogram of `series`; raises as `counter`."""
        _check(series, Kind.HISTOGRAM, labels)
        return self._histograms.setdefault((series.name, labels), Histogram(series.buckets))

    def snapshot(self) -> Snapshot:
        """Copy of every instrument; any thread."""
        samples = [
            Sample(name, labels, instrument.value)
            for numbers in (list(self._counters.items()), list(self._gauges.items()))
            for (name, labels), instrument in numbers
        ]
        for (name, labels), histogram in list(self._histograms.items()):
            counts = tuple(histogram.counts)
            samples.append(Sample(name, labels, histogram.total, counts))
        return Snapshot(self.process, self.identity, tuple(samples))


def _check(series: Series, kind: Kind, labels: tuple[str, ...]) -> None:
    if series.kind is not kind:
        raise ContractViolation(f"{series.name} is a {series.kind}, used as a {kind}")
    if len(labels) != len(series.labels):
        raise ContractViolation(
            f"{series.name} takes label values for {series.labels}, got {labels}"
        )
