"""Hashed n-grams: which table rows a position reads, and how what they hold joins the streams.

    c_s     = compressed id s tokens back; the pad's where that lies before the sequence
    R_n     = c_0 m_0 xor c_1 m_1 xor ... xor c_(n-1) m_(n-1)                int64
    row     = R_n mod prime[n][head] + offset[n][head]                       n = 2 .. N
    gate_c  = sigmoid(sgn(d) sqrt(max(|d|, 1e-6))),   d = cosine-like product of stream and key

The constants come from `buckets`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.engram.buckets import Buckets

SMALLEST_PRODUCT = 1e-6


class NgramRows:
    """Which rows of every table a position reads.

    Args:
        tables: of one model, all of one shape.
        device: of the ids to come.
    """

    def __init__(self, tables: Sequence[Buckets], *, device: torch.device) -> None:
        count = len(tables[0].multipliers) - 1
        self._multipliers = torch.tensor([t.multipliers for t in tables], device=device)
        self._primes = torch.tensor([t.primes for t in tables], device=device)
        self._primes = self._primes.view(len(tables), count, -1)
        self._offsets = torch.tensor([t.offsets for t in tables], device=device)

    def __call__(self, ids: Tensor) -> Tensor:
        """Rows [tables, R, columns] int64 of ids [R, N] int64, newest first, pads filled in."""
        expect_shape("ids", ids, None, self._multipliers.shape[1])
        products = ids.unsqueeze(0) * self._multipliers.unsqueeze(1)
        mixed, columns = products[..., 0], []
        for back in range(1, ids.shape[1]):
            mixed = torch.bitwise_xor(mixed, products[..., back])
            columns.append(mixed.unsqueeze(2) % self._primes[:, back - 1].unsqueeze(1))
        return torch.cat(columns, dim=2) + self._offsets.unsqueeze(1)


def gated_write(streams: Tensor, key_value: Tensor, factor: Tensor, *, eps: float) -> Tensor:
    """Add a value to every stream, gated by the stream's agreement with its key.

    Args:
        streams: [R, n, H].
        key_value: [R, (n + 1) H]: a key per stream, then the value.
        factor: [n, H] float32 weights of the product.
        eps: of both norms.
    Returns:
        [R, n, H] of the streams' type; float32 inside.
    Raises:
        ContractViolation: shapes disagree.
    """
    rows, count, hidden = streams.shape
    expect_shape("key_value", key_value, rows, (count + 1) * hidden)
    expect_shape("factor", factor, count, hidden)
    plain = streams.dtype == key_value.dtype == torch.float32
    if streams.device.type == "cpu" and plain:
        from flare_ray.device.ops.engram import numba

        return numba.gated_write(streams, key_value, factor, eps=eps, least=SMALLEST_PRODUCT)
    wide = streams.to(torch.float32)
    joint = key_value.to(torch.float32).view(rows, count + 1, hidden)
    key, value = joint[:, :count], joint[:, count:]
    product = (wide * factor).mul_(key).sum(-1)
    product *= torch.rsqrt(wide.square().mean(-1) + eps)
    product *= torch.rsqrt(key.square().mean(-1) + eps)
    product *= hidden**-0.5
    root = product.abs().clamp_(min=SMALLEST_PRODUCT).sqrt_()
    gate = torch.sigmoid(torch.copysign(root, product))
    return torch.addcmul(wide, gate.unsqueeze(2), value).to(streams.dtype)
