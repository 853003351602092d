"""Tiny checkpoints, what an independent implementation makes of them, and drivers over them: built
once a run. A recipe adds its variants to `VARIANTS` and inherits every test of parity/."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from tests.support import glm_tiny, llama_tiny, qwen_tiny
from tests.support.recipe_driver import Lane, RecipeDriver
from tests.support.recipe_oracle import MIN_GAP, Oracle, Reference

ORACLE_RELEASE = "5.24"
"""First transformers that reads every family's published layer types."""
LENGTH = 150
"""Tokens of every tiny sequence: three pages, beyond each variant's selection budget."""


@dataclass(frozen=True)
class Variant:
    """A tiny checkpoint of one family.

    Attributes:
        module: of transformers that the oracle needs.
        write: (folder, name) -> the folder, written.
        sequence: (vocabulary, length) -> tokens.
        plain: every layer attends to everything before it: nothing is selected, nothing recurs.
    """

    module: str
    write: Callable[[Path, str], Path]
    sequence: Callable[[int, int], Tensor]
    plain: bool = False


def _plain_sequence(vocabulary: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, vocabulary - 8, (length,), generator=generator)


GLM = Variant("glm5_next", glm_tiny.write_checkpoint, _plain_sequence)
QWEN = Variant("qwen4_exp", qwen_tiny.write_checkpoint, qwen_tiny.sequence)
LLAMA = Variant("llama", llama_tiny.write_checkpoint, _plain_sequence, plain=True)
VARIANTS = {
    **dict.fromkeys(glm_tiny.TEXTS, GLM),
    **dict.fromkeys(qwen_tiny.TEXTS, QWEN),
    **dict.fromkeys(llama_tiny.TEXTS, LLAMA),
}


def reference_of(name: str, folder: Path) -> Reference:
    """The independent implementation; importing it needs its library."""
    if VARIANTS[name] is GLM:
        from tests.support.glm_oracle import TransformersGlm

        return TransformersGlm(folder)
    if VARIANTS[name] is LLAMA:
        from tests.support.llama_oracle import TransformersLlama

        return TransformersLlama(folder)
    from tests.support.qwen_oracle import TransformersQwen

    return TransformersQwen(folder)


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
            folders[name] = VARIANTS[name].write(tmp_path_factory.mktemp(name), name)
        return folders[name]

    return get


@dataclass
class Tiny:
    """A variant: its folder, the reference and its results for one sequence."""

    name: str
    folder: Path
    reference: Any
    oracle: Oracle
    driver: RecipeDriver

    @property
    def tokens(self) -> list[int]:
        return self.oracle.tokens.tolist()

    def fresh(self, count: int = 1, *, pages: int = 3) -> list[Lane]:
        return self.driver.fresh(count, pages=pages)


@pytest.fixture(scope="session")
def load_tiny(tiny_folder: Callable[[str], Path]) -> Callable[[str], Tiny]:
    loaded: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in loaded:
            variant = VARIANTS[name]
            pytest.importorskip(
                f"transformers.models.{variant.module}",
                reason=f"the oracle is transformers' {variant.module} ({ORACLE_RELEASE})",
            )
            found = importlib.metadata.version("transformers")
            if Version(found) < Version(ORACLE_RELEASE):
                pytest.skip(f"the oracle is transformers {ORACLE_RELEASE} or newer, found {found}")
            folder = tiny_folder(name)
            reference, driver = reference_of(name, folder), RecipeDriver(folder, slots=8)
            oracle = reference.run(variant.sequence(driver.geometry.vocab_size, LENGTH))
            assert oracle.gap > MIN_GAP, f"{name}: choose a seed whose selections are decided"
            if not variant.plain:
                assert oracle.sparse_rows > 30, f"{name}: selection is hardly exercised"
            loaded[name] = Tiny(name, folder, reference, oracle, driver)
        return loaded[name]

    return get


SLOW = ("qwen-long",)
"""Variants that the default run leaves out."""


def _params(names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in names]


@pytest.fixture(params=_params(VARIANTS))
def tiny(request: pytest.FixtureRequest, load_tiny: Callable[[str], Tiny]) -> Tiny:
    """Every variant in turn."""
    return load_tiny(request.param)


@pytest.fixture(params=_params(name for name, variant in VARIANTS.items() if not variant.plain))
def hybrid(request: pytest.FixtureRequest, load_tiny: Callable[[str], Tiny]) -> Tiny:
    """Every variant with recurrent layers and selecting ones."""
    return load_tiny(request.param)
