"""Groups inside one process: a single rank, and ranks as threads (tests, debugging).

A collective of `LocalGroup`: each rank posts a copy of its tensor, all meet at a barrier, each
computes the same expression over the posted tensors in rank order. Posts alternate between two
sets of places, so one barrier is enough: a rank can reach the second collective after this one,
which would overwrite a place, only after every rank has passed the next barrier and therefore has
finished reading here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from flare_ray.device.ops.replay import repeatable
from flare_ray.device.parallel.sums import sum_in_rank_order
from flare_ray.errors import ContractViolation, RankFailure
from flare_ray.recipes.declaration import Communicator

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 60.0


class SingleGroup:
    """The group of one rank: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, value: Tensor) -> Tensor:
        """`value` itself."""
        return value

    def all_gather(self, value: Tensor) -> Tensor:
        """`value` itself."""
        return value

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class _Post:
    kind: str
    value: Tensor


class _Meeting:
    """What the threads of one group share: places for posts, and a barrier.

    The barrier is one lock per rank, held while its rank waits; the last rank to arrive opens the
    others'. (threading.Barrier does the same through a condition at twice the cost, and an eager
    round meets some hundred times.)
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.places: tuple[list[_Post | None], ...] = ([None] * size, [None] * size)
        self.arrived = [0] * size
        self.failure: RankFailure | None = None
        self._gates = [threading.Lock() for _ in range(size)]
        self._lock = threading.Lock()
        self._waiting = 0
        self._meetings = 0
        for gate in self._gates:
            gate.acquire()

    def wait(self, rank: int) -> bool:
        """Meet the other ranks. False: not all came in time, or one has failed."""
        with self._lock:
            before = self._meetings
            self._waiting = (self._waiting + 1) % len(self._gates)
            if self._waiting == 0:
                self._meetings += 1
                for other, gate in enumerate(self._gates):
                    if other != rank and gate.locked():
                        gate.release()
                return True
        # Opened by the last to arrive or by a failure; only the count tells which. A rank that met
        # the others gets its result even if one of them has failed since.
        self._gates[rank].acquire(timeout=self.timeout_s)
        return self._meetings != before

    def fail(self, failure: RankFailure) -> RankFailure:
        """Record the first failure, wake everyone who waits, return the one that counts."""
        with self._lock:
            if self.failure is None:
                self.failure = failure
            for gate in self._gates:
                if gate.locked():
                    gate.release()
            return self.failure


class LocalGroup:
    """One rank of a group whose ranks are threads of this process (CPU tensors).

    Obtained from `local_groups`; each belongs to one thread at a time. A failure is sticky: once a
    rank has failed or was missed for `timeout_s`, every collective of every rank raises.
    """

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting
        self._count = 0

    @repeatable
    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum over ranks in rank order; a new tensor, bit-identical on every rank.

        Raises:
            RankFailure: another rank failed, or did not arrive in time.
            ContractViolation: ranks called different collectives, or with different shapes.
        """
        return sum_in_rank_order(self._exchange("all_reduce", value))

    @repeatable
    def all_gather(self, value: Tensor) -> Tensor:
        """Concatenation over ranks along the last dimension; raises as `all_reduce` does."""
        return torch.cat(self._exchange("all_gather", value), dim=-1)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed; their collectives raise at once."""
        self._meeting.fail(
            RankFailure(
                f"rank {self.rank} of a local group failed: {type(error).__name__}: {error}; see "
                "its own error for what to change",
                rank=self.rank,
                round_id=-1,
            )
        )

    def close(self) -> None:
        """Leave the group; ranks that still expect this one get a RankFailure."""
        self.fail(RuntimeError("it has left the group"))

    def _exchange(self, kind: str, value: Tensor) -> list[Tensor]:
        if value.device.type != "cpu":
            raise ContractViolation(
                f"a local group exchanges CPU tensors, got one on {value.device}; run one process "
                "per device instead"
            )
        meeting, self._count = self._meeting, self._count + 1
        places = meeting.places[self._count % 2]
        # A copy: the caller may overwrite its buffer while slower ranks still read it here.
        places[self.rank] = _Post(kind, value.clone(memory_format=torch.contiguous_format))
        meeting.arrived[self.rank] = self._count
        if meeting.failure is not None or not meeting.wait(self.rank):
            raise meeting.fail(self._missing())
        posts = [post for post in places if post is not None]
        self._compare(posts)
        return [post.value for post in posts]

    def _missing(self) -> RankFailure:
        """The failure of whoever has not arrived; used only where no rank reported one itself."""
        late = [r for r, count in enumerate(self._meeting.arrived) if count < self._count]
        return RankFailure(
            f"ranks {late} of a local group of {self.size} did not reach collective "
            f"{self._count} within {self._meeting.timeout_s:g} s; a rank is stuck or ran fewer "
            "collectives",
            rank=late[0] if len(late) == 1 else -1,
            round_id=-1,
        )

    def _compare(self, posts: list[_Post]) -> None:
        first = posts[0]
        for rank, post in enumerate(posts):
            if (post.kind, post.value.shape, post.value.dtype) != (
                first.kind,
                first.value.shape,
                first.value.dtype,
            ):
                raise ContractViolation(
                    f"ranks disagree about collective {self._count}: rank 0 calls {first.kind} "
                    f"with {list(first.value.shape)} {first.value.dtype}, rank {rank} {post.kind} "
                    f"with {list(post.value.shape)} {post.value.dtype}"
                )


def local_groups(size: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[LocalGroup, ...]:
    """The members of one local group, to be handed to `size` threads.

    Args:
        timeout_s: longest wait for the slowest rank in one collective.
    """
    if size < 1:
        raise ContractViolation(f"a group has at least one rank, got {size}")
    meeting = _Meeting(size, timeout_s)
    return tuple(LocalGroup(rank, size, meeting) for rank in range(size))


def run_ranks(
    size: int, fn: Callable[[Communicator], T], *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[T]:
    """Run `fn` once per rank, each in a thread with its communicator; results in rank order.

    A rank that raises breaks the others out of their collectives; its own exception is raised
    here, those of the others are not.

    Args:
        timeout_s: longest wait in one collective, and, after a failure, for the others to end.
    Raises:
        Exception: whatever the first failing rank raised.
    """
    groups = local_groups(size, timeout_s=timeout_s)
    results: list[T | None] = [None] * size
    errors: list[tuple[int, BaseException]] = []
    failed = threading.Event()

    def run(group: LocalGroup) -> None:
        try:
            results[group.rank] = fn(group)
        except BaseException as error:
            errors.append((group.rank, error))
            failed.set()
            group.fail(error)

    threads = [
        threading.Thread(target=run, args=(group,), name=f"rank-{group.rank}", daemon=True)
        for group in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not failed.is_set():
            thread.join(0.05)
        thread.join(timeout_s)
    if errors:
        raise errors[0][1]
    return results  # type: ignore[return-value]
