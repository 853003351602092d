"""When conversations begin: closed loop, Poisson, bursts, or a recorded trace.

Closed: so many are open at any time, each begins where one ended. The others are open loops: a
conversation begins at its intended time whatever the server does, and its latency counts from then.
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from flare_ray.errors import ConfigError

FORMS = "closed:N, poisson:RATE, bursts:SIZE/PERIOD_S or trace:FILE"


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """One arrival process.

    Attributes:
        kind: closed, poisson, bursts or trace.
        lanes: conversations open at any time (closed); conversations a burst (bursts).
        rate: conversations a second (poisson).
        period_s: between two bursts.
        times_s: intended starts, increasing (trace).
    """

    kind: str
    lanes: int = 1
    rate: float = 0.0
    period_s: float = 0.0
    times_s: tuple[float, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether starts are given, whatever the server does."""
        return self.kind != "closed"

    def starts_s(self, count: int, *, seed: int) -> list[float]:
        """Intended starts of `count` conversations, seconds after the beginning, increasing.

        Raises:
            ConfigError: the process is closed, or the trace has fewer.
        """
        if self.kind == "poisson":
            r, now, found = random.Random(seed), 0.0, []
            for _ in range(count):
                now += r.expovariate(self.rate)
                found.append(now)
            return found
        if self.kind == "bursts":
            return [self.period_s * (i // self.lanes) for i in range(count)]
        if self.kind == "trace" and count <= len(self.times_s):
            return list(self.times_s[:count])
        raise ConfigError(
            f"{self.kind} arrivals with {len(self.times_s)} times give no {count} starts"
        )


def parse_arrivals(text: str) -> Arrivals:
    """An arrival process as it is written on the command line.

    Raises:
        ConfigError: another form, or a number outside its range.
    """
    kind, _, rest = text.partition(":")
    try:
        match kind:
            case "closed" if int(rest) >= 1:
                return Arrivals(kind=kind, lanes=int(rest))
            case "poisson" if float(rest) > 0:
                return Arrivals(kind=kind, rate=float(rest))
            case "bursts":
                size, _, period = rest.partition("/")
                if int(size) >= 1 and float(period) > 0:
                    return Arrivals(kind=kind, lanes=int(size), period_s=float(period))
            case "trace":
                return Arrivals(kind=kind, times_s=_trace(Path(rest)))
    except ValueError as error:
        raise ConfigError(f"arrivals {text!r}: {error}; expected {FORMS}") from error
    raise ConfigError(f"arrivals {text!r}: expected {FORMS}")


def _trace(path: Path) -> tuple[float, ...]:
    """Seconds, one a line."""
    if not path.is_file():
        raise ConfigError(f"no trace at {path}: a file with one start in seconds a line")
    times = tuple(float(line) for line in path.read_text(encoding="utf-8").split())
    if list(times) != sorted(times) or not times or times[0] < 0:
        raise ConfigError(f"{path}: starts must be at least 0 and increase")
    return times
