"""A recurrent block's kernels on CUDA: convolution with rollback, gated delta rule."""

from __future__ import annotations

import math

import pytest
import torch

from flare_ray.device.layers.rows import join_window, round_rows
from flare_ray.device.ops.kda import reference as kda
from flare_ray.device.ops.kda.api import SavedStates
from flare_ray.device.ops.kda.gated import GatedRows, Gates, gated_round
from flare_ray.device.ops.rmsnorm import reference as rmsnorm
from flare_ray.device.ops.short_conv import reference as short_conv
from flare_ray.device.ops.short_conv.api import round_conv
from tests.gpu.kernels import BFLOAT16_L2, FLOAT32_L2, error

pytestmark = pytest.mark.gpu

SLOTS, KEEP = 5, 3


@pytest.mark.parametrize("width", [1, 6, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_conv_equals_joining_and_convolving(width, dtype):
    torch.manual_seed(width)
    slots = torch.tensor([3, 0, 4], device="cuda")
    # a column of a table, as a lane's fields are
    column = torch.tensor([[7, 1 << 40], [0, 5], [2, 5]], device="cuda")[:, 0]
    channels = 24576 if width == 6 else 100
    window = torch.randn((SLOTS + 1, KEEP + 8, channels), device="cuda").to(dtype)
    raw = torch.randn((3 * width, channels + 40), device="cuda").to(dtype)[:, :channels]
    taps = torch.randn((KEEP + 1, channels), device="cuda")
    rows, kept = round_rows(slots, column, width=width, keep=KEEP), window.clone()
    wanted = short_conv.short_conv(join_window(raw, rows, kept), taps)
    got = round_conv(raw, window, taps, slots=slots, column=column)
    assert error(got.view_as(wanted), wanted) <= FLOAT32_L2
    assert torch.equal(window, kept)


@pytest.mark.parametrize("width", [1, 6, 8])
@pytest.mark.parametrize(("heads", "dim"), [(64, 128), (3, 32)])
def test_gated_round_equals_the_reference_and_keeps_every_state(width, heads, dim):
    torch.manual_seed(width)
    slots, column = torch.tensor([2, 0], device="cuda"), torch.tensor([5, 0], device="cuda")
    rows = round_rows(slots, column, width=width, keep=KEEP)
    total = 2 * width
    states = torch.randn((SLOTS * 8, heads, dim, dim), device="cuda") * 0.1
    before = states.clone()
    made = {"dtype": torch.bfloat16, "device": "cuda"}
    qkv = torch.randn((total, 3, heads, dim), device="cuda")
    outer = torch.randn((2, total, heads * dim), **made)
    beta = torch.randn((total, heads + 9), **made)[:, 5 : 5 + heads]
    factor, offset = (torch.randn(heads * dim, device="cuda") for _ in range(2))
    norm = torch.randn(dim, device="cuda")
    gates = Gates(factor, offset, -5.0, norm * math.sqrt(dim), 1e-5 * dim)
    saved = SavedStates(states, rows.state_read, rows.state_write)
    got = gated_round(GatedRows(qkv, outer, beta), gates, saved)
    log_decay = -5.0 * torch.sigmoid(outer[0].float() * factor + offset)
    output, kept = kda.delta_rule(
        qkv.view(2, width, 3, heads, dim),
        log_decay.view(2, width, heads, dim),
        torch.sigmoid(beta.float()).view(2, width, heads),
        before[rows.state_read],
    )
    before.index_copy_(0, rows.state_write, kept.flatten(0, 1))
    assert error(states, before) <= FLOAT32_L2
    gate = torch.sigmoid(outer[1].float()).view(2, width, heads, dim)
    wanted = rmsnorm.rmsnorm(output, norm, eps=1e-5) * gate
    assert error(got.view_as(wanted), wanted) <= BFLOAT16_L2
