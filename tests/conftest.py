"""Environment of every test run: offline, quiet Ray, printed seeds, GPU tests skipped by name; what
runs side by side when pytest-xdist shares the tests out (`-n 2`).
"""

import functools
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Read when torch, ray or transformers are first imported, hence set before any test module is.
for _name, _value in {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)

ROOT = Path(__file__).resolve().parents[1]
SEED_VARIABLE = "FLARE_TEST_SEED"
RUN_SEED = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(2**31))
# Processes that pytest-xdist starts take it over.
os.environ[SEED_VARIABLE] = str(RUN_SEED)

# A slow machine must not turn a correct property into a failure; a failing example is printed as a
# blob that reproduces it.
settings.register_profile("flare", deadline=None, print_blob=True)
settings.load_profile("flare")


def pytest_report_header() -> str:
    return f"randomised tests: {SEED_VARIABLE}={RUN_SEED}"


@functools.cache
def starts_ray(file: str) -> bool:
    """Whether a test file has tests that start Ray, of whatever marker expression."""
    return "mark.ray" in (ROOT / file).read_text(encoding="utf-8")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start Ray come last: they take both cores, and some measure time."""
    items.sort(key=lambda item: starts_ray(item.nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Files stay whole, since their tests share fixtures; those that start Ray run one after the
    other in one process. (pytest-xdist's own groups are lost under pytest 9.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "ray" if starts_ray(file) else file

    return ByFile(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device; torch sees none")


@pytest.fixture
def random_seed(request: pytest.FixtureRequest) -> int:
    """Seed of one randomised test: the run's seed mixed with its name, printed on failure."""
    seed = random.Random(f"{RUN_SEED}:{request.node.nodeid}").randrange(2**31)
    print(f"{SEED_VARIABLE}={RUN_SEED} gives this test the seed {seed}")
    return seed


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Function that returns a loopback TCP port, free now and never handed out before in this run.

    Two Serve instances on one port do not conflict (its proxy sets SO_REUSEPORT), they split the
    requests at random; hence a port of its own for every test.
    """
    given: set[int] = set()

    def take() -> int:
        while True:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
                sock.bind(("127.0.0.1", 0))
                port = int(sock.getsockname()[1])
            if port not in given:
                given.add(port)
                return port

    return take
