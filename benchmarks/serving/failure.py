"""The one exception of these benchmarks: a figure that could not be measured is never written."""


class BenchmarkFailure(Exception):
    """The run cannot give its figures; the message says what happened and what to change."""
