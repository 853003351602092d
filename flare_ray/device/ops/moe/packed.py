"""A layer's routed experts as stored, stacked, for kernels that unpack them while they multiply."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.weights.formats.mxfp4 import GROUP as MX_GROUP
from flare_ray.device.weights.formats.nvfp4 import GROUP, unpack_e2m1


@dataclass(slots=True)
class Nvfp4Stack:
    """NVFP4: two codes a byte, a scale per 16 inputs, a factor per matrix.

    Attributes:
        gate_up: [E, 2 I, H / 2] uint8, gate rows first; gate_up_scale: [E, 2 I, H / 16] e4m3.
        down: [E, H, I / 2] uint8; down_scale: [E, H, I / 16] e4m3.
        factors: [E, 3] float32, of gate, up and down as a whole.
        divides: weights are divided by their factor, not multiplied by it.
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor
    factors: Tensor
    divides: bool = False

    @classmethod
    def empty(cls, experts: int, width: int, hidden: int, device: torch.device) -> Nvfp4Stack:
        """Room for E experts of I = `width`; both sizes are multiples of 16."""
        scale = (GROUP, torch.float8_e4m3fn)
        gate_up, gate_up_scale, down, down_scale = _room(experts, width, hidden, scale, device)
        factors = torch.empty((experts, 3), dtype=torch.float32, device=device)
        return cls(gate_up, gate_up_scale, down, down_scale, factors)

    @property
    def multipliers(self) -> Tensor:
        """[E, 3] float32, what kernels multiply their sums by."""
        return self.factors.reciprocal() if self.divides else self.factors

    def dequantised(self, expert: int) -> tuple[Tensor, Tensor]:
        """One expert's gate_up [2 I, H] and down [H, I], float32; for tests and references."""
        width = self.gate_up.shape[1] // 2
        gate_up = _values(self.gate_up[expert], self.gate_up_scale[expert].float())
        down = _values(self.down[expert], self.down_scale[expert].float())
        gate, up, whole = self.factors[expert]
        factor = torch.cat((gate.expand(width), up.expand(width))).unsqueeze(1)
        if self.divides:
            return gate_up / factor, down / whole
        return gate_up * factor, down * whole


@dataclass(slots=True)
class Mxfp4Stack:
    """MXFP4: two codes a byte, a power of two per 32 inputs.

    Attributes:
        gate_up: [E, 2 I, H / 2] uint8, gate rows first; gate_up_scale: [E, 2 I, H / 32] uint8,
            exponents biased by 127.
        down: [E, H, I / 2] uint8; down_scale: [E, H, I / 32] uint8.
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    @classmethod
    def empty(cls, experts: int, width: int, hidden: int, device: torch.device) -> Mxfp4Stack:
        """Room for E experts of I = `width`; both sizes are multiples of 32."""
        return cls(*_room(experts, width, hidden, (MX_GROUP, torch.uint8), device))

    def dequantised(self, expert: int) -> tuple[Tensor, Tensor]:
        """One expert's gate_up [2 I, H] and down [H, I], float32; for tests and references."""
        gate_up, down = (
            _values(codes[expert], exponents[expert].view(torch.float8_e8m0fnu).float())
            for codes, exponents in (
                (self.gate_up, self.gate_up_scale),
                (self.down, self.down_scale),
            )
        )
        return gate_up, down


def _room(
    experts: int,
    width: int,
    hidden: int,
    scale: tuple[int, torch.dtype],
    device: torch.device,
) -> tuple[Tensor, ...]:
    """Codes and scales of gate and up, then of down; `scale`: inputs that share one, its type."""
    group, kind = scale
    made = []
    for rows, inputs in ((2 * width, hidden), (hidden, width)):
        made.append(torch.empty((experts, rows, inputs // 2), dtype=torch.uint8, device=device))
        made.append(torch.empty((experts, rows, inputs // group), dtype=kind, device=device))
    return tuple(made)


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    """[N, K] float32 of codes [N, K / 2] and scales [N, groups] float32; exact."""
    return (unpack_e2m1(codes).unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)


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


Fp4Stack = Nvfp4Stack | Mxfp4Stack
Stack = Fp4Stack | Fp8Stack
