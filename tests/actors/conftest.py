"""Settings of the tests of actors, and the small Ray cluster of those marked ray."""

from collections.abc import Iterator

import pytest

from tests.support.integrity import books_add_up as books_add_up
from tests.support.scripted_engine import scripted_checkpoint

CPUS = 4
"""Logical CPUs of the test cluster."""


@pytest.fixture
def anyio_backend() -> str:
    """Coroutine tests run on asyncio, the loop that Serve uses."""
    return "asyncio"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster a module: one left running would meet the tests of other folders."""
    import ray

    # "local": never another cluster that happens to run on this machine.
    ray.init(
        "local",
        num_cpus=CPUS,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the scripted checkpoint."""
    return scripted_checkpoint(tmp_path_factory.mktemp("scripted"))
