"""One rank of a captured engine in a process of its own, playing a log of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from flare_ray.contracts.plan import MaskAnswer, RoundPlan
from flare_ray.contracts.record import RoundReply
from flare_ray.device.executor import RankExecutor
from flare_ray.device.parallel.distributed import Rendezvous, connect
from flare_ray.device.prepare import prepare_rank
from tests.gpu.captured import config_of
from tests.support.scripted.harness import Driver

Log = Sequence[tuple[RoundPlan, np.ndarray | None, MaskAnswer | None]]
"""Plans, their masks, and what their barriers were answered."""


def recorded(driver: Driver) -> Log:
    """The log that a driver fills from now on."""
    log: list[tuple[RoundPlan, np.ndarray | None, MaskAnswer | None]] = []
    submit = driver.submit

    def submit_and_note(plan, masks=None):
        answers = plan.shape.has_barrier and driver.barrier is not None
        log.append((plan, masks, driver.barrier(plan.round_id, ()) if answers else None))
        return submit(plan, masks)

    driver.submit = submit_and_note
    return log


def replayed(executor: RankExecutor, log: Log) -> list[RoundReply]:
    """Replies of one rank to a log."""
    return [
        executor.execute(plan, masks, None if answer is None else lambda *_, a=answer: a)
        for plan, masks, answer in log
    ]


@dataclass(frozen=True)
class Work:
    """What a rank does: prepare the checkpoint of `folder`, execute `log`, and go on with its last
    round for ever if `endless`."""

    folder: Path
    size: int
    port: int
    log: Log
    endless: bool = False


def run_rank(rank: int, work: Work, report: Connection) -> None:
    """Sends (checksums, rows of rank 0, bytes reserved) once the log is done."""
    torch.cuda.set_device(rank)
    where = Rendezvous("127.0.0.1", work.port, rank, work.size)
    config = config_of(work.folder, tensor_parallel_size=work.size, debug_checks=False)
    executor = prepare_rank(config, connect(where, device=f"cuda:{rank}"))
    replies = replayed(executor, work.log)
    taken = torch.cuda.memory_reserved()
    report.send(([r.checksum for r in replies], [r.rows for r in replies], taken))
    program = executor.backend.program(work.log[-1][0].shape)
    with torch.inference_mode():
        while work.endless:
            program.replay()
            torch.cuda.synchronize()
