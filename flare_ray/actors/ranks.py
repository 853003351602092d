"""The ranks of one engine as its owner sees them: place, prepare, link, kill (contract: A1, A4).

Ray starts the processes and reports faults of preparation; ends are sent by signal through process
descriptors, because the engine runs on the same node (STRICT_PACK) and a signal needs nobody's
cooperation: device memory is free when the process is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from flare_ray.actors.channel import SocketChannel
from flare_ray.actors.listener import RankListener
from flare_ray.actors.placement import in_bundle
from flare_ray.actors.preflight import gpus_per_rank
from flare_ray.actors.rank import (
    PrepareRank,
    RankActor,
    RankPlace,
    RankReady,
    RankStart,
)
from flare_ray.config import DeploymentConfig
from flare_ray.contracts.manifest import PreparedManifest, agreed_manifest
from flare_ray.errors import CapacityError, ConfigError, RankFailure

logger = logging.getLogger("ray.serve.flare")

PLACE_LIMIT_S = 60.0
"""Seconds for the rank processes to start: their bundles are reserved, so only Python starts."""
PROGRESS_S = 30.0
"""Seconds between two lines in the log while weights load."""
GREETING_LIMIT_S = 10.0
SOFT_LIMIT_S = 1.0
"""Seconds for Ray to end all ranks before they get SIGKILL."""
KILL_LIMIT_S = 5.0
"""Seconds after which a killed rank that is still there is reported (contract: A4)."""


@dataclass(slots=True)
class Ranks:
    """Rank actors of one engine, started.

    Attributes:
        manifest: what all ranks have prepared.
        channel: the controller's way to them.
        places: node, process and GPUs by rank.
    """

    manifest: PreparedManifest
    channel: SocketChannel
    places: list[RankPlace]
    processes: RankProcesses

    def kill(self) -> None:
        """End all ranks now and wait until they are gone; idempotent."""
        self.processes.kill()


@dataclass(slots=True)
class RankProcesses:
    """Handles of the rank actors, held for life: Ray ends actors that nobody refers to."""

    actors: list[Any] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)

    def know(self, places: list[RankPlace]) -> None:
        """Take hold of the processes themselves."""
        for place in places:
            self.pids.append(place.pid)
            self.descriptors.append(os.pidfd_open(place.pid))

    def kill(self) -> None:
        """End every rank and wait for the ends of their processes; idempotent.

        Ray's own kill comes first, so that its logs do not report a crash; whoever is still there
        a moment later gets SIGKILL.
        """
        actors, self.actors = self.actors, []
        descriptors, self.descriptors = self.descriptors, []
        for actor in actors:
            ray.kill(actor, no_restart=True)
        for rank, descriptor in enumerate(descriptors):
            if not _has_ended(descriptor, SOFT_LIMIT_S / len(descriptors)):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            if not _has_ended(descriptor, KILL_LIMIT_S):
                logger.error(
                    "rank %d (pid %d) is still there %.0f s after SIGKILL",
                    rank,
                    self.pids[rank],
                    KILL_LIMIT_S,
                )
            os.close(descriptor)


def _has_ended(descriptor: int, limit_s: float) -> bool:
    """Whether the process of a descriptor ends within `limit_s`."""
    ended, _, _ = select.select([descriptor], [], [], limit_s)
    return bool(ended)


def start_ranks(config: DeploymentConfig, group: PlacementGroup, prepare: PrepareRank) -> Ranks:
    """Start, prepare and link the ranks of one engine inside its placement group.

    Raises:
        CapacityError: a rank process did not start in time.
        RankFailure: a rank died while it was prepared, did not greet, or manifests differ.
        FlareError: what a rank's preparation raised, such as CheckpointError.
    """
    processes = RankProcesses()
    world_size = config.engine.tensor_parallel_size
    listener = RankListener(world_size)
    try:
        places = _place(config, group, processes)
        rendezvous = ("127.0.0.1", _free_port())
        references = [
            actor.prepare.remote(
                RankStart(
                    config=config.engine,
                    rank=rank,
                    world_size=world_size,
                    address=listener.address,
                    rendezvous=rendezvous,
                    prepare=prepare,
                )
            )
            for rank, actor in enumerate(processes.actors)
        ]
        manifest = _agreed_manifest(_all_ready(references))
        links = listener.accept(timeout_s=GREETING_LIMIT_S)
    except BaseException:
        processes.kill()
        listener.close()
        raise
    channel = SocketChannel(links, config.engine.rank_timeout_s)
    return Ranks(manifest, channel, places, processes)


def _place(
    config: DeploymentConfig, group: PlacementGroup, processes: RankProcesses
) -> list[RankPlace]:
    """Phase one: start the actors and learn where they run."""
    world_size = config.engine.tensor_parallel_size
    remote = ray.remote(RankActor)
    for rank in range(world_size):
        processes.actors.append(
            remote.options(
                num_cpus=config.engine_deployment.cpus_per_rank,
                num_gpus=gpus_per_rank(config),
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=in_bundle(group, rank),
            ).remote()
        )
    references = [actor.place.remote() for actor in processes.actors]
    try:
        places: list[RankPlace] = ray.get(references, timeout=PLACE_LIMIT_S)
    except ray.exceptions.GetTimeoutError:
        raise CapacityError(
            f"not all {world_size} rank processes started in {PLACE_LIMIT_S:g} s though their "
            "bundles are reserved; see Ray's worker logs"
        ) from None
    except ray.exceptions.RayActorError as error:
        raise RankFailure(
            f"a rank process died before it was placed: {error}", rank=-1, round_id=-1
        ) from error
    here = ray.get_runtime_context().get_node_id()
    elsewhere = [rank for rank, place in enumerate(places) if place.node_id != here]
    if elsewhere:
        raise ConfigError(
            f"ranks {elsewhere} run on another node than their engine; deploy with "
            "placement_group_strategy STRICT_PACK"
        )
    processes.know(places)
    return places


def _all_ready(references: Sequence[ray.ObjectRef]) -> list[RankReady]:
    """Wait for all ranks' preparation; the first failure ends it, whoever's it is."""
    pending = list(references)
    started = time.monotonic()
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=PROGRESS_S)
        for reference in done:
            _raise_failure(reference, references.index(reference))
        if not done:
            ranks = [references.index(reference) for reference in pending]
            logger.info("preparing for %.0f s: ranks %s", time.monotonic() - started, ranks)
    return ray.get(references)


def _raise_failure(reference: ray.ObjectRef, rank: int) -> None:
    try:
        ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        # The rank's own exception: its type and message, without Ray's wrapper.
        raise error.cause from error
    except ray.exceptions.RayActorError as error:
        raise RankFailure(
            f"rank {rank} died while it was prepared: {error}", rank=rank, round_id=-1
        ) from error


def _agreed_manifest(ready: list[RankReady]) -> PreparedManifest:
    for rank, answer in enumerate(ready):
        if answer.digest != ready[0].digest:
            raise RankFailure(
                f"ranks prepared different engines: rank 0 has manifest {ready[0].digest}, rank "
                f"{rank} has {answer.digest}",
                rank=-1,
                round_id=-1,
            )
    return agreed_manifest([answer.manifest for answer in ready])


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
