"""``python -m benchmarks.serving.chaos --minutes 10``: ranks, engines and HTTP replicas are killed.

Clients stream and wait for whole answers while one process at a time, chosen at random, gets
SIGKILL. Every request must end complete or with one clear error: an error status, an error event
that ends its stream, or a broken connection. A 200 that stops without its end, or an answer that
never comes, is neither. Recovery is the time from the kill to the end of the first short request
that was sent after it. At the end nothing may be held: page, process, port, socket or shared
memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from pydantic import JsonValue
from rich.console import Console

from benchmarks.serving.chaos_load import CLEAR, END_NAMES, Clients
from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.memory import process_label, tree_of
from benchmarks.serving.service import (
    Service,
    leave_on_terminate,
    open_target,
    require_free_port,
    serving,
)
from benchmarks.serving.soak import held_pages, live_requests, wait_until_idle
from benchmarks.serving.workload import PROMPTS, Prompt, load_prompts
from benchmarks.support.results import Bound, conclude
from flare_ray.actors.listener import ADDRESS_PREFIX

RESULT = "chaos"
OFFICIAL_MINUTES = 10.0
CLIENTS = 4
CALM_S = (5.0, 20.0)
"""Between a recovery and the next kill."""
PROBE_S = 0.2
PROBE_LIMIT_S = 5.0
GIVE_UP_S = 180.0
ROLES = {"rank": "RankActor", "engine": ":Engine", "ingress": ":Ingress"}
"""What a victim's process title contains, by kind."""
SHARED = "/dev/shm/"
SOCKETS = Path("/proc/net/unix")
SEED = 4
BOUNDS = (
    Bound(metric="unclear_ends", operator="==", value=0),
    Bound(metric="recovery_s_max", operator="<=", value=30.0),
    Bound(metric="pages_held_at_end", operator="==", value=0),
    Bound(metric="requests_left_at_end", operator="==", value=0),
    Bound(metric="shared_memory_left", operator="==", value=0),
    Bound(metric="sockets_left", operator="==", value=0),
)


@dataclass(slots=True)
class Kills:
    """Recovery times by kind of victim, and what the service was seen to use before each kill.

    Attributes:
        shared: files in shared memory.
        sockets: addresses at which ranks and engines met.
    """

    recoveries_s: dict[str, list[float]] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    sockets: set[str] = field(default_factory=set)

    @property
    def all_s(self) -> list[float]:
        """Every recovery."""
        return [second for seconds in self.recoveries_s.values() for second in seconds]


class Killer:
    """Kills, and waits for the service to come back.

    Args:
        probe: body and path of a short request.
    """

    def __init__(self, service: Service, probe: Prompt, console: Console, *, seed: int) -> None:
        self.kills = Kills()
        self._service = service
        self._body = probe.body(service.target.model, 2) | {"stream": False}
        self._body.pop("stream_options", None)
        self._path = probe.path
        self._console = console
        self._random = random.Random(seed)

    async def run(self, until_s: float) -> None:
        """Kill until the time is over; each kind once before any twice.

        Raises:
            BenchmarkFailure: the service did not come back.
        """
        order: list[str] = []
        while time.monotonic() < until_s:
            await asyncio.sleep(self._random.uniform(*CALM_S))
            order = order or self._random.sample(sorted(ROLES), len(ROLES))
            kind = order.pop()
            pid = self._victim(kind)
            killed_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            await self._recovered(kind)
            took_s = time.monotonic() - killed_s
            self.kills.recoveries_s.setdefault(kind, []).append(took_s)
            self._console.print(f"{kind}: back after {took_s:.1f} s", highlight=False)

    def _victim(self, kind: str) -> int:
        self._service.note_descendants()
        found = []
        for process in tree_of(self._service.pid):
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                self.kills.shared.update(shared_files(process.pid))
                self.kills.sockets.update(rank_sockets(process))
                if ROLES[kind] in process_label(process.cmdline()):
                    found.append(process.pid)
        if not found:
            raise BenchmarkFailure(f"no {kind} process is running")
        return self._random.choice(found)

    async def _recovered(self, kind: str) -> None:
        deadline_s = time.monotonic() + GIVE_UP_S
        async with httpx.AsyncClient(
            base_url=self._service.base_url, timeout=PROBE_LIMIT_S, trust_env=False
        ) as client:
            while time.monotonic() < deadline_s:
                with contextlib.suppress(httpx.TransportError):
                    answer = await client.post(self._path, json=self._body)
                    if answer.status_code == httpx.codes.OK:
                        return
                await asyncio.sleep(PROBE_S)
        raise BenchmarkFailure(f"not back {GIVE_UP_S:.0f} s after its {kind} was killed")


