"""Settings of the tests of actors."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Coroutine tests run on asyncio, the loop that Serve uses."""
    return "asyncio"
