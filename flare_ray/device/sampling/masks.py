"""Grammar token masks: one row of bits per candidate position, the bonus row included (contract:
K1)."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def mask_words(vocab_size: int) -> int:
    """int32 words of one mask row."""
    return (vocab_size + WORD_BITS - 1) // WORD_BITS


def apply_token_mask(logits: Tensor, mask: Tensor, masked: Tensor) -> Tensor:
    """Set the logits of forbidden tokens to -inf in masked lanes.

    Args:
        logits: [B, W, V] float32.
        mask: [B, W, ceil(V / 32)] int32; bit v % 32 of word v // 32 set = token v allowed.
        masked: [B] bool; other lanes are left alone whatever their mask rows hold.
    Returns:
        [B, W, V] float32.
    """
    vocabulary = logits.shape[-1]
    shifts = torch.arange(WORD_BITS, device=mask.device, dtype=torch.int32)
    allowed = ((mask.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :vocabulary].bool()
    return torch.where(allowed | ~masked.view(-1, 1, 1), logits, float("-inf"))
