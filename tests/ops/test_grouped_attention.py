"""Attention of shared key heads, rotary positions, stream mixing and softmax routing: against
definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flare_ray.device.ops.grouped_attention import reference
from flare_ray.device.ops.grouped_attention.api import (
    KeyValues,
    causal_attention,
    indexed_attention,
)
from flare_ray.device.ops.rmsnorm.centred import CentredRmsNorm
from flare_ray.device.ops.rotary.api import Rotary, rotate
from flare_ray.device.ops.router.softmax import softmax_route
from flare_ray.device.ops.short_conv.api import short_conv
from flare_ray.device.ops.stream_mixer.api import StreamMixer, mix_out
from flare_ray.errors import ContractViolation

ATOL = 2e-6
"""Float32 results of order one: rounding of another summation order."""


pytestmark = pytest.mark.usefixtures("inference")


def close(got: torch.Tensor, wanted: torch.Tensor, atol: float = ATOL) -> bool:
    return got.shape == wanted.shape and bool(torch.allclose(got, wanted, rtol=1e-5, atol=atol))


def plain(query, keys, values, shown, scale):
    """One row: query [H, D], keys and values [N, Hk, D], shown: list of rows."""
    if not shown:
        return torch.zeros_like(query)
    share = query.shape[0] // keys.shape[1]
    keys, values = (part[shown].repeat_interleave(share, 1).double() for part in (keys, values))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", query.double(), keys) * scale, -1)
    return torch.einsum("hn,nhd->hd", weights, values).float()


@pytest.mark.parametrize(("heads", "shared"), [(6, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("block", [1 << 23, 500])
def test_listed_rows_give_the_plain_sum_whatever_hidden_ones_hold(
    monkeypatch, heads, shared, block
):
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block)
    query, cache = torch.randn(5, heads, 8), KeyValues(*torch.randn(2, 30, shared, 8))
    index = torch.stack([torch.randperm(29)[:7] + 1 for _ in range(5)])
    index[1, 3:] = -1
    index[4] = -1
    cache.keys[0], cache.values[0] = float("inf"), float("nan")
    got = indexed_attention(query, cache, index, scale=0.3)
    for row in range(5):
        shown = [place for place in index[row].tolist() if place >= 0]
        assert close(got[row], plain(query[row], cache.keys, cache.values, shown, 0.3))


@pytest.mark.parametrize(("heads", "shared"), [(6, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("block", [1 << 23, 500])
def test_causal_rows_give_the_plain_sum(monkeypatch, heads, shared, block):
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block)
    query, cache = torch.randn(2, 5, heads, 8), KeyValues(*torch.randn(2, 40, shared, 8))
    read = torch.randperm(40)[:24]
    places = torch.arange(12)
    ends = torch.tensor([[3, 4, 5, 6, 7], [7, 8, 9, 10, 11]])
    bias = torch.zeros(2, 5, 12).masked_fill_(places > ends.unsqueeze(2), float("-inf"))
    got = causal_attention(query, cache, read, bias, scale=0.3)
    for lane in range(2):
        for row in range(5):
            shown = read[lane * 12 : lane * 12 + int(ends[lane, row]) + 1].tolist()
            wanted = plain(query[lane, row], cache.keys, cache.values, shown, 0.3)
            assert close(got[lane, row], wanted)


def test_heads_that_cannot_be_shared_are_refused():
    cache = KeyValues(*torch.randn(2, 4, 3, 8))
    with pytest.raises(ContractViolation, match="4 query heads cannot share 3"):
        indexed_attention(
            torch.randn(1, 4, 8), cache, torch.zeros(1, 2, dtype=torch.int64), scale=1
        )


def test_rotation_turns_pairs_of_the_first_channels_and_leaves_the_rest():
    x, positions = torch.randn(4, 3, 10), torch.tensor([0, 1, 50, 7])
    turns = Rotary.of_base(6, 100.0, device=x.device).turns(positions)
    got = rotate(x, turns)
    assert close(got[0], x[0])
    assert torch.equal(got[..., 6:], x[..., 6:])
    for row, position in enumerate(positions.tolist()):
        for pair in range(3):
            angle = torch.tensor(position * 100.0 ** (-2 * pair / 6), dtype=torch.float64)
            number = torch.complex(x[row, :, pair].double(), x[row, :, pair + 3].double())
            number = number * torch.exp(1j * angle)
            assert close(got[row, :, pair], number.real.float())
            assert close(got[row, :, pair + 3], number.imag.float())


def test_products_of_rotated_rows_depend_on_distance_alone():
    query, key, rotary = (
        *torch.randn(2, 1, 1, 8),
        Rotary.of_base(8, 50.0, device=torch.device("cpu")),
    )

    def product(at: int, before: int) -> torch.Tensor:
        rows = (rotate(x, rotary.turns(torch.tensor([p]))) for x, p in ((query, at), (key, before)))
        return torch.mul(*rows).sum()

    assert close(product(9, 4), product(105, 100), 1e-4)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("shape", [(5, 12), (2, 4, 12)])
def test_centred_norm_normalises_each_group_and_adds_one_to_its_weight(groups, shape):
    weight, x = torch.randn(12), torch.randn(shape)
    parts = x.double().unflatten(-1, (groups, -1))
    scale = torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + 1e-3)
    wanted = ((parts * scale).flatten(-2) * (1 + weight.double())).float()
    norm = CentredRmsNorm(weight, eps=1e-3, groups=groups)
    assert close(norm(x), wanted)
    wide = torch.cat((x, torch.randn(*shape[:-1], 5)), dim=-1)
    assert close(norm(wide[..., :12]), wanted)


def test_centred_norm_rounds_once_at_the_end():
    weight, x = torch.randn(16), torch.randn(3, 16).to(torch.bfloat16)
    wide = CentredRmsNorm(weight, eps=1e-6)(x.float())
    assert torch.equal(CentredRmsNorm(weight, eps=1e-6)(x), wide.to(torch.bfloat16))


@pytest.mark.parametrize("streams", [2, 4])
def test_stream_mixer_gates_normalised_streams_and_injects_into_raw_ones(streams):
    hidden, rank, flat = 6, 5, streams * 6
    weight, down, up = torch.randn(flat), torch.randn(rank, flat), torch.randn(flat, rank)
    inject, x, block = torch.randn(streams, flat), torch.randn(3, flat), torch.randn(3, hidden)
    norm = CentredRmsNorm(weight, eps=1e-6, groups=streams)
    mixer = StreamMixer(norm, down, up, inject, streams=streams)
    mixed, injection = mixer.mix_in(x)
    normed = norm(x)
    gate = torch.sigmoid(F.silu(normed @ down.t() / streams) @ up.t())
    assert close(mixed, (gate * normed).view(3, streams, hidden).mean(1))
    wanted = 2 * torch.sigmoid(normed @ inject.t() / streams)
    assert close(injection, wanted)
    added = wanted.unsqueeze(2) * block.unsqueeze(1)
    assert close(mix_out(block, x, injection), x + added.flatten(1), 1e-5)
    last = StreamMixer(norm, down, up, None, streams=streams)
    assert close(last.mix_in(x)[0], mixed)


def test_softmax_routing_prefers_the_lower_expert_and_weighs_to_one():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, -2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    chosen, weights = softmax_route(logits, top_k=2)
    assert chosen.tolist() == [[1, 2], [0, 1]]
    assert close(weights, torch.full((2, 2), 0.5))


def test_dilated_convolution_equals_the_definition():
    joined, taps = torch.randn(2, 9 + 5, 3), torch.randn(4, 3)
    got = short_conv(joined, taps, dilation=3)
    wanted = F.silu(sum(joined[:, 3 * tap : 3 * tap + 5] * taps[tap] for tap in range(4)))
    assert close(got, wanted)
    with pytest.raises(ContractViolation, match="history of 9"):
        short_conv(joined[:, :9], taps, dilation=3)
