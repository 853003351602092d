"""Processes of the gloo tests. Each scenario is run by every rank and returns what it saw."""

import io
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from flare_ray.device.parallel.distributed import Rendezvous, connect
from flare_ray.errors import RankFailure

RANKS = 4
VICTIM = 2
SLEEPER = 3
KILL_TIMEOUT_S = 30.0
"""Far above what a broken connection takes to be noticed."""
HANG_TIMEOUT_S = 1.5
HOST = "127.0.0.1"
SHAPES = ((3, 8), (1, 5), (7,), (2, 3, 4))
DTYPES = (torch.float32, torch.bfloat16)
CASES_OF_SUMS = tuple((shape, dtype) for shape in SHAPES for dtype in DTYPES)


@dataclass(frozen=True)
class Ports:
    """One port per group that is formed."""

    pair: int
    pair_again: int
    four: int
    killed: int
    hung: int


def contribution(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings: magnitudes spread so that the order of adding shows in the bits."""
    generator = torch.Generator().manual_seed(100 + rank)
    value = torch.randn(shape, generator=generator) * 10.0 ** (rank * 2)
    return value.to(dtype)


def collect(group, device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(sum, concatenation) for every shape and type, then a transposed (strided) input."""
    seen = []
    for shape in SHAPES:
        for dtype in DTYPES:
            value = contribution(group.rank, shape, dtype).to(device)
            seen.append((group.all_reduce(value.clone()), group.all_gather(value)))
    strided = contribution(group.rank, (4, 6), torch.float32).to(device).T
    seen.append((group.all_reduce(strided), group.all_gather(strided)))
    return seen


def run_worker(rank: int, ports: Ports, report: Connection) -> None:
    """All scenarios in turn; one message with everything seen."""
    torch.set_num_threads(1)
    seen = {}
    with torch.inference_mode():
        if rank < 2:
            seen["pair"] = healthy(rank, 2, ports.pair)
            seen["pair_again"] = healthy(rank, 2, ports.pair_again)
        seen["four"] = healthy(rank, RANKS, ports.four)
        seen["hung"] = hung(rank, ports.hung)
        seen["killed"] = killed(rank, ports.killed)
    send(seen, report)


def send(seen: dict[str, object], report: Connection) -> None:
    """As bytes: a sent tensor would be fetched from this process, which may have ended by then."""
    buffer = io.BytesIO()
    torch.save(seen, buffer)
    report.send_bytes(buffer.getvalue())
    report.close()


def run_nccl_worker(rank: int, size: int, port: int, report: Connection) -> None:
    """The healthy scenario on one GPU per rank, then the same collectives captured and replayed."""
    device = f"cuda:{rank}"
    where = Rendezvous(HOST, port, rank, size)
    with torch.inference_mode(), connect(where, device=device) as group:
        eager = [(total.cpu(), joined.cpu()) for total, joined in collect(group, device)]
        group.barrier()
        value = torch.zeros(4, device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            joined = group.all_gather(value)
            total = group.all_reduce(value.clone())
        value.fill_(10.0 * (rank + 1))
        graph.replay()
        torch.cuda.synchronize()
        send({"eager": eager, "replayed": (total.cpu(), joined.cpu())}, report)
        del graph


def healthy(rank: int, size: int, port: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with connect(Rendezvous(HOST, port, rank, size, timeout_s=60.0), device="cpu") as group:
        seen = collect(group)
        group.barrier()
    return [(total.clone(), joined.clone()) for total, joined in seen]


def killed(rank: int, port: int) -> dict[str, object]:
    """One rank dies by SIGKILL while the others enter a collective."""
    group = connect(Rendezvous(HOST, port, rank, RANKS, timeout_s=KILL_TIMEOUT_S), device="cpu")
    group.barrier()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    return failures(group)


def hung(rank: int, port: int) -> dict[str, object]:
    """One rank stops answering without dying."""
    where = Rendezvous(HOST, port, rank, RANKS, timeout_s=HANG_TIMEOUT_S)
    group = connect(where, device="cpu")
    group.barrier()
    if rank == SLEEPER:
        time.sleep(1.5 * HANG_TIMEOUT_S)
    return failures(group)


def failures(group) -> dict[str, object]:
    """How long the next collective took to fail, and whether the failure stays."""
    start = time.monotonic()
    first = second = None
    try:
        group.all_reduce(torch.ones(4))
    except RankFailure as error:
        first = error
    elapsed = time.monotonic() - start
    try:
        group.all_gather(torch.ones(4))
    except RankFailure as error:
        second = error
    group.close()
    return {"elapsed_s": elapsed, "text": str(first), "raised": first is not None,
            "sticky": first is second}  # fmt: skip
