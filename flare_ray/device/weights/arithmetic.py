"""Arithmetic that a checkpoint declares and this engine does not run: answered by the deployment,
or refused by name (contract: R5)."""

from __future__ import annotations

from typing import Literal

from flare_ray.device.weights.index import CheckpointIndex
from flare_ray.device.weights.manifest import ValidatedWeights
from flare_ray.device.weights.quantisation import check_kv_cache
from flare_ray.errors import CheckpointError


def check_arithmetic(
    index: CheckpointIndex,
    validated: ValidatedWeights,
    *,
    kv_dtype: str | None,
    quantised_activations: Literal["as_declared", "never"],
) -> tuple[str, ...]:
    """Lines for the log about every declaration that the deployment overruled.

    Args:
        kv_dtype: the deployment's answer to a declared KV-cache type.
        quantised_activations: its answer to weights declared W4A4.
    Raises:
        CheckpointError: a declaration without an answer; names the setting to use.
    """
    notices = [*index.notices, *validated.notices]
    cache = check_kv_cache(index, kv_dtype=kv_dtype)
    if cache:
        notices.append(cache)
    names = [name for name, weight in validated.weights.items() if weight.quantises_activations]
    if names and quantised_activations == "as_declared":
        raise CheckpointError(
            f"{index.folder} declares {len(names)} weights with 4-bit activations (first: "
            f"{names[0]}), which this engine does not round yet; state quantised_activations: "
            "never to run them with unrounded activations (W4A16)"
        )
    if names:
        notices.append(f"{len(names)} weights declared W4A4 run as W4A16")
    return tuple(notices)
