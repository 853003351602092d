"""Tiny checkpoints, what the equations give for them, and drivers over them: built once a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.deepseek_oracle import MIN_GAP, DeepseekOracle, Oracle
from tests.support.deepseek_tiny import write_checkpoint
from tests.support.recipe_driver import Lane, RecipeDriver

LENGTH = 150
"""Tokens of every tiny sequence: three pages, beyond each variant's windows and selections."""
EXACT = ("sparse", "pooled")
"""Variants without rounding of keys, where another order of sums moves nothing further."""


@dataclass
class Tiny:
    """A variant: its folder, the reference and its results for one sequence."""

    name: str
    folder: Path
    reference: DeepseekOracle
    oracle: Oracle
    tokens: list[int]
    driver: RecipeDriver

    def fresh(self, count: int = 1, *, pages: int = 3) -> list[Lane]:
        return self.driver.fresh(count, pages=pages)

    def wrong(self, at: int) -> int:
        """A token other than the sequence's at a position."""
        return (self.tokens[min(at, LENGTH - 1)] + 7) % 100 + 3

    def row(self, at: int, width: int, right: int) -> list[int]:
        """A candidate row from position `at`: `right` tokens of the sequence, then others."""
        return [self.tokens[at + i] if i < right else self.wrong(at + i) for i in range(width)]


@pytest.fixture(scope="session")
def load_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    loaded: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in loaded:
            folder = write_checkpoint(tmp_path_factory.mktemp(name), name)
            reference = DeepseekOracle(folder)
            generator = torch.Generator().manual_seed(3)
            ids = torch.randint(3, reference.text["vocab_size"] - 8, (LENGTH,), generator=generator)
            tokens = ids.tolist()
            oracle = reference.run(tokens)
            assert oracle.gap > MIN_GAP, f"{name}: choose a seed whose selections are decided"
            assert oracle.sparse_rows > 200, f"{name}: selection is hardly exercised"
            driver = RecipeDriver(folder, slots=8)
            loaded[name] = Tiny(name, folder, reference, oracle, tokens, driver)
        return loaded[name]

    return get


@pytest.fixture(params=EXACT)
def tiny(request: pytest.FixtureRequest, load_tiny: Callable[[str], Tiny]) -> Tiny:
    """Every exact variant in turn."""
    return load_tiny(request.param)
