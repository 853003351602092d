"""Tiny checkpoints, what transformers makes of them, and drivers over them: built once a run."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from tests.support.glm_tiny import TEXTS, write_checkpoint
from tests.support.recipe_driver import Lane, RecipeDriver

ORACLE_RELEASE = "5.24"
"""First transformers whose glm5_next reads the published layer types."""
LENGTH = 150
"""Tokens of every tiny sequence: three pages, beyond each variant's selection budget."""
VARIANTS = tuple(TEXTS)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoint folder of a variant."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folders[name] = write_checkpoint(tmp_path_factory.mktemp(name), name)
        return folders[name]

    return get


@dataclass
class Tiny:
    """A variant: its folder, transformers' model and its results for one sequence."""

    name: str
    folder: Path
    reference: object
    oracle: object
    driver: RecipeDriver

    @property
    def tokens(self) -> list[int]:
        return self.oracle.tokens.tolist()

    def fresh(self, count: int = 1, *, pages: int = 3) -> list[Lane]:
        """New lanes over poisoned state: anything read before it was written is NaN."""
        self.driver.poison()
        numbers = torch.randperm(
            self.driver.store.limits.num_pages - 1, generator=torch.Generator().manual_seed(count)
        )
        return [
            self.driver.open(slot, (numbers[slot * pages : (slot + 1) * pages] + 1).tolist())
            for slot in range(count)
        ]


@pytest.fixture(scope="session")
def load_tiny(tiny_folder: Callable[[str], Path]) -> Callable[[str], Tiny]:
    pytest.importorskip(
        "transformers.models.glm5_next",
        reason="the oracle is transformers' glm5_next (5.24); this transformers has none",
    )
    found = importlib.metadata.version("transformers")
    if Version(found) < Version(ORACLE_RELEASE):
        pytest.skip(f"the oracle is transformers {ORACLE_RELEASE} or newer, found {found}")
    from tests.support.glm_oracle import MIN_GAP, TransformersGlm

    loaded: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in loaded:
            folder = tiny_folder(name)
            reference = TransformersGlm(folder)
            vocabulary = reference.config.vocab_size
            generator = torch.Generator().manual_seed(3)
            tokens = torch.randint(3, vocabulary - 8, (LENGTH,), generator=generator)
            oracle = reference.run(tokens)
            assert oracle.gap > MIN_GAP, f"{name}: choose a seed whose selections are decided"
            assert oracle.sparse_rows > 30, f"{name}: selection is hardly exercised"
            loaded[name] = Tiny(name, folder, reference, oracle, RecipeDriver(folder, slots=8))
        return loaded[name]

    return get


@pytest.fixture(params=VARIANTS)
def tiny(request: pytest.FixtureRequest, load_tiny: Callable[[str], Tiny]) -> Tiny:
    """Every variant in turn."""
    return load_tiny(request.param)
