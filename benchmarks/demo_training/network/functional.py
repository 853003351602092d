"""Pure tensor functions of the training model, grouped so that each compiles into few fused
kernels.

Shapes: N tokens of B rows of length T (N = B T), n residual streams, H hidden, D head width, C
    chunk, E experts. Residual
streams and the delta rule run in float32; products run in the autocast type.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class MhcSpec(NamedTuple):
    """Constants of the mixer: streams, Sinkhorn iterations, RMS epsilon, Sinkhorn epsilon."""

    streams: int
    iterations: int
    rms_eps: float
    eps: float


class Site(NamedTuple):
    """Parameters of one mixing site: projection [2n + n², n H], base [2n + n²], scale [3], the norm
    behind it [H].
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor


class KdaSpec(NamedTuple):
    """Constants of the delta rule. ``sub`` bounds how many steps one exponential factor may span:
    16 steps at the decay bound of -5 reach exp(80), the last power that float32 holds.
    """

    heads: int
    width: int
    taps: int
    lower_bound: float
    chunk: int = 64
    sub: int = 16


class MoeSpec(NamedTuple):
    """Constants of the expert layer: chosen experts, routed scale, clamp of the gated unit."""

    top_k: int
    scale: float
    limit: float


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in float32, in the type of ``x``."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(
        x.dtype
    )


