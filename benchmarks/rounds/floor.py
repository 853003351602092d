"""Bytes that a round cannot avoid: weights touched, state, cache and logits."""

from __future__ import annotations

from flare_ray.device.weights.budget import format_bytes
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.recipes.glm5_next.geometry import Geometry

BF16, F32 = 2, 4


def distinct_experts(experts: int, top_k: int, rows: int) -> float:
    """Experts that `rows` rows touch in the mean, each choosing `top_k` uniformly."""
    return experts * (1 - (1 - top_k / experts) ** rows)


def expert_bytes(geometry: Geometry, format: WeightFormat) -> int:
    """One routed expert's three matrices, scales included."""
    shape = (geometry.moe.width, geometry.hidden)
    return 3 * format_bytes(shape, format, element_bytes=BF16)


def _shared(geometry: Geometry) -> int:
    return 3 * geometry.moe.shared * geometry.moe.width * geometry.hidden * BF16


def _router(geometry: Geometry) -> int:
    return geometry.moe.experts * geometry.hidden * F32


def mixture_bytes(geometry: Geometry, format: WeightFormat, rows: int) -> float:
    """A sparse feed-forward of `rows` rows."""
    touched = distinct_experts(geometry.moe.experts, geometry.moe.top_k, rows)
    routed = touched * expert_bytes(geometry, format)
    return routed + _shared(geometry) + _router(geometry)


def _kda(geometry: Geometry) -> int:
    kda, hidden = geometry.kda, geometry.hidden
    joint = (3 * kda.width + kda.heads + 2 * kda.head_dim) * hidden
    return BF16 * (joint + 2 * kda.head_dim * kda.width + kda.width * hidden)


def _kda_state(geometry: Geometry, batch: int, width: int) -> int:
    """One state read and one written per row."""
    kda = geometry.kda
    return batch * (1 + width) * kda.heads * kda.head_dim**2 * F32


def _mla(geometry: Geometry) -> int:
    mla, index, hidden = geometry.mla, geometry.index, geometry.hidden
    joint = (mla.q_rank + mla.kv_rank + 2 * index.head_dim + index.heads) * hidden
    heads = mla.heads * (mla.nope_dim * mla.q_rank + (mla.nope_dim + mla.value_dim) * mla.kv_rank)
    output = mla.heads * mla.value_dim * hidden
    return BF16 * (joint + heads + output + index.heads * index.head_dim * mla.q_rank)


def _hyper(geometry: Geometry) -> int:
    n = geometry.hyper.streams
    return 2 * (2 + n) * n * n * geometry.hidden * F32


def _head(geometry: Geometry) -> int:
    return geometry.vocab_size * geometry.hidden * BF16


def target_bytes(
    geometry: Geometry, format: WeightFormat, *, batch: int, width: int, context: int
) -> float:
    """A target pass over B lanes of W rows, its logits written once."""
    rows, total = batch * width, 0.0
    latents = batch * min(context, geometry.index.top_k) * geometry.mla.kv_rank * BF16
    for recurrent, sparse in zip(geometry.recurrent, geometry.sparse, strict=True):
        total += _hyper(geometry)
        if recurrent:
            total += _kda(geometry) + _kda_state(geometry, batch, width)
        else:
            total += _mla(geometry) + latents
        if sparse:
            total += mixture_bytes(geometry, format, rows)
        else:
            total += 3 * geometry.dense_width * geometry.hidden * BF16
    return total + _head(geometry) + rows * geometry.vocab_size * F32


def draft_bytes(geometry: Geometry, format: WeightFormat, *, batch: int, drafts: int) -> float:
    """The drafter's passes of a round; without drafts the pair's projection and cache row alone."""
    hidden = geometry.hidden
    join = 2 * hidden * hidden * BF16
    if not drafts:
        return join
    step = join + _mla(geometry) + mixture_bytes(geometry, format, batch) + _head(geometry)
    return drafts * (step + batch * geometry.vocab_size * F32)


def sampler_bytes(geometry: Geometry, *, batch: int, width: int) -> int:
    """Logits read once, and q read once where drafts are verified."""
    return batch * (2 * width - 1) * geometry.vocab_size * F32


def round_bytes(
    geometry: Geometry, format: WeightFormat, *, batch: int, width: int, context: int
) -> dict[str, float]:
    """By part; the commit's share is what absorption reads."""
    return {
        "draft": draft_bytes(geometry, format, batch=batch, drafts=width - 1),
        "verify": target_bytes(geometry, format, batch=batch, width=width, context=context),
        "sampler": sampler_bytes(geometry, batch=batch, width=width),
        "commit": 2 * geometry.hidden**2 * BF16 if width > 1 else 0,
    }
