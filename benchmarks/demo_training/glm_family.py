"""The family of the GLM demo."""

from __future__ import annotations

from .batched import BatchedSession
from .chat_format import LAYOUT
from .family import Family, TokenIds
from .network import DemoModel, Kernels, from_published, is_drafter, to_published
from .network.layers import balance
from .shape import (
    ASSISTANT_ID,
    MARKERS,
    STOP_IDS,
    TAGS,
    added_tokens,
    checkpoint_config,
    generation_config,
    text_config,
)
from .storage import stored_format

_SECTIONS = ("<|endoftext|>", "<|system|>", "<|user|>", "<|observation|>")

GLM = Family(
    name="glm",
    text_config=text_config,
    checkpoint_config=checkpoint_config,
    generation_config=generation_config,
    network=DemoModel,
    kernels=Kernels.compiled,
    to_published=to_published,
    from_published=from_published,
    is_drafter=is_drafter,
    stored_format=stored_format,
    session=BatchedSession,
    after_step=balance,
    extra_loss=None,
    slow=("_fn",),
    plain=("embed", "lm_head", "conv1d"),
    transformers_class="Glm5NextForConditionalGeneration",
    chat=LAYOUT,
    ids=TokenIds(
        names=added_tokens(),
        tags=TAGS,
        stop=STOP_IDS,
        answer=ASSISTANT_ID,
        full=(ASSISTANT_ID, MARKERS.index("<sop>")),
        light=tuple(MARKERS.index(name) for name in _SECTIONS),
        unmarked_full=False,
    ),
)
