"""`flare-ray serve FILE` as its users run it: a process on a port of its own, its output in a log.

Every process that descends from it carries an environment variable of this service alone, so the
whole tree is found however it re-parents itself, is looked at (what it holds), and is killed at the
end of a test whatever happened.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.rules.sources import ROOT

MARK = "FLARE_TEST_SERVICE"
FLARE_RAY = (sys.executable, "-m", "flare_ray.cli.main")
SERVE = (sys.executable, "-m", "ray.serve.scripts")
START_LIMIT_S = 120.0
"""Ray, Serve and three replicas on two cores that others use too; about 15 s when they are idle."""
STOP_LIMIT_S = 60.0
GONE_LIMIT_S = 10.0
PROBE_S = 15.0
POLL_S = 0.1
LOG_TAIL_CHARS = 6000


def machine_load() -> str:
    """What a measured time must be read beside."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def wait_for(done: Callable[[], object], limit_s: float, what: str) -> float:
    """Seconds until `done()` is true."""
    started = time.monotonic()
    while not done():
        waited_s = time.monotonic() - started
        assert waited_s < limit_s, f"not within {limit_s:g} s ({machine_load()}): {what}"
        time.sleep(POLL_S)
    return time.monotonic() - started


def write_deployment(file: Path, args: Mapping[str, Any], port: int) -> Path:
    """A deployment file of one application on the loopback interface."""
    document = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "flare",
                "route_prefix": "/",
                "import_path": "flare_ray.frontend.app:build",
                "args": dict(args),
            }
        ],
    }
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


@dataclass(frozen=True)
class Holdings:
    """What a service's processes hold.

    Attributes:
        roles: how many processes there are of each kind that a rank's or engine's end may touch.
        shared: files in shared memory that a process has open or mapped.
        paths: file names of bound Unix sockets; without Ray's own, whose session folder stays.
        ports: TCP ports listened on.
        sockets: open sockets of each process, by its id.
    """

    roles: Counter[str]
    shared: frozenset[str]
    paths: frozenset[str]
    ports: frozenset[int]
    sockets: Mapping[int, int]


