"""``python -m benchmarks.serving.http``: what the HTTP side adds to an engine's output.

A paced engine sends 64 streams 50 deltas a second each. The product's ingress (routes, client,
output stream; one process, as a replica behind HAProxy) hands them to plain sockets; so does a bare
ASGI application that makes the frames itself. Both run under uvicorn, in turns. What the ingress
*adds* is the difference of the two latencies' quantiles. Then 2,000 clients leave at random moments
within their first 50 ms: nothing may stay open, and the last thousand may not cost memory.

Ray Serve's handle (one call a request, none a delta) and HAProxy are not part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import JsonValue
from rich.console import Console

from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.http_load import Latencies, disconnect, get_json, read_streams
from benchmarks.serving.http_server import STATS_PATH
from benchmarks.serving.memory import read_memory
from benchmarks.support.results import ROOT, Bound, conclude

RESULT = "http"
CHECKPOINT = ROOT / "deployments" / "demo" / "glm"
ARMS = ("bare", "ingress")
SETTLE_S = 2.0
"""Of each turn, not counted: connections open and caches fill."""
START_LIMIT_S = 60.0
IDLE_LIMIT_S = 20.0
MIB, KIB = 2**20, 2**10
SEED = 9
BOUNDS = (
    Bound(metric="ingress_added_p50_ms", operator="<=", value=2.0),
    Bound(metric="ingress_added_p99_ms", operator="<=", value=40.0),
    Bound(metric="cpu_per_event_vs_uvicorn", operator="<=", value=1.5),
    Bound(metric="cpu_of_path_vs_uvicorn", operator="<=", value=3.0),
    Bound(metric="kib_per_disconnect", operator="<=", value=1.0),
    Bound(metric="left_open", operator="==", value=0),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Size of a run.

    Attributes:
        turns: of each arm; `seconds` each.
        disconnects: the second half of them is weighed.
    """

    streams: int = 64
    rate: float = 50.0
    turns: int = 4
    seconds: float = 15.0
    disconnects: int = 2000


OFFICIAL = Plan()


@dataclass(frozen=True, slots=True)
class Turn:
    """One arm, one turn: latency quantiles, and CPU time per delivered delta."""

    p50_ms: float
    p99_ms: float
    server_us: float
    engine_us: float


@dataclass(frozen=True, slots=True)
class Side:
    """A server under measurement and the engine behind it."""

    port: int
    server: psutil.Process
    engine: psutil.Process