def open_site(
    streams: Tensor, site: Site, spec: MhcSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix the streams into one block input.

    Args:
        streams: [N, n, H] float32.
        site: parameters of the site.
        spec: constants.
        dtype: type of the block input.
    Returns:
        normed input [N, H], write-back weights [N, n], doubly stochastic mixer [N, n, n].
    """
    n = spec.streams
    flat = streams.flatten(-2)
    scale = torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + spec.rms_eps)
    with torch.autocast(flat.device.type, enabled=False):
        mixed = F.linear(flat, site.fn.float()) * scale
    to_read, to_write, to_mix = mixed.split([n, n, n * n], -1)
    base_read, base_write, base_mix = site.base.float().split([n, n, n * n])
    read = torch.sigmoid(to_read * site.scale[0] + base_read) + spec.eps
    write = 2 * torch.sigmoid(to_write * site.scale[1] + base_write)
    mixer = torch.softmax((to_mix * site.scale[2] + base_mix).unflatten(-1, (n, n)), -1) + spec.eps
    mixer = mixer / (mixer.sum(-2, keepdim=True) + spec.eps)
    for _ in range(spec.iterations - 1):
        mixer = mixer / (mixer.sum(-1, keepdim=True) + spec.eps)
        mixer = mixer / (mixer.sum(-2, keepdim=True) + spec.eps)
    x = (read.unsqueeze(-1) * streams).sum(-2)
    return rms(x, site.norm, spec.rms_eps).to(dtype), write, mixer


def write_streams(y: Tensor, streams: Tensor, write: Tensor, mixer: Tensor) -> Tensor:
    """``s'[j] = write[j] y + sum_i mixer[i, j] s[i]``, [N, n, H] float32."""
    kept = (mixer.unsqueeze(-1) * streams.unsqueeze(-2)).sum(-3)
    return write.unsqueeze(-1) * y.float().unsqueeze(-2) + kept


class Written(NamedTuple):
    """A block output and what its site needs to write it back."""

    y: Tensor
    streams: Tensor
    write: Tensor
    mixer: Tensor


def turn_site(
    written: Written, site: Site, spec: MhcSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write one block back and open the next site in one pass over the streams: input, streams,
    write, mixer.
    """
    streams = write_streams(*written)
    x, write, mixer = open_site(streams, site, spec, dtype)
    return x, streams, write, mixer


def close_site(written: Written, norm: Tensor, eps: float) -> Tensor:
    """Write the last block back, average the streams and apply the final norm: [N, H] float32."""
    return rms(write_streams(*written).mean(-2), norm, eps)


class KdaInputs(NamedTuple):
    """Projections of one delta-rule layer.

    Attributes:
        raw: [B, taps - 1 + T, 3 heads D], query, key and value channels before the convolution,
            behind the channels of the tokens before (zeros at the start of a row).
        taps: [3 heads D, taps] convolution weights.
        forget: [B, T, heads D].
        beta: [B, T, heads].
        dt_bias: [heads D].
        a_log: [heads].
    """

    raw: Tensor
    taps: Tensor
    forget: Tensor
    beta: Tensor
    dt_bias: Tensor
    a_log: Tensor


class KdaChunks(NamedTuple):
    """What the chunk scan needs, G = B heads groups of M chunks.

    Attributes:
        keys: [G, M, C, C] strictly lower triangular, key products with decay and beta.
        scores: [G, M, C, C] lower triangular, query-key products with decay.
        rhs: [G, M, C, 2D] values and decayed keys, times beta.
        queries: [G, M, C, D] decayed queries.
        tails: [G, M, C, D] keys decayed to the end of the chunk.
        decay: [G, M, D, 1] decay over the chunk.
    """

    keys: Tensor
    scores: Tensor
    rhs: Tensor
    queries: Tensor
    tails: Tensor
    decay: Tensor


def kda_front(inputs: KdaInputs, spec: KdaSpec) -> KdaChunks:
    """Convolution, gates and everything of the chunked delta rule that needs no running state;
    float32.
    """
    rows, length, _ = inputs.forget.shape
    raw, taps = inputs.raw.float(), inputs.taps.float()
    mixed = raw[:, :length] * taps[:, 0]
    for j in range(1, spec.taps):
        mixed = mixed + raw[:, j : j + length] * taps[:, j]
    mixed = F.silu(mixed)
    q, k, v = mixed.view(rows, length, 3, spec.heads, spec.width).unbind(2)
    q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * spec.width**-0.5
    k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
    gate = (inputs.forget.float() + inputs.dt_bias.float()).view(
        rows, length, spec.heads, spec.width
    )
    log_decay = spec.lower_bound * torch.sigmoid(inputs.a_log.float().exp()[:, None] * gate)
    beta = torch.sigmoid(inputs.beta.float())
    missing = (-length) % spec.chunk
    if missing:
        q, k, v, log_decay = (F.pad(t, (0, 0, 0, 0, 0, missing)) for t in (q, k, v, log_decay))
        beta = F.pad(beta, (0, 0, 0, missing))
    q, k, v, log_decay, beta = (
        t.unflatten(1, (-1, spec.chunk)).permute(0, 3, 1, 2, 4).flatten(0, 1)
        for t in (q, k, v, log_decay, beta.unsqueeze(-1))
    )
    return _chunked(q, k, v, log_decay, beta, spec)


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, spec: KdaSpec
) -> KdaChunks:
    # exp(G_i - G_j) is split at sub-block starts: the left factor is at most one, the right one
    # spans at most ``sub`` steps wherever it is used; the clamp covers the entries above the
    # diagonal, which are masked.
    blocks = (spec.chunk // spec.sub, spec.sub)
    total = log_decay.cumsum(-2)
    start = total.unflatten(-2, blocks) - log_decay.unflatten(-2, blocks)
    start = start[..., :1, :]
    left = torch.exp(total.unflatten(-2, blocks) - start)
    right = k.unsqueeze(-3) * torch.exp((start - total.unsqueeze(-3)).clamp(max=85.0))
    both = torch.cat([k.unflatten(-2, blocks) * left, q.unflatten(-2, blocks) * left], -2)
    keys, scores = (both @ right.transpose(-1, -2)).split(spec.sub, -2)
    keys, scores = keys.flatten(-3, -2), scores.flatten(-3, -2)
    i = torch.arange(spec.chunk, device=q.device)
    below, diagonal = i[:, None] > i, i[:, None] == i
    decayed = torch.exp(total)
    last = total[..., -1:, :]
    return KdaChunks(
        keys=torch.where(below, keys, 0.0) * beta,
        scores=torch.where(below | diagonal, scores, 0.0),
        rhs=torch.cat([v, k * decayed], -1) * beta,
        queries=q * decayed,
        tails=k * torch.exp(last - total),
        decay=torch.exp(last).transpose(-1, -2),
    )


def kda_scan(chunks: KdaChunks, segments: int, heads: int) -> Tensor:
    """Run the state over the chunks: [G, M, C, D] outputs. Left eager: library products in a short
    loop.

    Args:
        chunks: G = rows segments heads groups.
        segments: consecutive groups of M chunks that form one row.
        heads: heads of a row.
    """
    if segments > 1:
        chunks = KdaChunks(*(_joined(t, segments, heads) for t in chunks))
    width = chunks.queries.shape[-1]
    eye = torch.eye(chunks.keys.shape[-1], device=chunks.keys.device, dtype=chunks.keys.dtype)
    solved = torch.linalg.solve_triangular(
        chunks.keys + eye, chunks.rhs, upper=False, unitriangular=True
    )
    updates, reads = solved.split(width, -1)
    state = updates.new_zeros(updates.shape[0], width, width)
    values, states = [], []
    tails = chunks.tails.transpose(-1, -2)
    parts = (t.unbind(1) for t in (updates, reads, tails, chunks.decay))
    for u, w, kt, d in zip(*parts, strict=True):
        new = torch.baddbmm(u, w, state, alpha=-1)
        values.append(new)
        states.append(state)
        state = torch.baddbmm(d * state, kt, new)
    out = chunks.queries @ torch.stack(states, 1) + chunks.scores @ torch.stack(values, 1)
    if segments > 1:
        out = out.unflatten(0, (-1, heads)).unflatten(2, (segments, -1))
        out = out.transpose(1, 2).flatten(0, 2)
    return out


def _joined(x: Tensor, segments: int, heads: int) -> Tensor:
    """[rows segments heads, M, ...] to [rows heads, segments M, ...]."""
    return x.unflatten(0, (-1, segments, heads)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def kda_back(out: Tensor, gate: Tensor, norm: Tensor, spec: KdaSpec, eps: float) -> Tensor:
    """Per-head norm and sigmoid gate: [B, T, heads D] in the type of ``gate``.

    Args:
        out: [G, M, C, D] float32.
        gate: [B, T, heads D].
        norm: [D].
        spec: constants.
        eps: of the norm.
    """
    rows, length, _ = gate.shape
    out = out.unflatten(0, (rows, spec.heads)).flatten(2, 3).transpose(1, 2)[:, :length]
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + eps) * norm.float()
    gated = out * torch.sigmoid(gate.float().view(rows, length, spec.heads, spec.width))
    return gated.flatten(2).to(gate.dtype)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, limit: float) -> Tensor:
    """Gated unit; the gate is clamped from above, the up branch on both sides."""
    g = F.linear(x, gate).clamp(max=limit)
    u = F.linear(x, up).clamp(-limit, limit)
    return F.linear(F.silu(g) * u, down)


class Experts(NamedTuple):
    """Parameters of the routed experts: router [E, H], bias [E], gate and up [E I, H], down [E, H,
    I].
    """

    router: Tensor
    bias: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def mixture(x: Tensor, experts: Experts, spec: MoeSpec) -> tuple[Tensor, Tensor]:
    """Routed experts as three dense products over all experts; unchosen ones get weight zero.

    Args:
        x: [N, H].
        experts: parameters.
        spec: constants.
    Returns:
        output [N, H] without the shared expert, and how often each expert was chosen [E].
    """
    with torch.autocast(x.device.type, enabled=False):
        score = torch.sigmoid(F.linear(x.float(), experts.router.float()))
        chosen = (score + experts.bias).topk(spec.top_k, -1).indices
        weight = score.gather(-1, chosen)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * spec.scale
        full = torch.zeros_like(score).scatter(-1, chosen, weight)
    g = F.linear(x, experts.gate).clamp(max=spec.limit)
    u = F.linear(x, experts.up).clamp(-spec.limit, spec.limit)
    count = experts.router.shape[0]
    h = (F.silu(g) * u).unflatten(-1, (count, -1)) * full.unsqueeze(-1).to(g.dtype)
    load = (full > 0).float().sum(0)
    return F.linear(h.flatten(-2), experts.down.transpose(0, 1).flatten(1)), load


def unchosen_tokens(scores: Tensor, complete: Tensor, top_k: int, pool: int) -> Tensor:
    """Mask of tokens that a budget of ``top_k`` pools leaves out; ties break to the lowest pool.

    Args:
        scores: [..., P] of every pool.
        complete: [...] number of pools that are complete for the query; later ones are the tail and
            the future and stay.
        top_k: pools to keep.
        pool: tokens of a pool.
    Returns:
        [..., P pool] bool.
    """
    at = torch.arange(scores.shape[-1], device=scores.device)
    known = at < complete[..., None]
    ranked = torch.sort(
        scores.masked_fill(~known, float("-inf")), dim=-1, descending=True, stable=True
    )
    order = ranked.indices
    chosen = torch.zeros_like(known).scatter(-1, order[..., :top_k], True)
    return (known & ~chosen).repeat_interleave(pool, -1)


class Chain(NamedTuple):
    """Scores of an unrolled draft step.

    Attributes:
        base: [B, heads, T, T] products of this step's queries with the first step's keys, unscaled.
        extra: [B, heads, T, E] products with the chain's own keys, unscaled, minus infinity where
            this step has fewer than E of them.
        step: [] int64, the draft step from 1; a tensor, so that one compiled graph serves all.
    """

    base: Tensor
    extra: Tensor
    step: Tensor


def chain_weights(chain: Chain, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention weights: row i sees first-step rows up to i - step + 1 and its own chain."""
    at = torch.arange(chain.base.shape[-1], device=chain.base.device)
    hidden = at[None, :] > at[:, None] - (chain.step - 1)
    base = (chain.base.float() * scale).masked_fill(hidden, float("-inf"))
    extra = chain.extra.float() * scale
    top = torch.maximum(base.amax(-1, keepdim=True), extra.amax(-1, keepdim=True)).detach()
    base, extra = torch.exp(base - top), torch.exp(extra - top)
    total = base.sum(-1, keepdim=True) + extra.sum(-1, keepdim=True)
    return (base / total).to(dtype), (extra / total).to(dtype)


def next_token_loss(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy of [N, H] against [N] under weights [N], and the plain mean."""
    logits = F.linear(hidden.to(dtype), head.to(dtype)).float()
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum(), losses.detach().mean()


class DraftTarget(NamedTuple):
    """What a draft row is trained towards.

    Attributes:
        logits: [N, V] of the trunk for the same next token.
        token: [N] the true next token.
        keep: [N] float, zero where the row has no meaning.
    """

    logits: Tensor
    token: Tensor
    keep: Tensor


def draft_loss(
    hidden: Tensor, head: Tensor, target: DraftTarget, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Half soft cross-entropy, one total variation, a tenth ground truth; and the mean overlap of
    the distributions.
    """
    log_q = torch.log_softmax(F.linear(hidden.to(dtype), head.to(dtype)).float(), -1)
    p = torch.softmax(target.logits.float(), -1)
    soft = -(p * log_q).sum(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    hard = -log_q.gather(-1, target.token.unsqueeze(-1)).squeeze(-1)
    count = target.keep.sum()
    loss = (0.5 * soft + (1 - overlap) + 0.1 * hard) * target.keep
    return loss.sum() / count, (overlap * target.keep).sum() / count
