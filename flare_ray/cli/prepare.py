"""`flare-ray prepare`: one preparation whose results later starts take over (contract: G7)."""

from __future__ import annotations

from pathlib import Path

from flare_ray.config import EngineConfig
from flare_ray.contracts.manifest import agreed_manifest
from flare_ray.device.core import use_kernels, write_core
from flare_ray.device.executor import RankExecutor
from flare_ray.device.parallel.groups import SingleGroup, run_ranks
from flare_ray.device.prepare import prepare_rank
from flare_ray.errors import ConfigError


def prepare_core(config: EngineConfig, folder: Path) -> str:
    """Prepare all ranks of an engine in this process and write their core; a line about it.

    Raises:
        ConfigError: the settings name a core already, or need one process per device.
        FlareError: as `device.prepare.prepare_rank`.
    """
    if config.core is not None:
        raise ConfigError(f"core is {config.core}: prepare measures anew, leave it out")
    ranks = config.tensor_parallel_size
    if config.device == "cuda" and ranks > 1:
        raise ConfigError(
            f"tensor_parallel_size {ranks} on cuda needs a process per GPU, prepare runs in one; "
            "start without core"
        )
    # A fixed width reads no prices, but another start from the same core may.
    policy = {"policy": "adaptive", "fixed_width": None}
    settings = config.speculation.model_copy(update=policy)
    config = config.model_copy(update={"speculation": settings})
    use_kernels(str(folder))
    executors: list[RankExecutor]
    if ranks == 1:
        executors = [prepare_rank(config, SingleGroup())]
    else:
        executors = run_ranks(ranks, lambda comm: prepare_rank(config, comm))
    for executor in executors:
        executor.close()
    manifest = agreed_manifest([executor.manifest for executor in executors])
    pool_bytes = max(executor.backend.pool_bytes for executor in executors)
    path = write_core(folder, manifest, pool_bytes=pool_bytes)
    return (
        f"{path}: {len(manifest.shapes)} programs, {manifest.graphs} graphs in {pool_bytes:,} "
        f"bytes, {len(manifest.prices)} rounds priced"
    )
