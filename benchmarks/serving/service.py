"""The service under measurement: ``flare-ray serve`` in a process tree of its own.

The deployment file is used as it stands unless other values were asked for; then a copy with those
runs. Engine settings of an arm are command-line options, as a user gives them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.memory import tree_of
from benchmarks.support.results import ROOT
from flare_ray.metrics.exposition import Exposition

DEPLOYMENT = ROOT / "deployments" / "glm-demo.yaml"
READY_LIMIT_S = 180.0
STOP_LIMIT_S = 60.0
ORPHAN_LIMIT_S = 15.0
POLL_S = 0.1
LOOK_S = 2.0
LOG_TAIL_LINES = 30
# An engine reports its counters once a second; what was true before this pause is in the answer.
REPORT_PAUSE_S = 1.3
ENVIRONMENT = {
    # Another Ray cluster on this machine is not ours to join.
    "RAY_ADDRESS": "local",
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}
# Each arm fixes its own threads; a shell's setting would override some of them silently.
DROPPED_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Target:
    """What to serve.

    Attributes:
        document: the deployment file's content, changes included.
        file: what is handed to ``flare-ray serve``.
        is_original: the file of the repository itself, unchanged.
    """

    document: dict[str, Any]
    file: Path
    is_original: bool

    @property
    def engine(self) -> dict[str, Any]:
        """The engine section."""
        section: dict[str, Any] = self.document["applications"][0]["args"]["engine"]
        return section

    @property
    def model(self) -> str:
        """Name that clients send."""
        return str(self.document["applications"][0]["args"]["model_name"])

    @property
    def checkpoint(self) -> Path:
        """Folder of the weights; relative paths count from the repository's root."""
        return ROOT / self.engine["checkpoint"]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        options = self.document["http_options"]
        return str(options["host"]), int(options["port"])


@contextlib.contextmanager
def open_target(
    *, checkpoint: Path | None = None, port: int | None = None, threads: int | None = None
) -> Iterator[Target]:
    """The demo deployment, with another checkpoint, port or number of threads where given.

    Raises:
        BenchmarkFailure: the checkpoint is not there.
    """
    document = yaml.safe_load(DEPLOYMENT.read_text(encoding="utf-8"))
    engine = document["applications"][0]["args"]["engine"]
    if checkpoint is not None:
        engine["checkpoint"] = str(checkpoint.resolve())
    if port is not None:
        document["http_options"]["port"] = port
    if threads is not None:
        engine["threads_per_rank"] = threads
    is_original = checkpoint is None and port is None and threads is None
    with tempfile.TemporaryDirectory(prefix="flare-bench-") as folder:
        file = DEPLOYMENT
        if not is_original:
            file = Path(folder) / DEPLOYMENT.name
            file.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        target = Target(document, file, is_original)
        if not (target.checkpoint / "config.json").is_file():
            raise BenchmarkFailure(
                f"no checkpoint at {engine['checkpoint']}: make it first, or name another one with "
                "--checkpoint"
            )
        yield target


@dataclass(slots=True)
class Service:
    """A running service.

    Attributes:
        startup_s: start of the process to the first 200 of /health.
        descendants: processes seen below it so far; they could outlive it.
    """

    target: Target
    process: subprocess.Popen[bytes]
    log: Path
    startup_s: float = 0.0
    descendants: set[psutil.Process] = field(default_factory=set)

    @property
    def pid(self) -> int:
        """Root of the process tree."""
        return self.process.pid

    @property
    def base_url(self) -> str:
        """Without a trailing slash."""
        host, port = self.target.address
        return f"http://{host}:{port}"

    def note_descendants(self) -> None:
        """Look at the process tree, which is gone from view once its root has died."""
        self.descendants.update(tree_of(self.pid)[1:])

    def metrics(self) -> Exposition:
        """The service's own counters, at most a second old."""
        answer = httpx.get(f"{self.base_url}/metrics", timeout=10.0, trust_env=False)
        if answer.status_code != httpx.codes.OK:
            raise BenchmarkFailure(f"/metrics answered {answer.status_code}: {answer.text[:300]}")
        return Exposition.parse(answer.text)

    def settled_metrics(self) -> Exposition:
        """Counters that include everything done so far."""
        time.sleep(REPORT_PAUSE_S)
        return self.metrics()


