"""Pure tensor functions of the training model, grouped so that each compiles into few fused
kernels.

Shapes: N tokens of B rows of length T (N = B T), S residual streams, H hidden, r rank of the
    mixing, D head width, C chunk, E experts, I expert width. Streams, norms, router and delta rule
    run in float32; products run in the autocast type.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..network.functional import KdaChunks

MIN_GATE = 1e-6


class StreamSpec(NamedTuple):
    """Constants of the mixing: streams, epsilon of norms."""

    streams: int
    eps: float


class Site(NamedTuple):
    """Parameters of one mixing site: norm [S H], down [r, S H], up [S H, r] and, where a block
    writes back, inject [S, S H].
    """

    norm: Tensor
    down: Tensor
    up: Tensor
    inject: Tensor | None


class GdnSpec(NamedTuple):
    """Constants of the delta rule: value heads, width of a head, key heads, taps, chunk."""

    heads: int
    width: int
    key_heads: int
    taps: int
    chunk: int = 64


def centred(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """Root-mean-square norm of each of ``groups`` parts of the last axis, in float32; the weight is
    the distance of the factor from one.
    """
    parts = x.float().unflatten(-1, (groups, -1))
    parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)
    return parts.flatten(-2) * (1 + weight.float())


def open_site(
    flat: Tensor, site: Site, spec: StreamSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Mix the streams into one block input.

    Args:
        flat: [N, S H] float32.
        site: parameters of the site.
        spec: constants.
        dtype: type of the block input and of the products.
    Returns:
        input [N, H], and the factors [N, S] with which streams take the block's output (empty
        where the site has none).
    """
    normed = centred(flat, site.norm, spec.eps, spec.streams)
    narrow = normed.to(dtype)
    low = F.silu(F.linear(narrow, site.down) / spec.streams)
    gated = torch.sigmoid(F.linear(low, site.up).float()) * normed
    x = gated.unflatten(-1, (spec.streams, -1)).mean(-2).to(dtype)
    if site.inject is None:
        return x, flat.new_zeros(0)
    return x, 2 * torch.sigmoid(F.linear(narrow, site.inject).float() / spec.streams)


def write_streams(y: Tensor, flat: Tensor, inject: Tensor) -> Tensor:
    """Add a block's output [N, H] to every stream, times its factor: [N, S H] float32."""
    added = inject.unsqueeze(-1) * y.float().unsqueeze(-2)
    return flat + added.flatten(-2)


class Written(NamedTuple):
    """A block output and what its site needs to write it back."""

    y: Tensor
    flat: Tensor
    inject: Tensor


