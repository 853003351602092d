"""What an independent implementation computes for one sequence, whatever the family."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

MIN_GAP = 1e-5
"""Smallest difference between the last selected and the first left-out pool score: below it an
equal computation in another order may select otherwise."""


@dataclass
class Oracle:
    """Results for one sequence of L tokens.

    Attributes:
        tokens: [L].
        logits: [L, V]; feedback: [L, H], the drafter's input; sampling: [L, Hs], the head's.
        selected: per attention layer number, a set of positions per row; the MTP layer's under the
            target's number of layers.
        mtp_logits: [L - 1, V], row i from pair (h_i, x[i+1]).
        gap: smallest score gap at the selection's edge over all layers and rows.
        sparse_rows: rows that leave something out, over all layers.
    """

    tokens: Tensor
    logits: Tensor
    feedback: Tensor
    sampling: Tensor
    selected: dict[int, list[set[int]]]
    mtp_logits: Tensor
    gap: float
    sparse_rows: int


class Reference(Protocol):
    """An independent implementation of target and drafter."""

    def run(self, tokens: Tensor) -> Oracle:
        """Teacher-forced results for `tokens` [L]."""

    def draft(self, oracle: Oracle, consumed: int, tokens: list[int]) -> Tensor:
        """Logits [D, V] of recursive drafts after `consumed` tokens.

        Args:
            tokens: the pending token, then the drafts that are fed back (D entries in all).
        """


def left_out(selected: dict[int, list[set[int]]]) -> int:
    """Rows that do not attend to everything before them."""
    rows = [(place, row) for sets in selected.values() for place, row in enumerate(sets)]
    return sum(len(row) < place + 1 for place, row in rows)


@contextmanager
def watched_topk(*, dims: int, count: int, gaps: list[float]) -> Iterator[None]:
    """Record the gap at the edge of every selection of `count` among tensors of `dims`."""
    real = torch.Tensor.topk

    def topk(tensor: Tensor, k: int, *args: Any, **more: Any) -> Any:
        if tensor.dim() == dims and k == count < tensor.shape[-1]:
            edge = real(tensor, k + 1, *args, **more).values
            both = edge[..., k] > -1e30
            if both.any():
                gaps.append(float((edge[..., k - 1] - edge[..., k])[both].min()))
        return real(tensor, k, *args, **more)

    torch.Tensor.topk = topk  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.topk = real  # type: ignore[method-assign]
