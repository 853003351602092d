"""The functions a model calls, plain or compiled: chosen once, when the model is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from . import functional


@dataclass(frozen=True, slots=True)
class Kernels:
    """One callable per fused region; the defaults are the plain functions."""

    open_site: Callable[..., Any] = functional.open_site
    turn_site: Callable[..., Any] = functional.turn_site
    close_site: Callable[..., Any] = functional.close_site
    kda_front: Callable[..., Any] = functional.kda_front
    kda_back: Callable[..., Any] = functional.kda_back
    swiglu: Callable[..., Any] = functional.swiglu
    mixture: Callable[..., Any] = functional.mixture
    chain_weights: Callable[..., Any] = functional.chain_weights
    next_token_loss: Callable[..., Any] = functional.next_token_loss
    draft_loss: Callable[..., Any] = functional.draft_loss

    @classmethod
    def compiled(cls, backend: str = "inductor") -> Kernels:
        """Every region compiled for static shapes."""
        torch._dynamo.config.recompile_limit = (
            64  # each region meets a few shapes, with and without gradients
        )
        plain = cls()
        return cls(
            **{
                f.name: torch.compile(getattr(plain, f.name), dynamic=False, backend=backend)
                for f in fields(cls)
            }
        )
