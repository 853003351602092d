"""Many rows, chunk by chunk: the form for prompts (Kimi Team 2025, Kimi Linear).

Inside a chunk of 16 rows everything that needs no running state is computed for all chunks at
once; then one pass over the chunks carries the state.

Products of decayed queries and keys need exp(G_i - G_j). Splitting that into exp(G_i) exp(-G_j)
overflows float32 after some 17 rows of the lowest decay, so both factors are taken relative to the
start of the sub-block that holds row i: the left one is at most 1, the right one at most
exp(rows of a sub-block times the bound).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flare_ray.device.ops.kda.unrolled import MAX_EXPONENT, queries_and_keys

CHUNK = 16


def sub_block_rows(lower_bound: float) -> int:
    """Rows whose summed log decay stays within MAX_EXPONENT, at most half a chunk; 0 = none."""
    rows = CHUNK // 2
    while rows and rows * -lower_bound > MAX_EXPONENT:
        rows //= 2
    return rows


def run(
    qkv: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, sub: int
) -> tuple[Tensor, Tensor]:
    """As `reference.delta_rule`, but returns only the last state, [B, H, D, D].

    Rows with log decay 0 and beta 0 leave the state as it is, which is how a caller pads.
    """
    width = qkv.shape[1]
    q, k = queries_and_keys(qkv).permute(3, 0, 2, 1, 4)
    v, beta = qkv[:, :, 2], beta.unsqueeze(-1)
    q, k, v, log_decay, beta = (_chunks(x) for x in (q, k, v, log_decay, beta))
    total = log_decay.cumsum(-2)
    products = _decayed_products(q, k, log_decay, total, sub)
    query_key, key_key = products.unbind(-3)

    decay = total.exp()
    last = total[..., -1:, :]
    right = torch.cat((v, k * decay), dim=-1).mul_(beta)
    solved = torch.linalg.solve_triangular(key_key * beta, right, upper=False, unitriangular=True)
    values, keys = solved.chunk(2, dim=-1)
    to_state = (k * (last - total).exp()).transpose(-1, -2)
    fade = last.exp().transpose(-1, -2)

    deltas, states = [], []
    for chunk in range(total.shape[2]):
        states.append(state)
        delta = values[:, :, chunk] - keys[:, :, chunk] @ state
        deltas.append(delta)
        state = fade[:, :, chunk] * state + to_state[:, :, chunk] @ delta
    output = (q * decay) @ torch.stack(states, 2) + query_key.tril() @ torch.stack(deltas, 2)
    return output.flatten(2, 3)[:, :, :width].transpose(1, 2), state


def _chunks(x: Tensor) -> Tensor:
    """[B, T, H, D] -> [B, H, chunks, CHUNK, D], padded with zeros."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return padded.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4).contiguous()


def _decayed_products(q: Tensor, k: Tensor, log_decay: Tensor, total: Tensor, sub: int) -> Tensor:
    """sum over c of x_i[c] k_j[c] exp(G_i[c] - G_j[c]) for x = q, k: [..., 2, CHUNK, CHUNK].

    Entries with j > i are finite and meaningless.
    """
    blocks = CHUNK // sub
    by_block = total.unflatten(-2, (blocks, sub))
    start = by_block[..., :1, :] - log_decay.unflatten(-2, (blocks, sub))[..., :1, :]
    left = (by_block - start).exp_()
    left = torch.cat([x.unflatten(-2, (blocks, sub)) * left for x in (q, k)], dim=-2)
    right = (start - total.unsqueeze(-3)).clamp_(max=MAX_EXPONENT).exp_().mul_(k.unsqueeze(-3))
    products = left @ right.transpose(-1, -2)
    # [..., blocks, (2, sub), CHUNK] -> [..., 2, (blocks, sub), CHUNK]
    return products.unflatten(-2, (2, sub)).transpose(-4, -3).flatten(-3, -2)
