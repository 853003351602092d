"""How much memory the intermediates of captured programs take, before anything is captured
(contract: M6).

All graphs share one pool and run one after another, so it holds what the largest program has alive
at once. Which tensors those are is the operators' business; the figures below are what was seen, in
tensors of each size. Preparation compares them with the pool it ended up with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flare_ray.contracts.shapes import PAGE_TOKENS, PROMPT_KINDS, GraphShape
from flare_ray.device.speculation.prefill import SCORED_ROWS

LOGIT_TENSORS = 24
"""float32 tensors [rows, V] alive at once: a sort of the vocabulary with ids, and noise in float64
from 64-bit words."""
ACTIVATION_TENSORS = 48
"""float32 tensors [rows, H] alive at once."""
CONTEXT_TENSORS = 4
"""float32 tensors [rows, context] alive at once: scores of the index, selected rows."""
SMALLEST_BYTES = 32 << 20
"""Blocks of operators that work through long lists piece by piece, and the pool's own rounding."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """What intermediates are made of: vocabulary, width of the head's input, page-table entries."""

    vocab_size: int
    hidden: int
    columns: int


def pool_bytes(shapes: Iterable[GraphShape], sizes: PoolSizes) -> int:
    """Estimate of the pool for a catalog."""
    return SMALLEST_BYTES + max(_program_bytes(shape, sizes) for shape in shapes)


def _program_bytes(shape: GraphShape, sizes: PoolSizes) -> int:
    rows = shape.batch_capacity * shape.token_capacity
    is_prompt = shape.kind in PROMPT_KINDS
    logit_rows = max(shape.batch_capacity, min(rows, SCORED_ROWS)) if is_prompt else rows
    per_logit_row, per_row, per_context_token = row_bytes(sizes)
    context = sizes.columns * PAGE_TOKENS
    return logit_rows * per_logit_row + rows * (per_row + context * per_context_token)


def row_bytes(sizes: PoolSizes) -> tuple[int, int, int]:
    """Bytes of a row of logits, of a row's activations, and of a row's scores of one token."""
    return (
        4 * sizes.vocab_size * LOGIT_TENSORS,
        4 * sizes.hidden * ACTIVATION_TENSORS,
        4 * CONTEXT_TENSORS,
    )
