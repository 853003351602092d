"""Grammar token masks: one row of bits per candidate position, the bonus row included (contract:
K1)."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def mask_words(vocab_size: int) -> int:
    """int32 words of one mask row."""
    return (vocab_size + WORD_BITS - 1) // WORD_BITS


def allowed_tokens(mask: Tensor, masked: Tensor, vocabulary: int) -> Tensor:
    """Tokens that rows allow.

    Args:
        mask: [B, W, ceil(V / 32)] int32; bit v % 32 of word v // 32 set = token v allowed.
        masked: [B] bool; other lanes allow everything, whatever their mask rows hold.
    Returns:
        [B, W, V] bool.
    """
    # A byte looks its eight tokens up, and lanes are opened as words: no pass over the vocabulary.
    values, bits = torch.arange(256, device=mask.device), torch.arange(8, device=mask.device)
    tokens = ((values.unsqueeze(1) >> bits) & 1).bool()
    words = torch.where(masked.view(-1, 1, 1), mask, -1)
    found = tokens.index_select(0, words.view(torch.uint8).flatten().int())
    return found.view(*mask.shape[:2], -1)[..., :vocabulary]


def apply_token_mask(logits: Tensor, mask: Tensor, masked: Tensor) -> Tensor:
    """Logits [B, W, V] float32 with those of forbidden tokens at -inf; see `allowed_tokens`."""
    return torch.where(allowed_tokens(mask, masked, logits.shape[-1]), logits, float("-inf"))