class Tree:
    """A command, and every process that came from it.

    Args:
        command: run from the repository's root.
        log: takes its output.
    """

    def __init__(self, command: Sequence[str], log: Path, *, env: Mapping[str, str] = {}) -> None:
        self.log = log
        self._mark = uuid.uuid4().hex
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        environment = {**os.environ, **env, MARK: self._mark, "PYTHONPATH": path}
        # Another cluster of this machine is none of ours.
        environment.pop("RAY_ADDRESS", None)
        self.started_s = time.monotonic()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """Every live process of the tree; one that only waits to be collected is not live."""
        found = []
        entry = f"{MARK}={self._mark}".encode()
        for process in psutil.process_iter():
            try:
                variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                if entry in variables and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.NoSuchProcess):
                continue  # it ended meanwhile, or belongs to someone else
        return found

    def wait(self, limit_s: float) -> int:
        """Exit status of the command itself."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {limit_s:g} s ({machine_load()}):\n{self.tail()}"
            ) from None

    def text(self) -> str:
        """Everything written so far, without terminal colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(errors="replace"))

    def tail(self) -> str:
        """The end of it, for messages."""
        return self.text()[-LOG_TAIL_CHARS:]

    def kill(self) -> None:
        """End whatever is left of the tree; idempotent."""
        for _ in range(3):  # a process may be starting another one meanwhile
            alive = self.processes()
            for process in alive:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(alive, GONE_LIMIT_S)
        self.process.wait(GONE_LIMIT_S)

    def holdings(self) -> Holdings:
        """What the tree holds now."""
        roles: Counter[str] = Counter()
        shared: set[str] = set()
        inodes: dict[int, set[str]] = {}
        for process in self.processes():
            try:
                roles[_role(process)] += 1
                opened = [os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
                mapped = Path(f"/proc/{process.pid}/maps").read_text().split()
            except (OSError, psutil.NoSuchProcess):
                continue
            names = [name for name in (*opened, *mapped) if name.startswith("/dev/shm/")]
            shared.update(name for name in names if "plasma" not in name)
            inodes[process.pid] = {name[8:-1] for name in opened if name.startswith("socket:[")}
        every = set().union(*inodes.values())
        return Holdings(
            roles=roles,
            shared=frozenset(shared),
            paths=_bound_paths(every),
            ports=_listening(every),
            sockets={pid: len(found) for pid, found in inodes.items()},
        )


class Service(Tree):
    """A running deployment.

    Args:
        file: deployment file with one application at /.
        options: further words of the command line.
    """

    def __init__(
        self, file: Path, *, options: Sequence[str] = (), env: Mapping[str, str] = {}
    ) -> None:
        document = yaml.safe_load(file.read_text())
        super().__init__(
            [*FLARE_RAY, "serve", str(file), *options], file.with_suffix(".log"), env=env
        )
        self.port = int(document["http_options"]["port"])
        self.model = str(document["applications"][0]["args"]["model_name"])
        self.url = f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> httpx.Response | None:
        """The answer, None while nothing listens."""
        try:
            return httpx.get(self.url + path, timeout=PROBE_S)
        except httpx.TransportError:
            return None

    def status(self, path: str) -> int:
        """Status of a GET; 0 while nothing listens."""
        answer = self.get(path)
        return 0 if answer is None else answer.status_code

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> float:
        """Seconds until /health answers 200."""

        def ready() -> bool:
            status = self.process.poll()
            assert status is None, f"the service ended with {status}:\n{self.tail()}"
            return self.status("/health") == httpx.codes.OK

        try:
            return wait_for(ready, limit_s, "/health is 200")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from None

    def gauge(self, name: str) -> float:
        """Sum of a series over all engines, from /metrics."""
        answer = self.get("/metrics")
        assert answer is not None and answer.status_code == httpx.codes.OK
        families = text_string_to_metric_families(answer.text)
        return sum(s.value for family in families for s in family.samples if s.name == name)

    def idle(self) -> bool:
        """Nothing runs, nothing waits, every page is free."""
        pages = self.gauge("flare_pages")
        return (
            pages > 0
            and self.gauge("flare_pages_free") == pages
            and self.gauge("flare_num_requests_running") == 0
            and self.gauge("flare_num_requests_waiting") == 0
        )

    def wait_idle(self, limit_s: float) -> None:
        """Wait until `idle`; on failure the message holds the gauges."""
        try:
            wait_for(self.idle, limit_s, "nothing runs, nothing waits, every page is free")
        except AssertionError as error:
            answer = self.get("/metrics")
            names = ("flare_num_requests", "flare_pages", "flare_request_failures")
            lines = [] if answer is None else answer.text.splitlines()
            shown = [line for line in lines if line.startswith(names)]
            raise AssertionError("\n".join([str(error), *shown, self.tail()])) from None

    def pids(self, role: str) -> list[int]:
        """Processes that run `role`, oldest first."""
        found = [p for p in self.processes() if _role(p) == role]
        return [p.pid for p in sorted(found, key=psutil.Process.create_time)]

    def stop(self, limit_s: float = STOP_LIMIT_S) -> int:
        """Ask it to stop as an operator does; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(limit_s)


ENGINE, INGRESS, RANK = "Engine", "Ingress", "RankActor"


ACTOR_LINE = ":actor_name:"
LOG_HEAD_BYTES = 1 << 16


def _role(process: psutil.Process) -> str:
    """What a worker runs, by the line that Ray writes at the head of its log when it becomes an
    actor; everything else is "other".

    Its title says so too, but Ray changes that whenever the actor begins or ends a call.
    """
    try:
        log = os.readlink(f"/proc/{process.pid}/fd/1")
        if not Path(log).name.startswith("worker-"):
            return "other"
        with open(log, "rb") as file:
            head = file.read(LOG_HEAD_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return "other"  # it has ended, and is found in no other way either
    names = [line.removeprefix(ACTOR_LINE) for line in head if line.startswith(ACTOR_LINE)]
    name = names[-1] if names else ""
    return next((role for role in (ENGINE, INGRESS, RANK) if name.endswith(role)), "other")


def _bound_paths(inodes: set[str]) -> frozenset[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    names = (row[7] for row in rows if len(row) > 7 and row[6] in inodes)
    return frozenset(name for name in names if "/session_" not in name)


def _listening(inodes: set[str]) -> frozenset[int]:
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == "0A" and row[9] in inodes:
                ports.add(int(row[1].rpartition(":")[2], 16))
    return frozenset(ports)


def port_is_free(port: int) -> bool:
    """Nothing listens on a loopback port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        return sock.connect_ex(("127.0.0.1", port)) != 0
