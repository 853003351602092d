"""Servers as processes of their own: start, wait, stop, and see that nothing is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from flare_ray.config import DeploymentConfig
from tests.rules.sources import ROOT

STOP_LIMIT_S = 40.0
ORPHAN_LIMIT_S = 10.0


def deployment_file(folder: Path, config: DeploymentConfig, port: int) -> Path:
    """A deployment file of one application."""
    document = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "flare",
                "route_prefix": "/",
                "import_path": "flare_ray.frontend.app:build",
                "args": config.model_dump(mode="json", exclude_unset=True),
            }
        ],
    }
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def launch(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
    """`flare-ray ARGUMENTS` from the repository's root, in a session of its own."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "flare_ray.cli.main", *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


@contextmanager
def running(
    *arguments: str, log: Path, url: str, start_limit_s: float, number: int = signal.SIGTERM
) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers /health; stopped by `number`, and its whole tree with it."""
    process = launch(*arguments, log=log)
    try:
        deadline = time.monotonic() + start_limit_s
        while not _is_ready(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield process
    except BaseException:
        process.kill()
        raise
    tree = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    assert process.wait(STOP_LIMIT_S) == 0, log.read_text()
    _, alive = psutil.wait_procs(tree, timeout=ORPHAN_LIMIT_S)
    alive = [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    assert not alive, alive


def gauge(url: str, name: str) -> float:
    """Sum of a metric's samples."""
    text = httpx.get(f"{url}/metrics", timeout=10.0).text
    families = text_string_to_metric_families(text)
    return sum(s.value for family in families for s in family.samples if s.name == name)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False
