"""Many rows, chunk by chunk: the form for prompts (Yang et al. 2024, Gated Delta Networks).

Inside a chunk everything that needs no running state is computed for all chunks at once; then one
pass over the chunks carries the state. A head's rows share one decay, so products are scaled by
exp(G_i - G_j) for j <= i, which is at most one: entries above the diagonal are cut before the
exponential, not after.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flare_ray.device.ops.gated_delta.reference import GatedRows, HeadShape, queries_keys_values

CHUNK = 64


def run(rows: GatedRows, state: Tensor, heads: HeadShape) -> tuple[Tensor, Tensor]:
    """As `reference.gated_delta_rule`, but returns only the last state, [B, Hv, dk, dv].

    Rows with log decay 0 and beta 0 leave the state as it is, which is how a caller pads.
    """
    width = rows.beta.shape[1]
    q, k, v = queries_keys_values(rows.mixed, heads)
    share = heads.value_heads // heads.key_heads
    q, k = q.repeat_interleave(share, 2), k.repeat_interleave(share, 2)
    q, k, v = (_chunks(x) for x in (q, k, v))
    beta, log_decay = _chunks(rows.beta.unsqueeze(-1)), _chunks(rows.log_decay.unsqueeze(-1))

    # Sums of large decays would round away the small differences that stay visible.
    exact = log_decay.to(torch.float64).cumsum(-2)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device).triu(1)
    between = (exact - exact.transpose(-1, -2)).to(torch.float32)
    fade = between.masked_fill_(above, float("-inf")).exp_()
    key_key = (k @ k.transpose(-1, -2)).mul_(fade).mul_(beta)
    query_key = (q @ k.transpose(-1, -2)).mul_(fade)
    decay = exact.to(torch.float32).exp()
    right = torch.cat((v, k * decay), dim=-1).mul_(beta)
    solved = torch.linalg.solve_triangular(key_key, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    last = exact[..., -1:, :]
    to_state = (k * (last - exact).to(torch.float32).exp()).transpose(-1, -2)
    carried = last.to(torch.float32).exp()

    deltas, states = [], []
    for chunk in range(exact.shape[2]):
        states.append(state)
        delta = values[:, :, chunk] - keys[:, :, chunk] @ state
        deltas.append(delta)
        state = carried[:, :, chunk] * state + to_state[:, :, chunk] @ delta
    output = (q * decay) @ torch.stack(states, 2) + query_key @ torch.stack(deltas, 2)
    return output.flatten(2, 3)[:, :, :width].transpose(1, 2), state


def _chunks(x: Tensor) -> Tensor:
    """[B, T, H, D] -> [B, H, chunks, CHUNK, D], padded with zeros."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return padded.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4).contiguous()
