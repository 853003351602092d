"""Stream mixing as its definition says, one operation per line of the equations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sinkhorn(logits: Tensor, *, iterations: int, eps: float) -> Tensor:
    """Softmax over the last dimension, then alternate column and row normalisation.

    Args:
        logits: [..., n, n]; rows are the last but one dimension.
        iterations: column passes; a row pass lies between each two of them.
    """
    mix = torch.softmax(logits, dim=-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


def projected(streams: Tensor, projection: Tensor, *, norm_eps: float) -> Tensor:
    """[R, (2 + n) n] float32 coefficients of the normalised, flattened streams [R, n, H]."""
    flat = streams.flatten(1).to(torch.float32)
    flat = flat * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + norm_eps)
    return F.linear(flat, projection)


def coefficients(
    raw: Tensor, base: Tensor, scale: Tensor, *, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(pre [R, n], post [R, n], mix [R, n, n]) from `projected`, with base [(2 + n) n], scale
    [3]."""
    n = _streams(raw.shape[-1])
    parts = raw.split([n, n, n * n], -1)
    biases = base.split([n, n, n * n])
    pre, post, mix = (part * scale[i] + biases[i] for i, part in enumerate(parts))
    mix = sinkhorn(mix.view(-1, n, n), iterations=iterations, eps=eps)
    return torch.sigmoid(pre) + eps, 2 * torch.sigmoid(post), mix


def mix_out(block: Tensor, streams: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """new[j] = post[j] * block + sum over i of mix[i, j] * streams[i]."""
    wide = streams.to(torch.float32)
    mixed = (mix.unsqueeze(-1) * wide.unsqueeze(-2)).sum(-3)
    return (post.unsqueeze(-1) * block.to(torch.float32).unsqueeze(-2) + mixed).to(streams.dtype)


def _streams(coefficients: int) -> int:
    n = 1
    while (2 + n) * n < coefficients:
        n += 1
    return n
