"""Ray executes code for whoever joins its cluster: with the settings of `flare-ray serve` only who
has the token does."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flare_ray.cli.serve import RAY_ENVIRONMENT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(150)]

TOKEN = "0123456789abcdef0123456789abcdef"
OTHER_TOKEN = "f123456789abcdef0123456789abcdef"
LIMIT_S = 90.0
CLUSTER = """
import sys, ray
context = ray.init(num_cpus=1, include_dashboard=False, _temp_dir=sys.argv[1], log_to_driver=False)
print(context.address_info["gcs_address"], flush=True)
sys.stdin.readline()
ray.shutdown()
"""
MEMBER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print(ray.get(ray.remote(num_cpus=0)(lambda: 6 * 7).remote(), timeout=30))
"""


def environment(token: str | None) -> dict[str, str]:
    """Of a process that has this token, or none."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    if token is None:
        return {**clean, "RAY_AUTH_MODE": "disabled"}
    return {**clean, **RAY_ENVIRONMENT, "RAY_AUTH_TOKEN": token}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    # Its sockets need a short path.
    folder = Path(tempfile.mkdtemp(prefix="flare-", dir=os.environ.get("RAY_TMPDIR")))
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER, str(folder)],
        env=environment(TOKEN),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate("\n", timeout=LIMIT_S)
    assert process.returncode == 0
    shutil.rmtree(folder)


def joining(address: str, token: str | None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MEMBER, address],
        env=environment(token),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_cluster_refuses_whoever_has_no_token(address):
    with joining(address, TOKEN) as member:
        output, errors = member.communicate(timeout=LIMIT_S)
    assert output == "42\n", errors
    with joining(address, None) as stranger, joining(address, OTHER_TOKEN) as forger:
        for process in (stranger, forger):
            output, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode != 0
            assert output == ""
            assert "InvalidAuthToken" in errors
