"""Engines of the fault tests, one per verification width, started when first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.fault_model import IDS, chain_checkpoint, fixed
from tests.support.matrix.run import Engine


@pytest.fixture(scope="package")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Engine]]:
    """The engine of the chains whose rounds are `width` wide."""
    engines: dict[int, Engine] = {}

    def engine(width: int) -> Engine:
        if width not in engines:
            path = chain_checkpoint(tmp_path_factory.mktemp("chains"))
            engines[width] = Engine(path, **fixed(width))
        return engines[width]

    yield engine
    for one in engines.values():
        one.close()


def prompt(chain: str) -> list[int]:
    """The prompt that a chain answers."""
    return [IDS[chain]]