def measure(side: Side, plan: Plan) -> Turn:
    """Run all streams for one turn.

    Raises:
        BenchmarkFailure: a stream failed.
    """
    deltas = int((plan.seconds + 2 * SETTLE_S) * plan.rate)
    from_s = time.monotonic() + SETTLE_S
    found = Latencies(from_s, from_s + plan.seconds)

    async def load() -> tuple[float, float]:
        reading = asyncio.create_task(read_streams(side.port, plan.streams, deltas, found))
        await asyncio.sleep(SETTLE_S)
        before = cpu_s(side.server), cpu_s(side.engine)
        await asyncio.sleep(plan.seconds)
        after = cpu_s(side.server), cpu_s(side.engine)
        await reading
        return after[0] - before[0], after[1] - before[1]

    server_s, engine_s = asyncio.run(load())
    delays = sorted(found.delays_us)
    if not delays:
        raise BenchmarkFailure("no delta arrived while it was measured")
    return Turn(
        p50_ms=delays[len(delays) // 2] / 1e3,
        p99_ms=delays[len(delays) * 99 // 100] / 1e3,
        server_us=server_s / len(delays) * 1e6,
        engine_us=engine_s / len(delays) * 1e6,
    )


def cpu_s(process: psutil.Process) -> float:
    """CPU time of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


@dataclass(frozen=True, slots=True)
class Leaving:
    """What clients left behind: bytes over the second half of them, and what stayed open."""

    growth_bytes: int
    counted: int
    left_open: int


def leave(side: Side, plan: Plan) -> Leaving:
    """Let clients disconnect in two halves, and weigh the server after each."""
    rng, half = random.Random(SEED), plan.disconnects // 2
    asyncio.run(disconnect(side.port, half, rng))
    left = wait_idle(side.port)
    before = allocated(side.server)
    asyncio.run(disconnect(side.port, plan.disconnects - half, rng))
    left = max(left, wait_idle(side.port))
    growth = allocated(side.server) - before
    return Leaving(growth, plan.disconnects - half, left)


def allocated(process: psutil.Process) -> int:
    """Bytes that no file backs."""
    memory = read_memory(process.pid)
    if memory is None:
        raise BenchmarkFailure("the server has died")
    return memory.allocated_bytes


def wait_idle(port: int) -> int:
    """What is still open once nothing is, or at the end of patience."""
    deadline_s = time.monotonic() + IDLE_LIMIT_S
    while True:
        left = sum(asyncio.run(get_json(port, STATS_PATH)).values())
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.2)


def metrics_of(turns: dict[str, list[Turn]], leaving: Leaving, plan: Plan) -> dict[str, JsonValue]:
    """The result file's metrics: medians over turns."""

    def median(arm: str, name: str) -> float:
        return statistics.median(getattr(turn, name) for turn in turns[arm])

    bare_us = median("bare", "server_us")
    path_us = statistics.median(t.server_us + t.engine_us for t in turns["ingress"])
    return {
        "ingress_added_p50_ms": median("ingress", "p50_ms") - median("bare", "p50_ms"),
        "ingress_added_p99_ms": median("ingress", "p99_ms") - median("bare", "p99_ms"),
        "cpu_per_event_vs_uvicorn": median("ingress", "server_us") / bare_us,
        "cpu_of_path_vs_uvicorn": path_us / bare_us,
        "leak_mb": leaving.growth_bytes / MIB,
        "kib_per_disconnect": leaving.growth_bytes / KIB / leaving.counted,
        "left_open": leaving.left_open,
        "streams": plan.streams,
        "deltas_per_s": plan.rate,
        "turns": {
            arm: [
                {
                    "p50_ms": t.p50_ms,
                    "p99_ms": t.p99_ms,
                    "server_cpu_us_per_event": t.server_us,
                    "engine_cpu_us_per_event": t.engine_us,
                }
                for t in turns[arm]
            ]
            for arm in ARMS
        },
    }


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def process(module: str, *arguments: str) -> Iterator[psutil.Process]:
    """A process of this benchmark until the block ends."""
    command = [sys.executable, "-m", f"benchmarks.serving.{module}", *arguments]
    child = subprocess.Popen(command, cwd=ROOT)
    try:
        yield psutil.Process(child.pid)
    finally:
        child.terminate()
        child.wait(START_LIMIT_S)


def wait_listening(port: int, server: psutil.Process) -> None:
    """Return once the server accepts connections."""
    deadline_s = time.monotonic() + START_LIMIT_S
    while True:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        if not server.is_running() or server.status() == psutil.STATUS_ZOMBIE:
            raise BenchmarkFailure("the server did not start")
        if time.monotonic() > deadline_s:
            raise BenchmarkFailure(f"the server did not listen within {START_LIMIT_S:g} s")
        time.sleep(0.05)


def run(plan: Plan, checkpoint: Path, console: Console) -> dict[str, JsonValue]:
    """Everything; returns the metrics.

    Raises:
        BenchmarkFailure: a process or a stream failed.
    """
    address, rate = f"tcp://127.0.0.1:{free_port()}", ("--rate", str(plan.rate))
    common = ("--checkpoint", str(checkpoint), "--address", address, *rate)
    turns: dict[str, list[Turn]] = {arm: [] for arm in ARMS}
    with ExitStack() as stack:
        engine = stack.enter_context(process("http_engine", *common))
        sides = {}
        for arm in ARMS:
            port = free_port()
            server = stack.enter_context(process("http_server", arm, "--port", str(port), *common))
            wait_listening(port, server)
            sides[arm] = Side(port, server, engine)
        for number in range(plan.turns):
            for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
                turn = measure(sides[arm], plan)
                turns[arm].append(turn)
                console.print(f"{arm}: {turn}", highlight=False, markup=False)
        leaving = leave(sides["ingress"], plan)
    return metrics_of(turns, leaving, plan)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.http",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--turns", type=int, default=OFFICIAL.turns, help="of each arm")
    parser.add_argument("--seconds", type=float, default=OFFICIAL.seconds, help="of each turn")
    parser.add_argument("--disconnects", type=int, default=OFFICIAL.disconnects)
    options = parser.parse_args(arguments)
    plan = Plan(turns=options.turns, seconds=options.seconds, disconnects=options.disconnects)
    console = Console()
    try:
        metrics = run(plan, CHECKPOINT, console)
    except BenchmarkFailure as failure:
        print(f"http failed: {failure}", file=sys.stderr)
        return 2
    return conclude(RESULT, metrics, BOUNDS, console, official=plan == OFFICIAL)


if __name__ == "__main__":
    raise SystemExit(main())
