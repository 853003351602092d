"""Target and proposal distributions from F32 logits (contract: S2).

Order of the target's filters: temperature, top-k, top-p, min-p; each acts on what the previous one
kept. Ties break to the lowest token id on every path: top-k keeps exactly k, the nucleus takes
equal probabilities in id order.

The nucleus needs no sort: the boundary probability is found exactly by a radix descent over the
bits of the probabilities (non-negative floats order like their bit patterns), in compiled passes on
CPU (numba) and, in a fixed order of sums, on CUDA (distribution). `nucleus_mask` is what both are
compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_DIGIT_BITS = 10
_BINS = 1 << _DIGIT_BITS  # probabilities <= 1 have bit patterns <= 0x3F800000, three 10-bit digits


@dataclass(slots=True)
class FilterParams:
    """Per-lane sampling parameters on the device, and host-known bounds that let a program skip
    work.

    Attributes:
        temperature: [B] float32, > 0.
        top_k: [B] int64, 0 = off.
        top_p: [B] float32 in (0, 1], 1 = off.
        min_p: [B] float32 in [0, 1), 0 = off.
        max_top_k: static upper bound of top_k over lanes; 0 = no lane uses top-k.
        every_lane_greedy: static: every lane has top_k == 1.
        any_top_p / any_min_p: static: some lane uses the filter.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    max_top_k: int
    every_lane_greedy: bool
    any_top_p: bool
    any_min_p: bool


def one_hot_max(logits: Tensor) -> Tensor:
    """Point mass at the lowest-id maximum of the last axis; float32, same shape as `logits`."""
    highest = logits.amax(-1, keepdim=True)
    # argmax on CUDA does not promise the first maximum, a masked amin of ids does
    ids = torch.arange(logits.shape[-1], device=logits.device)
    first = torch.where(logits == highest, ids, logits.shape[-1] - 1).amin(-1, keepdim=True)
    return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, first, 1.0)


def _keep_first(candidates: Tensor, allowed: Tensor) -> Tensor:
    """Mask of the first `allowed` [..., 1] True entries, by id, of a bool mask [..., V]."""
    return candidates & (candidates.to(torch.int32).cumsum(-1) <= allowed)


def top_k_mask(logits: Tensor, top_k: Tensor, max_top_k: int) -> Tensor:
    """True where a token is among its row's k best; exactly k, ties to the lowest id.

    Args:
        logits: [..., V] float32.
        top_k: broadcastable to [...], int64; 0 = keep all.
        max_top_k: static bound, 1 .. V.
    """
    vocabulary = logits.shape[-1]
    bound = min(max_top_k, vocabulary)
    best = torch.topk(logits, bound, dim=-1, sorted=True).values
    k = top_k.expand(logits.shape[:-1]).unsqueeze(-1)
    limit = best.gather(-1, (k - 1).clamp(0, bound - 1))
    above = logits > limit
    room = k - above.sum(-1, keepdim=True)
    return above | _keep_first(logits == limit, room) | (k == 0)


