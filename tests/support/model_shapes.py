"""What tests of a published config and of the shapes that follow from it share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flare_ray.device.state.layout import StateLimits, allocations


def with_text_settings(config: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The config with text settings replaced in place; ... removes one."""
    for key, value in settings.items():
        if value is ...:
            del config["text_config"][key]
        else:
            config["text_config"][key] = value
    return config


def state_bytes(state: Any, vocab_size: int) -> dict[str, int]:
    """Bytes of a slot or a page in bfloat16, by allocation.

    Args:
        state: a recipe's `StateSpec`.
    """
    limits = StateLimits(
        slots=1,
        num_pages=2,
        context_tokens=64,
        dtype="bfloat16",
        device="cpu",
        vocab_size=vocab_size,
        speculation=True,
    )
    # One slot or page and its null.
    return {a.name: a.num_bytes // 2 for a in allocations(state, limits)}
