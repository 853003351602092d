"""The family of the Qwen3.8-Flash demo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..family import Family, TokenIds
from .batched import QwenSession
from .chat_format import LAYOUT
from .kernels import Kernels
from .model import QwenModel
from .published import from_published, is_drafter, to_published
from .shape import (
    END_OF_TEXT,
    END_OF_TURN,
    MARKERS,
    STOP_IDS,
    TAGS,
    TURN,
    added_tokens,
    checkpoint_config,
    generation_config,
    text_config,
)
from .storage import stored_format

BALANCE_WEIGHT = 1e-2
"""Of the balancing loss, one a layer at equal loads."""
THINK = len(MARKERS) + TAGS.index("<think>")


def balance_loss(model: QwenModel) -> Tensor:
    """Mean balancing loss of the last call of every expert layer, weighted."""
    return BALANCE_WEIGHT * torch.stack([moe.unbalanced for moe in model.moes()]).mean()


def unchanged(moes: Sequence[Any]) -> None:
    """Nothing: routers learn their balance from the loss."""


QWEN = Family(
    name="qwen",
    text_config=text_config,
    checkpoint_config=checkpoint_config,
    generation_config=generation_config,
    network=QwenModel,
    kernels=Kernels.compiled,
    to_published=to_published,
    from_published=from_published,
    is_drafter=is_drafter,
    stored_format=stored_format,
    session=QwenSession,
    after_step=unchanged,
    extra_loss=balance_loss,
    slow=("input_mix_weight_down.weight", "block_inject_weight.weight"),
    plain=("embed_tokens", "ngram_embedding", "lm_head", "conv1d"),
    transformers_class="Qwen4ExpForConditionalGeneration",
    chat=LAYOUT,
    ids=TokenIds(
        names=added_tokens(),
        tags=TAGS,
        stop=STOP_IDS,
        answer=THINK,
        full=(THINK, END_OF_TEXT),
        light=(TURN, END_OF_TURN),
        unmarked_full=True,
    ),
)
