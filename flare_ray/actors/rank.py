"""The Ray shell of one tensor-parallel rank (contract: A1, A4).

Two phases: first every rank is placed and says where (node, process, GPUs), then all are prepared
at once, since they build one process group. From then on Ray carries nothing: a thread serves the
socket (`rank_loop.py`), and the process ends with its socket. `max_restarts=0`: a rank is never
revived beside a group that has lost it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import ray

from flare_ray.actors.listener import connect as connect_to_engine
from flare_ray.actors.openmp import wait_passively
from flare_ray.actors.rank_loop import (
    EXIT_FAILED,
    EXIT_HUNG_UP,
    HangUpWatch,
    LastWords,
    RankExecutor,
    failure_text,
    serve_rank,
)
from flare_ray.actors.wire import RankHello
from flare_ray.config import EngineConfig
from flare_ray.contracts.manifest import PreparedManifest, manifest_digest

logger = logging.getLogger(__name__)

CONNECT_LIMIT_S = 10.0
GROUP_TIMEOUT_S = 1800.0
"""Longest wait of a collective: ranks load weights at different speeds. A hang while serving is
noticed by the engine, after `rank_timeout_s`, not by the group."""

PrepareRank = Callable[["RankStart"], RankExecutor]
"""Builds a rank's executor on the thread that will use it."""


@dataclass(frozen=True, slots=True)
class RankStart:
    """What a rank is told in phase two.

    Attributes:
        address: where the engine listens.
        rendezvous: host and port at which the ranks of this engine meet.
        prepare: how to build the executor; `prepare_on_device` outside tests of the actors alone.
    """

    config: EngineConfig
    rank: int
    world_size: int
    address: str
    rendezvous: tuple[str, int]
    prepare: PrepareRank


class RankPlace(msgspec.Struct, frozen=True):
    """Where a rank runs, as it says itself in phase one."""

    node_id: str
    pid: int
    gpu_ids: tuple[str, ...]


class RankReady(msgspec.Struct, frozen=True):
    """What a rank has prepared; digests must agree over ranks before the engine serves."""

    digest: str
    manifest: PreparedManifest


def prepare_on_device(start: RankStart) -> RankExecutor:
    """The executor of a real rank: process group, weights, state, programs.

    Raises:
        FlareError: the group did not form, the checkpoint is wrong, or it does not fit.
    """
    wait_passively()
    import torch

    from flare_ray.device.parallel.distributed import Rendezvous, connect
    from flare_ray.device.prepare import prepare_rank

    cuda = start.config.device == "cuda"
    if not cuda:
        torch.set_num_threads(start.config.threads_per_rank)
    host, port = start.rendezvous
    where = Rendezvous(host, port, start.rank, start.world_size, GROUP_TIMEOUT_S)
    # Ray shows each rank its own GPUs only, so the first visible one is it.
    group = connect(where, device="cuda:0" if cuda else "cpu")
    return prepare_rank(start.config, group)


class RankActor:
    """One rank. Used by its engine only; methods run on the actor's main thread."""

    def __init__(self) -> None:
        self._words = LastWords()
        self._words.catch_fatal_signals()
        self._ready: RankReady | None = None
        self._error: BaseException | None = None
        self._prepared = threading.Event()

    def place(self) -> RankPlace:
        """Phase one: where this rank runs."""
        context = ray.get_runtime_context()
        gpu_ids = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        return RankPlace(context.get_node_id(), os.getpid(), gpu_ids)

    def prepare(self, start: RankStart) -> RankReady:
        """Phase two: join the group, load, build and warm; then serve on a thread of its own.

        Raises:
            Exception: whatever preparation raised.
        """
        thread = threading.Thread(
            target=self._prepare_and_serve, args=(start,), name="flare-rank", daemon=True
        )
        thread.start()
        self._prepared.wait()
        if self._error is not None:
            raise self._error
        assert self._ready is not None
        return self._ready

    def _prepare_and_serve(self, start: RankStart) -> None:
        """Everything that touches the device runs on this one thread, which owns its kernel pool,
        its current device and its inference mode."""
        try:
            hello = RankHello(start.rank, start.world_size, os.getpid())
            sock = connect_to_engine(
                start.address, hello, words_fd=self._words.fd, timeout_s=CONNECT_LIMIT_S
            )
            # From here on the engine's end, in whatever way, is this process's end.
            HangUpWatch(sock)
            executor = start.prepare(start)
            self._ready = RankReady(manifest_digest(executor.manifest), executor.manifest)
        except BaseException as error:
            # Raised by `prepare` on the actor's main thread.
            self._words.say(failure_text(error))
            self._error = error
            self._prepared.set()
            return
        self._prepared.set()
        try:
            serve_rank(sock, executor, rank=start.rank)
        except BaseException as error:
            self._words.say(failure_text(error))
            # No clean-up: exit handlers of a collective library may wait for ranks that are gone.
            os._exit(EXIT_FAILED)
        os._exit(EXIT_HUNG_UP)
