"""Log-probabilities of chosen tokens and of the most probable ones (contract: K4).

They are the model's own: taken from the target's logits before penalties, rules, masks, temperature
and filters, so a request's settings never make one infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.contracts.plan import MAX_TOP_LOGPROBS
from flare_ray.device.sampling.filters import top_k_mask

SCORE_WORDS = 1 + 2 * MAX_TOP_LOGPROBS
"""int32 words of a token: bits of its log-probability, ids, bits of their log-probabilities."""
FIRST_ID = 1
FIRST_LOGPROB = 1 + MAX_TOP_LOGPROBS


def write_scores(logits: Tensor, tokens: Tensor, top: int, scores: Tensor) -> None:
    """Score tokens [B, W] under logits [B, W, V] float32.

    Args:
        top: static number of alternatives, 0 .. MAX_TOP_LOGPROBS.
        scores: [B, W, SCORE_WORDS] int32, overwritten in place; words of alternatives beyond `top`
            stay as they are, those beyond the vocabulary are id 0 with -inf.
    """
    total = torch.logsumexp(logits, -1, keepdim=True)
    chosen = logits.gather(-1, tokens.unsqueeze(-1)) - total
    scores[..., :1] = chosen.view(torch.int32)
    if top == 0:
        return
    ids, values = best_tokens(logits, min(top, logits.shape[-1]))
    found = ids.shape[-1]
    scores[..., FIRST_ID : FIRST_ID + top] = 0
    scores[..., FIRST_LOGPROB : FIRST_LOGPROB + top] = torch.full_like(chosen, float("-inf")).view(
        torch.int32
    )
    scores[..., FIRST_ID : FIRST_ID + found] = ids.to(torch.int32)
    scores[..., FIRST_LOGPROB : FIRST_LOGPROB + found] = (values - total).view(torch.int32)


def best_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of [..., V], best first, ties to the lowest id.

    Returns:
        ([..., count] int64 ids, [..., count] float32 logits)
    """
    wanted = torch.full(logits.shape[:-1], count, device=logits.device)
    kept = top_k_mask(logits, wanted, count)
    # Exactly `count` places hold 1; their order does not matter, it is made below.
    ids = torch.topk(kept.to(torch.uint8), count, dim=-1).indices.sort(-1).values
    values = logits.gather(-1, ids)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order), values.gather(-1, order)