@contextlib.contextmanager
def serving(target: Target, options: Sequence[str] = ()) -> Iterator[Service]:
    """Start the service, wait until it is ready, and stop it whatever happens.

    Args:
        options: engine options of ``flare-ray serve``.
    Raises:
        BenchmarkFailure: the port is taken, the service did not become ready, or its processes
            outlived it.
    """
    require_free_port(*target.address)
    command = [sys.executable, "-m", "flare_ray.cli.main", "serve", str(target.file), *options]
    with tempfile.NamedTemporaryFile(prefix="flare-bench-", suffix=".log") as log:
        started_s = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=service_environment(os.environ),
            start_new_session=True,
        )
        service = Service(target, process, Path(log.name))
        try:
            wait_until_ready(service, started_s)
            yield service
        except BaseException:
            sys.stderr.write(f"--- end of the service's output\n{tail(service.log)}\n")
            raise
        finally:
            stop(service)


def leave_on_terminate() -> None:
    """Let SIGTERM unwind this process as Ctrl-C does: dying at once would leave the service."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def service_environment(given: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """The environment of the service: this one, without thread settings, with the project's root
    importable in every worker."""
    kept = {name: value for name, value in given.items() if name not in DROPPED_VARIABLES}
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}


def require_free_port(host: str, port: int) -> None:
    """Refuse a port that something listens on: requests would reach both.

    Raises:
        BenchmarkFailure: it is taken.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        if sock.connect_ex((host, port)) == 0:
            raise BenchmarkFailure(f"{host}:{port} is in use: stop that server, or give --port")


def wait_until_ready(service: Service, started_s: float) -> None:
    """Poll /health until it answers 200, and note how long that took.

    Raises:
        BenchmarkFailure: the process ended, or the limit passed.
    """
    now_s = time.monotonic()
    deadline_s, look_s = now_s + READY_LIMIT_S, now_s + LOOK_S
    last = "no connection"
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while (now_s := time.monotonic()) < deadline_s:
            status = service.process.poll()
            if status is not None:
                raise BenchmarkFailure(f"the service ended with status {status} while starting")
            if now_s >= look_s:
                look_s = now_s + LOOK_S
                service.note_descendants()
            try:
                answer = client.get(f"{service.base_url}/health")
                if answer.status_code == httpx.codes.OK:
                    service.startup_s = time.monotonic() - started_s
                    service.note_descendants()
                    return
                last = f"status {answer.status_code}"
            except httpx.TransportError as error:
                last = type(error).__name__
            time.sleep(POLL_S)
    raise BenchmarkFailure(f"/health was not ready within {READY_LIMIT_S:.0f} s (last: {last})")


def stop(service: Service) -> None:
    """Stop the service and see that nothing of its tree is left.

    Raises:
        BenchmarkFailure: something had to be killed.
    """
    service.note_descendants()
    complaint = ""
    if service.process.poll() is None:
        service.process.send_signal(signal.SIGTERM)
        try:
            service.process.wait(timeout=STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            service.process.kill()
            service.process.wait()
            complaint = f"the service did not stop within {STOP_LIMIT_S:.0f} s and was killed"
    _, remaining = psutil.wait_procs(service.descendants, timeout=ORPHAN_LIMIT_S)
    alive = [process for process in remaining if _is_running(process)]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if alive and not complaint:
        complaint = f"the service left {len(alive)} process(es) behind; they were killed"
    if complaint:
        raise BenchmarkFailure(complaint)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tail(log: Path) -> str:
    """The end of the service's output."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])
