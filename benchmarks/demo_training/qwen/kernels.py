"""The functions the model calls, plain or compiled: chosen once, when the model is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..network import functional as shared
from . import functional


@dataclass(frozen=True, slots=True)
class Kernels:
    """One callable per fused region; the defaults are the plain functions."""

    open_site: Callable[..., Any] = functional.open_site
    turn_site: Callable[..., Any] = functional.turn_site
    write_streams: Callable[..., Any] = functional.write_streams
    gdn_front: Callable[..., Any] = functional.gdn_front
    gdn_back: Callable[..., Any] = shared.kda_back
    inject_grams: Callable[..., Any] = functional.inject_grams
    gated_unit: Callable[..., Any] = functional.gated_unit
    mixture: Callable[..., Any] = functional.mixture
    chain_weights: Callable[..., Any] = shared.chain_weights
    next_token_loss: Callable[..., Any] = shared.next_token_loss
    draft_loss: Callable[..., Any] = shared.draft_loss

    @classmethod
    def compiled(cls, backend: str = "inductor") -> Kernels:
        """Every region compiled for static shapes."""
        torch._dynamo.config.recompile_limit = 64
        plain = cls()
        return cls(
            **{
                f.name: torch.compile(getattr(plain, f.name), dynamic=False, backend=backend)
                for f in fields(cls)
            }
        )