def shared_files(pid: int) -> set[str]:
    """Files in shared memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return {line[line.index(SHARED) :].split()[0] for line in lines if SHARED in line}


def rank_sockets(process: psutil.Process) -> set[str]:
    """Addresses at which ranks and engines meet that a process has open."""
    names = {str(found.laddr) for found in process.net_connections("unix")}
    return {name for name in names if name.startswith(ADDRESS_PREFIX)}


def open_sockets() -> set[str]:
    """Every address of a Unix socket on this machine."""
    lines = SOCKETS.read_text(encoding="utf-8", errors="replace").splitlines()
    return {line.split()[-1] for line in lines}


async def storm(clients: Clients, killer: Killer, minutes: float) -> None:
    """Load and kills side by side; ends when every request has."""
    until_s = time.monotonic() + minutes * 60
    load = asyncio.create_task(clients.run(until_s, CLIENTS))
    try:
        await killer.run(until_s)
        await load
    finally:
        load.cancel()


def chaos_metrics(
    ends: Counter[str], kills: Kills, held: Mapping[str, float]
) -> dict[str, JsonValue]:
    """The result file's metrics.

    Args:
        ends: requests by outcome.
        held: what was not given back, by metric.
    """
    table: dict[str, JsonValue] = {name: ends[name] for name in END_NAMES}
    return {
        "unclear_ends": sum(count for name, count in ends.items() if name not in CLEAR),
        "recovery_s_max": max(kills.all_s, default=0.0),
        **held,
        "shared_memory_seen": len(kills.shared),
        "sockets_seen": len(kills.sockets),
        "requests": table,
        "kills": {kind: len(seconds) for kind, seconds in kills.recoveries_s.items()},
        "recovery_s": {
            kind: [round(s, 2) for s in seconds] for kind, seconds in kills.recoveries_s.items()
        },
    }


def run(
    port: int | None, prompts_file: Path, minutes: float, console: Console, *, seed: int = SEED
) -> dict[str, JsonValue]:
    """A whole run; returns the metrics.

    Raises:
        BenchmarkFailure: the service did not start, come back, or stop without a trace.
    """
    with open_target(port=port) as target:
        prompts = load_prompts(prompts_file, target.checkpoint)
        rows = [prompt for category in prompts.values() for prompt in category]
        with serving(target) as service:
            clients = Clients(service.base_url, target.model, rows, seed=seed)
            killer = Killer(service, rows[0], console, seed=seed)
            asyncio.run(storm(clients, killer, minutes))
            last = wait_until_idle(service)
        # Every process of the service has been waited for.
        require_free_port(*target.address)
    kills = killer.kills
    held = {
        "pages_held_at_end": held_pages(last),
        "requests_left_at_end": live_requests(last),
        "shared_memory_left": sum(Path(path).exists() for path in kills.shared),
        "sockets_left": len(kills.sockets & open_sockets()),
    }
    for note in clients.noted:
        console.print(note, highlight=False, markup=False)
    return chaos_metrics(clients.ends, kills, held)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=OFFICIAL_MINUTES, help="length of the run")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="prompts, JSON lines")
    parser.add_argument("--port", type=int, help="another port than the deployment's")
    parser.add_argument("--seed", type=int, default=SEED, help="of victims, prompts and pauses")
    options = parser.parse_args(arguments)
    leave_on_terminate()
    console = Console()
    try:
        metrics = run(options.port, options.prompts, options.minutes, console, seed=options.seed)
    except BenchmarkFailure as failure:
        print(f"chaos failed: {failure}", file=sys.stderr)
        return 2
    official = options.minutes >= OFFICIAL_MINUTES
    return conclude(RESULT, metrics, BOUNDS, console, official=official)


if __name__ == "__main__":
    raise SystemExit(main())
