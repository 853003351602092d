"""A layer's routed experts as stored, stacked, for kernels that unpack them while they multiply."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.weights.formats.nvfp4 import unpack_e2m1


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

    def dequantised(self, expert: int) -> tuple[Tensor, Tensor]:
        """One expert's gate_up [2 I, H] and down [H, I], float32; for tests and references."""
        width = self.gate_up.shape[1] // 2
        gate_up, down = (
            (unpack_e2m1(codes[expert]).unflatten(1, (-1, 16)) * scale[expert].float()[..., None])
            for codes, scale in (
                (self.gate_up, self.gate_up_scale),
                (self.down, self.down_scale),
            )
        )
        gate, up, whole = self.factors[expert]
        factor = torch.cat((gate.expand(width), up.expand(width))).unsqueeze(1)
        return gate_up.flatten(1) * factor, down.flatten(1) * whole


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

    def dequantised(self, expert: int) -> tuple[Tensor, Tensor]:
        """One expert's gate_up [2 I, H] and down [H, I], float32; for tests and references."""
        gate_up, down = (
            codes[expert].float()
            * scale[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
            for codes, scale in (
                (self.gate_up, self.gate_up_scale),
                (self.down, self.down_scale),
            )
        )
        return gate_up, down


Stack = Nvfp4Stack | Fp8Stack