def turn_site(
    written: Written, site: Site, spec: StreamSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Write one block back and open the next site: input, streams, factors."""
    flat = write_streams(*written)
    x, inject = open_site(flat, site, spec, dtype)
    return x, flat, inject


class GdnInputs(NamedTuple):
    """Projections of one recurrent layer.

    Attributes:
        raw: [B, taps - 1 + T, channels], query, key and value channels before the convolution,
            behind those of the tokens before (zeros at the start of a row).
        taps: [channels, taps].
        forget: [B, T, heads].
        beta: [B, T, heads].
        dt_bias: [heads].
        a_log: [heads].
    """

    raw: Tensor
    taps: Tensor
    forget: Tensor
    beta: Tensor
    dt_bias: Tensor
    a_log: Tensor


def gdn_heads(mixed: Tensor, spec: GdnSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [..., heads, D] of convolved channels, queries and keys of length
    one (queries over the root of D) and repeated for the value heads of their key head.
    """
    keys = spec.key_heads * spec.width
    q, k, v = (
        t.unflatten(-1, (-1, spec.width))
        for t in mixed.split([keys, keys, spec.heads * spec.width], -1)
    )
    q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * spec.width**-0.5
    k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
    ratio = spec.heads // spec.key_heads
    return q.repeat_interleave(ratio, -2), k.repeat_interleave(ratio, -2), v


def log_decay(forget: Tensor, dt_bias: Tensor, a_log: Tensor) -> Tensor:
    """Logarithm of the factor that a head's state keeps, [..., heads] float32."""
    return -a_log.float().exp() * F.softplus(forget.float() + dt_bias.float())


def gdn_front(inputs: GdnInputs, spec: GdnSpec) -> KdaChunks:
    """Convolution, gates and everything of the chunked delta rule that needs no running state;
    float32. The decay is one number a head, so that factors between tokens are taken from
    differences of its sums, never above one.
    """
    length = inputs.beta.shape[1]
    raw, taps = inputs.raw.float(), inputs.taps.float()
    mixed = raw[:, :length] * taps[:, 0]
    for j in range(1, spec.taps):
        mixed = mixed + raw[:, j : j + length] * taps[:, j]
    q, k, v = gdn_heads(F.silu(mixed), spec)
    decay = log_decay(inputs.forget, inputs.dt_bias, inputs.a_log).unsqueeze(-1)
    beta = torch.sigmoid(inputs.beta.float()).unsqueeze(-1)
    missing = (-length) % spec.chunk
    if missing:
        q, k, v, decay, beta = (F.pad(t, (0, 0, 0, 0, 0, missing)) for t in (q, k, v, decay, beta))
    q, k, v, decay, beta = (
        t.unflatten(1, (-1, spec.chunk)).permute(0, 3, 1, 2, 4).flatten(0, 1)
        for t in (q, k, v, decay, beta)
    )
    total = decay.cumsum(-2)
    i = torch.arange(spec.chunk, device=q.device)
    later = i[None, :] > i[:, None]
    between = torch.exp((total - total.transpose(-1, -2)).masked_fill(later, float("-inf")))
    transposed = k.transpose(-1, -2)
    last = total[..., -1:, :]
    return KdaChunks(
        keys=(k @ transposed * between * beta).tril(-1),
        scores=q @ transposed * between,
        rhs=torch.cat([v, k * torch.exp(total)], -1) * beta,
        queries=q * torch.exp(total),
        tails=k * torch.exp(last - total),
        decay=torch.exp(last),
    )


class Grams(NamedTuple):
    """Parameters of an n-gram embedding's injection.

    Attributes:
        norm_key / norm_query / norm_conv: [S H].
        taps: [S H, taps] of the convolution.
        dilation: tokens between two taps.
    """

    norm_key: Tensor
    norm_query: Tensor
    norm_conv: Tensor
    taps: Tensor
    dilation: int


def gram_gates(
    flat: Tensor, key: Tensor, value: Tensor, grams: Grams, spec: StreamSpec
) -> tuple[Tensor, Tensor]:
    """What the streams get before the convolution, and its input, [..., S H] float32 each.

    Args:
        flat: [..., S H] float32 streams.
        key: [..., S H].
        value: [..., H].
        grams: parameters.
        spec: constants.
    """
    product = centred(key, grams.norm_key, spec.eps, spec.streams)
    product = product * centred(flat, grams.norm_query, spec.eps, spec.streams)
    score = product.unflatten(-1, (spec.streams, -1)).sum(-1) * value.shape[-1] ** -0.5
    gate = torch.sigmoid(score.abs().clamp(min=MIN_GATE).sqrt() * score.sign())
    gated = (gate.unsqueeze(-1) * value.float().unsqueeze(-2)).flatten(-2)
    return gated, centred(gated, grams.norm_conv, spec.eps, spec.streams)


def inject_grams(
    flat: Tensor, key: Tensor, value: Tensor, grams: Grams, spec: StreamSpec
) -> Tensor:
    """Streams [B, T, S H] with the embedding added; arguments as in :func:`gram_gates`."""
    gated, inputs = gram_gates(flat, key, value, grams, spec)
    length, taps = flat.shape[1], grams.taps.shape[1]
    padded = F.pad(inputs, (0, 0, (taps - 1) * grams.dilation, 0))
    weights = grams.taps.float()
    mixed = padded[:, :length] * weights[:, 0]
    for j in range(1, taps):
        mixed = mixed + padded[:, j * grams.dilation : j * grams.dilation + length] * weights[:, j]
    return flat + gated + F.silu(mixed)


def gated_unit(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """``down(silu(gate x) * up x)``."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


class Experts(NamedTuple):
    """Parameters of the routed experts: router [E, H], gate and up [E I, H], down [E, H, I]."""

    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def mixture(x: Tensor, experts: Experts, top_k: int) -> tuple[Tensor, Tensor]:
    """Routed experts as three dense products over all experts; unchosen ones get weight zero.

    Args:
        x: [N, H].
        experts: parameters.
        top_k: experts of a token.
    Returns:
        output [N, H] without the shared expert, and the balancing loss [], one at equal loads.
    """
    with torch.autocast(x.device.type, enabled=False):
        p = torch.softmax(F.linear(x.float(), experts.router.float()), -1)
        values, chosen = p.topk(top_k, -1)
        weight = values / values.sum(-1, keepdim=True)
        full = torch.zeros_like(p).scatter(-1, chosen, weight)
        load = (full.detach() > 0).float().mean(0) / top_k
        unbalanced = (load * p.mean(0)).sum() * p.shape[-1]
    h = F.silu(F.linear(x, experts.gate)) * F.linear(x, experts.up)
    h = h.unflatten(-1, (p.shape[-1], -1)) * full.unsqueeze(-1).to(h.dtype)
    return F.linear(h.flatten(-2), experts.down.transpose(0, 1).flatten(1)), unbalanced