def nucleus_mask(probs: Tensor, top_p: Tensor) -> Tensor:
    """True for the smallest set of most probable tokens whose mass reaches top_p (of the row's
    sum).

    Args:
        probs: [..., V] float32, each in [0, 1]; rows need not be normalised.
        top_p: broadcastable to [...], float32; 1 keeps every token of positive probability.
    """
    # Sums in float64: those in float32 over 154,880 tokens move the boundary by 3e-5 of mass.
    bits, weight = probs.view(torch.int32), probs.double()
    goal = top_p.double().expand(probs.shape[:-1]).unsqueeze(-1) * weight.sum(-1, keepdim=True)
    mass_above = torch.zeros_like(goal)
    prefix = torch.zeros_like(goal, dtype=torch.int32)
    for shift in (2 * _DIGIT_BITS, _DIGIT_BITS, 0):
        digit = ((bits >> shift) & (_BINS - 1)).to(torch.int64)
        mass = weight.new_zeros((*probs.shape[:-1], _BINS)).scatter_add_(-1, digit, weight)
        reached = mass.flip(-1).cumsum(-1).flip(-1) + mass_above  # mass at or above each digit
        chosen = (reached >= goal).sum(-1, keepdim=True).sub_(1).clamp_(min=0)
        above = torch.where(
            chosen + 1 < _BINS, reached.gather(-1, (chosen + 1).clamp(max=_BINS - 1)), mass_above
        )
        mass_above = above
        prefix = (prefix << _DIGIT_BITS) | chosen.to(torch.int32)
        weight = torch.where((bits >> shift) == prefix, probs.double(), 0.0)
    boundary = prefix.view(torch.float32).double()
    room = torch.ceil((goal - mass_above) / boundary.clamp(min=torch.finfo(torch.float32).tiny))
    kept = (bits > prefix) | _keep_first(bits == prefix, room.clamp(min=1.0))
    return torch.where(top_p.expand(probs.shape[:-1]).unsqueeze(-1) < 1.0, kept, probs > 0)


def target_probs(logits: Tensor, params: FilterParams) -> Tensor:
    """The request's distribution at every verified row.

    Args:
        logits: [B, W, V] float32, already masked and penalised; -inf allowed, each row with a
            finite maximum.
    Returns:
        [B, W, V] float32, rows summing to 1.
    """
    if params.every_lane_greedy:
        return one_hot_max(logits)
    if params.max_top_k > 0:
        kept = top_k_mask(logits, params.top_k.view(-1, 1), params.max_top_k)
        logits = torch.where(kept, logits, float("-inf"))
    return _probs(logits, params)


def _probs(logits: Tensor, params: FilterParams, out: Tensor | None = None) -> Tensor:
    """Temperature, top-p and min-p of logits [B, W, V]; on CPU written to `out`, if given."""
    if logits.is_cuda:
        return _cuda_probs(logits, params)
    from flare_ray.device.sampling import numba

    probs = numba.soften(logits, params.temperature, out)
    if params.any_top_p or params.any_min_p:
        probs = numba.filter_rows(probs, params.top_p, params.min_p)
    return probs


def _cuda_probs(logits: Tensor, params: FilterParams) -> Tensor:
    """Temperature, top-p and min-p of logits [B, W, V] on CUDA; every sum in one fixed order."""
    from flare_ray.device.sampling.distribution import triton

    top_p = params.top_p if params.any_top_p else None
    probs = triton.probabilities(logits, params.temperature, top_p)
    if not params.any_min_p:
        return probs
    floor = params.min_p.view(-1, 1, 1) * probs.amax(-1, keepdim=True)
    probs = torch.where(probs >= floor, probs, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def draft_probs(logits: Tensor, params: FilterParams, out: Tensor | None = None) -> Tensor:
    """The proposal distribution q: temperature, top-p and min-p; a greedy lane proposes greedily.

    q is kept, so the emitted law is exact whatever q is (contract: S1, S2); what the target would
    cut off anyway is better not proposed. Over the demo's ten categories, five drafts, filtered
    proposals emit 3.56 tokens a round and unfiltered ones 3.39; a sharper temperature (x 0.8) emits
    3.35.

    Args:
        logits: [B, V] float32.
        out: [B, V] float32 of contiguous rows, overwritten; None = a new tensor.
    Returns:
        [B, V] float32, rows summing to 1: `out` if it was given.
    """
    if params.every_lane_greedy:
        probs = one_hot_max(logits)
    else:
        place = None if out is None else out.unsqueeze(1)
        probs = _probs(logits.unsqueeze(1), params, place).squeeze(1)
        if params.max_top_k > 0:
            probs = torch.where((params.top_k == 1).view(-1, 1), one_hot_max(logits), probs)
    if out is None or probs.data_ptr() == out.data_ptr():
        return probs
    return out.copy_(probs)
