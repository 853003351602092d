"""Prepared cores: what a start may take over from an earlier one (contract: G7).

    CORE/core.json   manifest, prices of rounds, bytes of the graphs' pool, chip, torch release
    CORE/kernels/    kernels that were compiled

A start from a core takes its prices instead of timing every round, its pool instead of an estimate,
and its kernels. Weights stay in the checkpoint, and graphs are captured again: they hold addresses
of the process they were captured in.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from flare_ray.contracts.manifest import (
    MANIFEST_VERSION,
    PreparedCore,
    PreparedManifest,
)
from flare_ray.errors import ConfigError

CORE_FILE = "core.json"
KERNELS = "kernels"
SAME = (
    "version",
    "recipe",
    "checkpoint_name",
    "world_size",
    "device",
    "dtype",
    "vocab_size",
    "captured",
    "expert_weights",
    "tables",
)
"""Fields in which a start equals its core."""
AT_MOST = ("slots", "context_tokens", "prefill_tokens", "draft_tokens")
"""Fields in which it may be smaller."""


def device_name(device: str) -> str:
    """The chip that programs run on."""
    return torch.cuda.get_device_name() if device == "cuda" else platform.machine()


def use_kernels(core: str | None) -> None:
    """Let compiled kernels lie in a core; before the first one is compiled or loaded.

    A user's own choice of place wins.
    """
    if core is not None:
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(core) / KERNELS))


def write_core(folder: Path, manifest: PreparedManifest, *, pool_bytes: int) -> Path:
    """Write a prepared engine's core; the file.

    Args:
        manifest: with prices.
        pool_bytes: of the captured graphs, 0 on CPU.
    Raises:
        ConfigError: the folder cannot be written.
    """
    budget = msgspec.structs.replace(manifest.budget, graph_pool_bytes=pool_bytes)
    core = PreparedCore(
        manifest=msgspec.structs.replace(manifest, budget=budget),
        device_name=device_name(manifest.device),
        torch=str(torch.__version__),
    )
    encoded = msgspec.json.encode(core, order="deterministic")
    path = folder / CORE_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(encoded, indent=1))
    except OSError as error:
        raise ConfigError(f"the core cannot be written: {error}") from error
    return path


def read_core(folder: str) -> PreparedCore:
    """The core in a folder.

    Raises:
        ConfigError: there is none, or it is of another version.
    """
    path = Path(folder) / CORE_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"core: {path} cannot be read ({error.strerror}); name a folder that `flare-ray "
            "prepare` wrote, or leave core out"
        ) from None
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version == MANIFEST_VERSION:
            return msgspec.json.decode(data, type=PreparedCore)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"core: {path} is no prepared core: {error}; prepare it again") from None
    raise ConfigError(
        f"core: {path} has version {version}, this release reads {MANIFEST_VERSION}; prepare it "
        "again"
    )


class _Versioned(msgspec.Struct):
    version: int


def selected(manifest: PreparedManifest, core: PreparedCore) -> PreparedManifest:
    """A planned engine with what its core knows.

    Raises:
        ConfigError: it asks for something that the core does not hold; every difference is named.
    """
    held = core.manifest
    if problems := list(_problems(manifest, held)):
        raise ConfigError(
            "core: " + "; ".join(problems) + "; ask for less, or prepare the core again"
        )
    wanted = set(manifest.shapes)
    budget = manifest.budget
    if manifest.captured:
        pool = held.budget.graph_pool_bytes
        budget = msgspec.structs.replace(budget, graph_pool_bytes=pool)
    prices = tuple((shape, cost) for shape, cost in held.prices if shape in wanted)
    return msgspec.structs.replace(manifest, budget=budget, prices=prices)


def check_device(manifest: PreparedManifest, core: PreparedCore) -> None:
    """Refuse a core of another chip or torch release: its prices and kernels mean nothing here.

    Raises:
        ConfigError: naming both.
    """
    here = {"device": device_name(manifest.device), "torch": str(torch.__version__)}
    there = {"device": core.device_name, "torch": core.torch}
    for what, name in here.items():
        if name != there[what]:
            raise ConfigError(
                f"core: it was prepared on {what} {there[what]}, here is {name}; prepare it again"
            )


def _problems(manifest: PreparedManifest, held: PreparedManifest) -> Iterator[str]:
    for name in SAME:
        ours, theirs = getattr(manifest, name), getattr(held, name)
        if ours != theirs:
            yield f"{name} is {ours}, the core holds {theirs}"
    for name in AT_MOST:
        ours, theirs = getattr(manifest, name), getattr(held, name)
        if ours > theirs:
            yield f"{name} is {ours}, the core holds {theirs}"
    prepared = set(held.shapes)
    missing = [shape for shape in manifest.shapes if shape not in prepared]
    if missing:
        first = missing[0]
        yield (
            f"{len(missing)} programs are not in it, the first: {first.kind} of "
            f"{first.batch_capacity} lanes, {first.token_capacity} rows each"
        )
