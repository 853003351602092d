"""Groups of one process per rank: gloo on the CPU, NCCL on CUDA, met at an explicit TCP address.

On the CPU an all-reduce gathers every rank's tensor and adds in rank order, since gloo's own sum
depends on the ring's position. NCCL reduces each element once and distributes the result, so its
ranks hold equal bits as well.

Failure (contract: A4). On the CPU a dead or hung peer raises `RankFailure` on every survivor: at
once where the connection breaks, after `timeout_s` where nothing answers; the first survivor to
notice closes its own connections, which wakes the others. NCCL runs on the device's own time: a
dead peer is noticed by the watchdog of the process group, which ends this process after
`timeout_s`; whoever holds the rank sees the end of its channel. Captured graphs are outside the
watchdog, so the engine kills survivors instead of joining them.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from flare_ray.device.ops.replay import repeatable
from flare_ray.device.parallel.groups import SingleGroup
from flare_ray.device.parallel.sums import sum_in_rank_order
from flare_ray.errors import ConfigError, ContractViolation, RankFailure

# Renamed in torch 2.13; the old name warns there.
_GATHER = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one group meet.

    Attributes:
        address: host of rank 0, which listens there.
        port: TCP port on it, free until the group is connected.
        rank: this process.
        size: processes in the group.
        timeout_s: longest wait for the slowest rank in one collective.
        join_timeout_s: longest wait for all ranks to arrive.
    """

    address: str
    port: int
    rank: int
    size: int
    timeout_s: float = 60.0
    join_timeout_s: float = 120.0


def connect(where: Rendezvous, *, device: torch.device | str) -> SingleGroup | DistributedGroup:
    """Join the group and return this rank's communicator.

    Args:
        where: the same address, port and size on every rank.
        device: "cpu" = gloo; a CUDA device with its index = NCCL on it.
    Raises:
        RankFailure: not all ranks arrived within `where.join_timeout_s`, or the port is taken.
        ConfigError: a rank, size or device that cannot be.
    """
    device = torch.device(device)
    if not 0 <= where.rank < where.size:
        raise ConfigError(f"rank {where.rank} is not in a group of {where.size}")
    if device.type == "cuda" and device.index is None:
        raise ConfigError("NCCL needs a numbered device (cuda:0), got cuda")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"no collectives for device {device}; use cpu or cuda:N")
    return SingleGroup() if where.size == 1 else DistributedGroup(where, device)


class DistributedGroup:
    """One rank of a group of processes. A process belongs to at most one group at a time.

    A failure is sticky: after the first `RankFailure` every call raises it again.
    """

    def __init__(self, where: Rendezvous, device: torch.device) -> None:
        self.rank = where.rank
        self.size = where.size
        self._where = where
        self._device = device
        self._failure: RankFailure | None = None
        self._open = False
        if dist.is_initialized():
            raise ContractViolation("this process is in a group already; close that one first")
        self._guard("joining the group", self._join)
        self._open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @repeatable
    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum over ranks, bit-identical on every rank; on CUDA in place where contiguous.

        Raises:
            RankFailure: a rank has died or does not answer (CPU; see the module's text for CUDA).
        """
        value = value.contiguous()
        if self._device.type == "cuda":
            self._guard("all_reduce", lambda: dist.all_reduce(value))
            return value
        return sum_in_rank_order(self._gather("all_reduce", value).unbind(0))

    @repeatable
    def all_gather(self, value: Tensor) -> Tensor:
        """Concatenation over ranks along the last dimension; raises as `all_reduce` does."""
        gathered = self._gather("all_gather", value.contiguous())
        return gathered.movedim(0, -2).flatten(-2)

    def barrier(self) -> None:
        """Wait until every rank is here; on CUDA the host waits for the device too."""
        token = self.all_reduce(torch.ones(1, device=self._device))
        if int(token.item()) != self.size:
            raise ContractViolation(f"{token.item()} ranks met in a group of {self.size}")

    def close(self) -> None:
        """Leave the group and free its sockets and communicators; harmless when repeated."""
        if self._open:
            self._open = False
            dist.destroy_process_group()

    def _join(self) -> None:
        where = self._where
        cuda = self._device.type == "cuda"
        if cuda:
            # Switch multicast is missing on part of the hosts and was off in all measurements.
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
            torch.cuda.set_device(self._device)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            where.address,
            where.port,
            where.size,
            where.rank == 0,
            datetime.timedelta(seconds=where.join_timeout_s),
        )
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=where.rank,
            world_size=where.size,
            timeout=datetime.timedelta(seconds=where.timeout_s),
            device_id=self._device if cuda else None,
        )

    def _gather(self, what: str, value: Tensor) -> Tensor:
        """Contributions of all ranks, [size, *value.shape]."""
        flat = value.new_empty(self.size * value.numel())
        self._guard(what, lambda: _GATHER(flat, value.view(-1)))
        return flat.view(self.size, *value.shape)

    def _guard(self, what: str, call: Callable[[], object]) -> None:
        """Run one call into the library; its failure becomes this group's."""
        if self._failure is not None:
            raise self._failure
        try:
            call()
        except (RuntimeError, ValueError) as error:
            where = self._where
            self._failure = RankFailure(
                f"rank {self.rank} of {self.size} at {where.address}:{where.port} failed in "
                f"{what}: {error}; a peer died, did not answer for {where.timeout_s:g} s or did "
                f"not come within {where.join_timeout_s:g} s; the group must be rebuilt",
                rank=-1,
                round_id=-1,
            )
            self._release_peers()
            raise self._failure from error

    def _release_peers(self) -> None:
        # Peers that wait for this rank, not for the dead one, see its connections close instead of
        # waiting for their own timeout. A CUDA group is left alone: taking it down can block on
        # the device, and its process is about to be killed.
        if self._device.type == "cpu" and dist.is_initialized():
            self._open = False
            dist.destroy_process_group()
