"""What differs between the architectures that the harness trains: network, shape, chat layout,
stored forms.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flare_ray.device.weights.quantiser import Choice

FAMILIES = {
    "glm": "benchmarks.demo_training.glm_family:GLM",
    "qwen": "benchmarks.demo_training.qwen.family:QWEN",
}
"""Where the object of each family lies; it is imported when it is asked for."""


@dataclass(frozen=True, slots=True)
class ChatLayout:
    """How conversations become text, and how answers are read back.

    Attributes:
        render: text of messages and tools, with ``effort`` and ``generate``.
        parse_answer: a continuation of an opened assistant turn, as an ``Answer``.
        expected_answer: an assistant message in that form.
        chat_template: the Jinja template that equals ``render``.
        answer_text: continuation of an opened turn that answers without reasoning, with its end.
        opened: what every assistant turn begins with, and prompts end with.
        raw_prefix: in front of source files and documents.
        end_of_text: behind those that are whole.
        conversation_ends: one of them follows a training conversation.
        efforts: one of them is in a training conversation.
    """

    render: Callable[..., str]
    parse_answer: Callable[[str], Any]
    expected_answer: Callable[..., Any]
    chat_template: Callable[[], str]
    answer_text: Callable[[str], str]
    opened: str
    raw_prefix: str
    end_of_text: str
    conversation_ends: Sequence[str]
    efforts: Sequence[str]


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Added tokens and the roles they play in rows.

    Attributes:
        names: of ids 0 onwards.
        tags: names that are not special.
        stop: ids that end an answer.
        answer: id that opens an assistant turn's own tokens.
        full: weights of one follow these ids, until the next id of ``full`` or ``light``.
        light: prompts follow these.
        unmarked_full: what precedes the first such id in a row has full weight.
    """

    names: Sequence[str]
    tags: Sequence[str]
    stop: Sequence[int]
    answer: int
    full: Sequence[int]
    light: Sequence[int]
    unmarked_full: bool


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Networks have ``hidden(ids, dtype)``, ``readout`` and ``logits`` of hidden states, ``mtp`` with
    ``unroll`` and ``readout``, ``draft_logits``, ``set_budget``, ``attentions``, ``num_experts``,
    ``budget_tokens`` and ``pool``; sessions are those of :mod:`.batched`.

    Attributes:
        text_config / checkpoint_config / generation_config: published configurations.
        network: the training model of a ``text_config`` and kernels (None = plain ones).
        kernels: kernels compiled by a backend.
        to_published / from_published / is_drafter: tensors under published names.
        stored_format: form of a tensor or parameter by name.
        session: of a network, requests, positions and most chosen tokens.
        after_step: changes to a network after an optimiser step.
        extra_loss: added to the trunk's loss; None = nothing.
        slow: part of a name of matrices that learn at a lower rate.
        plain: parts of names of matrices that are no maps between hidden channels.
        transformers_class: of the architecture there.
    """

    name: str
    text_config: Callable[[], dict[str, Any]]
    checkpoint_config: Callable[[], dict[str, Any]]
    generation_config: Callable[[], dict[str, Any]]
    network: Callable[..., Any]
    kernels: Callable[[str], Any]
    to_published: Callable[[Any], dict[str, Tensor]]
    from_published: Callable[[Any, dict[str, Tensor]], Any]
    is_drafter: Callable[[Any, str], bool]
    stored_format: Choice
    session: Callable[..., Any]
    after_step: Callable[[Sequence[Any]], None]
    extra_loss: Callable[[Any], Tensor] | None
    slow: Sequence[str]
    plain: Sequence[str]
    transformers_class: str
    chat: ChatLayout
    ids: TokenIds


def family_of(name: str) -> Family:
    """The family of a name.

    Raises:
        ValueError: naming the families there are.
    """
    if name not in FAMILIES:
        raise ValueError(f"no family {name}; choose one of {', '.join(FAMILIES)}")
    module, _, attribute = FAMILIES[name].partition(":")
    family: Family = getattr(importlib.import_module(module), attribute)
    return family
