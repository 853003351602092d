"""A layer's routed experts as stored, stacked, for kernels that unpack them while they multiply."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Nvfp4Stack:
    """NVFP4: two codes a byte, a scale per 16 inputs, a factor per matrix.

    Attributes:
        gate_up: [E, 2 I, H / 2] uint8, gate rows first; gate_up_scale: [E, 2 I, H / 16] e4m3.
        down: [E, H, I / 2] uint8; down_scale: [E, H, I / 16] e4m3.
        factors: [E, 3] float32, what gate, up and down are multiplied by as a whole.
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor
    factors: Tensor

    @classmethod
    def empty(cls, experts: int, width: int, hidden: int, device: torch.device) -> Nvfp4Stack:
        """Room for E experts of I = `width`; both sizes are multiples of 16."""

        def made(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            made(experts, 2 * width, hidden // 2, dtype=torch.uint8),
            made(experts, 2 * width, hidden // 16, dtype=torch.float8_e4m3fn),
            made(experts, hidden, width // 2, dtype=torch.uint8),
            made(experts, hidden, width // 16, dtype=torch.float8_e4m3fn),
            made(experts, 3, dtype=torch.float32),
        )


@dataclass(slots=True)
class Fp8Stack:
    """FP8 with one scale per 128 x 128 block.

    Attributes:
        gate_up: [E, 2 I, H] e4m3, gate rows first; gate_up_scale: [E, 2 I / 128, H / 128] float32.
        down: [E, H, I] e4m3; down_scale: [E, H / 128, I / 128] float32.
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    @classmethod
    def empty(cls, experts: int, width: int, hidden: int, device: torch.device) -> Fp8Stack:
        """Room for E experts of I = `width`; both sizes are multiples of 128."""

        def made(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            made(experts, 2 * width, hidden),
            made(experts, 2 * width // 128, hidden // 128, dtype=torch.float32),
            made(experts, hidden, width),
            made(experts, hidden // 128, width // 128, dtype=torch.float32),
        )


Stack = Nvfp4Stack | Fp8Stack
