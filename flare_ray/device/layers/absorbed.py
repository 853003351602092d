"""Per-head maps into and out of the latent space, in the cheaper of two equal forms.

A query head is q_h = Q_h c and meets latents as K_h^T q_h, so K_h^T Q_h is one matrix; likewise an
output is O_h V_h applied to a latent sum. Whether the product matrix or its two factors are smaller
depends on the ranks. Products are made in float64 and only for float32 weights: in bfloat16 they
would round the checkpoint's weights a second time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.device.ops.linear.api import Linear


class AbsorbedQuery:
    """Low-rank query input -> queries in latent space.

    Args:
        query: [h, d, Q] of the query product.
        key: [h, d, L] of the key product.
    """

    def __init__(self, query: Tensor, key: Tensor) -> None:
        heads, dim, rank = query.shape
        latent = self._latent = key.shape[2]
        self._heads, self._dim = heads, dim
        self.fused = query.dtype == torch.float32 and rank * latent < dim * (rank + latent)
        if self.fused:
            product = torch.bmm(key.double().transpose(1, 2), query.double()).to(query.dtype)
            self._query, self._key = Linear(product.view(heads * latent, rank)), None
        else:
            self._query = Linear(query.reshape(heads * dim, rank))
            self._key = key.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[R, Q] -> [R, h, L]."""
        query = self._query(x)
        if self._key is None:
            return query.view(-1, self._heads, self._latent)
        by_head = query.view(-1, self._heads, self._dim).transpose(0, 1)
        return torch.bmm(by_head, self._key).transpose(0, 1)


class AbsorbedOutput:
    """Attended latents -> block output.

    Args:
        value: [h, v, L] of the value product.
        output: [H, h, v] of the output product.
    """

    def __init__(self, value: Tensor, output: Tensor) -> None:
        hidden, _, dim = output.shape
        latent = value.shape[2]
        self.fused = value.dtype == torch.float32 and hidden * latent < dim * (hidden + latent)
        if self.fused:
            by_head = output.double().transpose(0, 1)
            product = torch.bmm(by_head, value.double()).to(value.dtype)
            self._output = Linear(product.transpose(0, 1).reshape(hidden, -1))
            self._value = None
        else:
            self._output = Linear(output.reshape(hidden, -1))
            self._value = value.transpose(1, 2).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[R, h, L] -> [R, H]."""
        if self._value is None:
            return self._output(x.flatten(1))
        return self._output(torch.bmm(x.transpose(0, 1), self._value).transpose(0, 1).flatten(1))
