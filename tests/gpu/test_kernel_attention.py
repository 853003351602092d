"""Attention over index lists on CUDA."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.ops.indexed_attention import reference
from flare_ray.device.ops.indexed_attention.api import causal_attention, indexed_attention
from tests.gpu.kernels import BFLOAT16_L2, error, replayed

pytestmark = pytest.mark.gpu

SCALE = 256**-0.5


def lists(rows: int, count: int, places: int) -> torch.Tensor:
    chosen = torch.stack([torch.randperm(places, device="cuda")[:count] for _ in range(rows)])
    chosen[:, count // 2 :: 3] = -1
    if rows > 1:
        chosen[-1] = -1
    return chosen


@pytest.mark.parametrize("rows", [1, 6, 8, 33])
@pytest.mark.parametrize(("heads", "dim"), [(64, 512), (32, 512), (4, 64)])
@pytest.mark.parametrize("count", [2051, 70])
def test_indexed_attention_equals_the_reference(rows, heads, dim, count):
    torch.manual_seed(rows)
    cache = torch.randn((4096, dim), dtype=torch.bfloat16, device="cuda")
    query = torch.randn((heads, rows, dim), dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    index = lists(rows, count, 4096)
    cache[4095] = float("nan")
    index[index == 4095] = -1
    got = indexed_attention(query, cache, index, scale=SCALE)
    safe = cache.nan_to_num().float()
    wanted = reference.indexed_attention(query.float(), safe, index, scale=SCALE)
    assert error(got, wanted) <= BFLOAT16_L2
    call = lambda: indexed_attention(query, cache, index, scale=SCALE)  # noqa: E731
    assert torch.equal(replayed(call), got)


def test_float32_latents_are_exact():
    torch.manual_seed(1)
    cache, query = torch.randn((512, 128), device="cuda"), torch.randn((5, 8, 128), device="cuda")
    index = lists(5, 200, 512)
    got = indexed_attention(query, cache, index, scale=SCALE)
    wanted = reference.indexed_attention(query.double(), cache.double(), index, scale=SCALE)
    assert error(got, wanted) <= 2e-6


def test_places_beyond_32_bit_offsets_are_reached():
    """2 ** 22 + places of 512 channels: an offset of 32 bits would wrap into the first ones."""
    places = 2**22 + 4096
    cache = torch.zeros((places, 512), dtype=torch.bfloat16, device="cuda")
    cache[-4096:] = torch.randn((4096, 512), dtype=torch.bfloat16, device="cuda")
    query = torch.randn((3, 64, 512), dtype=torch.bfloat16, device="cuda")
    near = lists(3, 300, 4096)
    far = torch.where(near < 0, near, near + 2**22)
    got = indexed_attention(query, cache, far, scale=SCALE)
    assert torch.equal(got, indexed_attention(query, cache[-4096:].clone(), near, scale=SCALE))
    assert got.abs().max() > 0


@pytest.mark.parametrize("width", [1, 6])
def test_causal_attention_equals_the_reference(width):
    torch.manual_seed(width)
    lanes, heads, dim, view = 3, 64, 512, 256
    cache = torch.randn((2048, dim), dtype=torch.bfloat16, device="cuda")
    query = torch.randn((lanes, width, heads, dim), dtype=torch.bfloat16, device="cuda")
    read = torch.randint(0, 2048, (lanes * view,), device="cuda")
    ends = torch.tensor([7, 100, view], device="cuda").view(-1, 1, 1)
    ends = ends - torch.arange(width - 1, -1, -1, device="cuda").view(1, -1, 1)
    hidden = torch.arange(view, device="cuda") >= ends
    bias = torch.zeros_like(hidden, dtype=torch.bfloat16).masked_fill_(hidden, float("-inf"))
    got = causal_attention(query, cache, read, bias, scale=SCALE)
    taken = cache[read].view(lanes, view, dim).float()
    wanted = reference.causal_attention(query.float(), taken, bias.float(), scale=SCALE)
    assert error(got, wanted) <= BFLOAT16_L2
