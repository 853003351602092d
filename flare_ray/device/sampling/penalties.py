"""Penalties, logit bias and bans at each row's own prefix (contract: S2, K3).

Order, before masks and filters: 1. repetition penalty, 2. presence and frequency penalties, 3.
logit rules (bias, min_tokens), 4. banned words. Row i of a verification sees the committed counts
plus drafts 0 .. i - 1; what was rejected in an earlier round was never counted.

The dense part is the same for all rows of a lane. Only the drafts of this round make rows differ,
so their few entries are computed again per row and put in place: no [B, W, V] counts exist.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

IN_PROMPT = 1 << 30
"""Bit of a token's count that says "occurs in the prompt"; occurrences in the output lie below."""
BANNED = float("-inf")


class Penalties(NamedTuple):
    """[B] float32 each: repetition > 0, 1 = off; presence and frequency, 0 = off."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor


def _penalised(logits: Tensor, counts: Tensor, penalties: Penalties) -> Tensor:
    """The law for logits and counts of one shape [B, W, n] (or W = 1 in counts)."""
    repetition, presence, frequency = (value.view(-1, 1, 1) for value in penalties)
    generated = counts & (IN_PROMPT - 1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts != 0, repeated, logits)
    return logits - (generated * frequency + (generated > 0) * presence)


def penalise(logits: Tensor, counts: Tensor, drafts: Tensor, penalties: Penalties) -> Tensor:
    """Apply the three penalties at every row's own prefix.

    Args:
        logits: [B, D + 1, V] float32.
        counts: [B, V] int32, committed occurrences as `LogitState.counts` holds them.
        drafts: [B, D] int64, drafts of this round in order.
    Returns:
        [B, D + 1, V] float32.
    """
    result = _penalised(logits, counts.unsqueeze(1), penalties)
    depth = drafts.shape[1]
    if depth == 0:
        return result
    same = (drafts.unsqueeze(1) == drafts.unsqueeze(2)).to(torch.int32)  # [B, j, k]: d_j == d_k
    earlier = torch.nn.functional.pad(same.cumsum(1, dtype=torch.int32), (0, 0, 1, 0))
    total = counts.gather(1, drafts).unsqueeze(1) + earlier  # [B, W, D] count of d_k in row i
    place = drafts.unsqueeze(1).expand(-1, depth + 1, -1)
    # A token drafted twice is written twice with the same value.
    return result.scatter_(2, place, _penalised(logits.gather(2, place), total, penalties))


def apply_rules(logits: Tensor, rules: Tensor, addends: Tensor, positions: Tensor) -> Tensor:
    """Add each rule's addend in the rows before its position.

    Args:
        logits: [B, W, V] float32, overwritten.
        rules: [B, R, 2] int64: token, position before which the rule holds.
        addends: [B, R] float32, -inf for a ban.
        positions: [B, W] int64, the rows' positions.
    """
    active = positions.unsqueeze(2) < rules[:, :, 1].unsqueeze(1)
    value = torch.where(active, addends.unsqueeze(1), 0.0)
    return logits.scatter_add_(2, rules[:, :, 0].unsqueeze(1).expand_as(value), value)


def ban_words(logits: Tensor, words: Tensor, recent: Tensor, tokens: Tensor) -> Tensor:
    """Ban a sequence's last token where the row's own prefix ends in the others.

    Args:
        logits: [B, W, V] float32, overwritten.
        words: [B, M, L] int64, sequences at the end of their rows, negative in front of them.
        recent: [B, L - 1] int64, generated tokens before the rows, negative before the first.
        tokens: [B, W] int64, the rows' inputs, all generated.
    """
    before = words.shape[2] - 1
    windows = torch.cat((recent, tokens), dim=1).unfold(1, before, 1)[:, 1:]  # [B, W, L - 1]
    prefix, last = words[:, :, :before].unsqueeze(1), words[:, :, before].unsqueeze(1)
    fits = ((prefix == windows.unsqueeze(2)) | (prefix < 0)).all(-1) & (last >= 0)
    value = torch.where(fits, BANNED, 0.0)
    return logits.scatter_add_(2, last.clamp(min=0).expand_as(value), value)
