"""Shared-memory blocks of token masks, named by the plan (contract: K1).

Masks of 32 rows over a vocabulary of 150,000 tokens are 605 KiB: ten times a plan. The controller's
side owns a block and may rewrite it once the round that names it has been answered; ranks attach by
name and keep the attachment, since blocks are few and long-lived.
"""

from __future__ import annotations

import mmap
import os
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING

import numpy as np

from flare_ray.contracts.plan import RoundPlan
from flare_ray.errors import ContractViolation

if TYPE_CHECKING:
    from numpy.typing import NDArray

BITS_PER_WORD = 32
SHARED_MEMORY_FOLDER = "/dev/shm"
"""Where Linux shows POSIX shared memory."""
MAX_ATTACHED_BLOCKS = 8
"""Blocks a rank keeps attached; two frames per engine are in use, the rest is slack."""


def mask_words(vocab_size: int) -> int:
    """int32 words of one mask row: bit t of the row allows token t."""
    return -(-vocab_size // BITS_PER_WORD)


class MaskBlock:
    """A block of `rows` mask rows, owned by the side that creates it.

    Attributes:
        name: what a plan puts into `mask_block`.
        rows: [rows, words] int32 view; written only while no unanswered round names the block.
    """

    def __init__(self, rows: int, vocab_size: int) -> None:
        words = mask_words(vocab_size)
        self._memory = SharedMemory(create=True, size=rows * words * 4)
        self.name = self._memory.name
        self.rows: NDArray[np.int32] = np.ndarray((rows, words), np.int32, self._memory.buf)

    def close(self) -> None:
        """Release and remove the block."""
        del self.rows
        self._memory.close()
        self._memory.unlink()


class MaskReader:
    """A rank's view of the blocks that plans name.

    Maps the memory file itself: `SharedMemory` would register an attached block for removal when
    this process exits (Python < 3.13) and so take it from its owner.
    """

    def __init__(self, vocab_size: int) -> None:
        self._words = mask_words(vocab_size)
        self._blocks: dict[str, mmap.mmap] = {}

    def read(self, plan: RoundPlan) -> NDArray[np.int32] | None:
        """[mask_rows, words] int32 view of the plan's block, valid until the plan is answered.

        Raises:
            ContractViolation: the block does not exist or is smaller than the plan says.
        """
        if not plan.mask_block:
            return None
        memory = self._blocks.get(plan.mask_block)
        if memory is None:
            memory = self._attach(plan)
        needed = plan.mask_rows * self._words * 4
        if len(memory) < needed:
            raise ContractViolation(
                f"mask block {plan.mask_block} holds {len(memory)} bytes, round {plan.round_id} "
                f"needs {needed} for {plan.mask_rows} rows"
            )
        return np.ndarray((plan.mask_rows, self._words), np.int32, memory)

    def _attach(self, plan: RoundPlan) -> mmap.mmap:
        # A dropped map is released with its last view; closing it under a view would be an error.
        if len(self._blocks) >= MAX_ATTACHED_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        try:
            fd = os.open(os.path.join(SHARED_MEMORY_FOLDER, plan.mask_block), os.O_RDWR)
        except FileNotFoundError:
            raise ContractViolation(
                f"round {plan.round_id} names the mask block {plan.mask_block}, which is gone"
            ) from None
        try:
            memory = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        self._blocks[plan.mask_block] = memory
        return memory
