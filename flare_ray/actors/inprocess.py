"""An engine inside this process: ranks and controller are threads, Ray is not imported (contract:
G8). `debug-serve` and the offline class `LLM` run on it, and every test that needs real rounds.
"""

from __future__ import annotations

import torch

from flare_ray.actors.core import EngineCore, EngineParts
from flare_ray.actors.grammar.service import CompilingService, start_service
from flare_ray.actors.rank_loop import RankExecutor
from flare_ray.actors.thread_channel import RankThreads, ThreadChannel
from flare_ray.actors.vocabulary import engine_token_bytes
from flare_ray.config import EngineConfig
from flare_ray.contracts.manifest import agreed_manifest, manifest_digest
from flare_ray.device.parallel.groups import SingleGroup, local_groups
from flare_ray.errors import ConfigError, RankFailure

HEALTH_TIMEOUT_S = 30.0
"""Default of `EngineDeployment.health_timeout_s`, which a single process has no section for."""


def start_inprocess(
    config: EngineConfig,
    *,
    health_timeout_s: float = HEALTH_TIMEOUT_S,
) -> EngineCore:
    """Prepare the ranks of `config` on threads and start an engine; ready when this returns.

    Requests must have no reply address: their items go to the callback given at `submit`.

    Raises:
        ConfigError: CUDA with several ranks, which needs one process per device.
        CheckpointError: the checkpoint does not match its recipe.
        CapacityError: it does not fit.
        RankFailure: the first generation failed.
    """
    if config.device == "cuda" and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size {config.tensor_parallel_size} on cuda needs a process per GPU; "
            "use serve, or tensor_parallel_size 1 here"
        )
    threads = prepare_threads(config)
    return assemble(config, threads, health_timeout_s=health_timeout_s)


def prepare_threads(config: EngineConfig) -> RankThreads:
    """All ranks of `config` as threads, prepared together."""
    from flare_ray.device.prepare import prepare_rank

    size = config.tensor_parallel_size
    # A round that hangs is the channel's to report; while preparing, ranks load at their own pace.
    groups = local_groups(size, timeout_s=2 * config.rank_timeout_s) if size > 1 else ()

    def make_executor(rank: int) -> RankExecutor:
        # Per thread: a thread that has not set it would start a pool of every core.
        torch.set_num_threads(config.threads_per_rank)
        return prepare_rank(config, groups[rank] if groups else SingleGroup())

    def abort(rank: int, error: BaseException) -> None:
        if groups:
            groups[rank].fail(error)

    return RankThreads(size, make_executor, abort=abort)


def assemble(config: EngineConfig, threads: RankThreads, *, health_timeout_s: float) -> EngineCore:
    """A started engine over prepared rank threads, which end with it."""
    grammars: CompilingService | None = None
    try:
        manifest = threads.executors[0].manifest
        for rank, executor in enumerate(threads.executors):
            if manifest_digest(executor.manifest) != manifest_digest(manifest):
                raise RankFailure(
                    f"rank {rank} prepared another engine than rank 0", rank=rank, round_id=-1
                )
        manifest = agreed_manifest([executor.manifest for executor in threads.executors])
        grammars, no_grammars = start_service(config, manifest)
        parts = EngineParts(
            manifest=manifest,
            config=config,
            channel=ThreadChannel(threads, config.rank_timeout_s),
            token_bytes=engine_token_bytes(config, manifest),
            release_ranks=threads.stop,
            health_timeout_s=health_timeout_s,
            grammars=grammars,
            no_grammars=no_grammars,
        )
        core = EngineCore(parts)
    except BaseException:
        threads.stop()
        if grammars is not None:
            grammars.close()
        raise
    core.start()
    return core
