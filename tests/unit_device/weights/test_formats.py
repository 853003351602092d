"""Packed formats against byte-by-byte references, closed forms and round trips."""

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from flare_ray.device.weights.formats.fp8_block import Fp8BlockParts, quantise_fp8_block
from flare_ray.device.weights.formats.nvfp4 import (
    MAGNITUDES,
    Nvfp4Parts,
    pack_e2m1,
    quantise_nvfp4,
    unpack_e2m1,
)
from tests.unit_device.weights.synthetic import fp8_value, nvfp4_codes

FP8_STEP = 2.0**-4
"""Half a unit in the last of E4M3's four significant bits, relative to the value."""
FP8_FLOOR = 2.0**-10
"""Half of E4M3's smallest step, in units of the block scale."""
FLOAT_SLACK = 1e-6
"""Rounding of the float32 scale and quotient, relative."""
NVFP4_GAUSSIAN_ERROR = (0.08, 0.11)
"""Relative L2 error of Gaussian weights: about 9 % is a property of the format."""

seeds = st.integers(0, 2**31 - 1)
sizes = st.integers(1, 40)


def gaussian(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_every_byte_unpacks_low_nibble_first():
    packed = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    expected = nvfp4_codes(packed, torch.ones(8, 4, dtype=torch.float8_e4m3fn))
    assert torch.equal(unpack_e2m1(packed), expected)
    assert unpack_e2m1(torch.tensor([[0x1F]], dtype=torch.uint8)).tolist() == [[-6.0, 0.5]]


def test_unpacked_bytes_pack_to_themselves():
    packed = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    assert torch.equal(pack_e2m1(unpack_e2m1(packed)), packed)


def test_ties_go_to_the_even_code_and_large_values_are_clamped():
    low, high = MAGNITUDES[:-1], MAGNITUDES[1:]
    ties = torch.tensor([(a + b) / 2 for a, b in zip(low, high, strict=True)] + [1e30])
    even = [high[i] if i % 2 else low[i] for i in range(7)]
    assert unpack_e2m1(pack_e2m1(ties[None])).tolist() == [[*even, 6.0]]


@given(seeds, sizes)
@settings(max_examples=40)
def test_packing_picks_a_nearest_code(seed, rows):
    values = gaussian(seed, rows, 16) * 3
    got = unpack_e2m1(pack_e2m1(values))
    grid = torch.tensor(sorted({*MAGNITUDES, *(-m for m in MAGNITUDES)}))
    best = (values[..., None] - grid).abs().amin(-1)
    assert torch.equal((values - got).abs(), best)


@given(seeds, sizes, st.integers(1, 5), st.booleans())
@settings(max_examples=30)
def test_nvfp4_dequantises_as_the_byte_loop_does(seed, rows, groups, divides):
    parts = quantise_nvfp4(gaussian(seed, rows, groups * 16), global_divides=divides)
    exact = nvfp4_codes(parts.packed, parts.block_scale)
    expected = exact / parts.global_scale if divides else exact * parts.global_scale
    assert torch.equal(parts.dequantise(torch.float32), expected)
    assert torch.equal(parts.dequantise(torch.bfloat16), expected.to(torch.bfloat16))


@given(seeds, sizes, st.integers(1, 5))
@settings(max_examples=30)
def test_nvfp4_values_survive_requantisation_with_the_same_global_scale(seed, rows, groups):
    parts = quantise_nvfp4(gaussian(seed, rows, groups * 16), global_scale=torch.tensor(2.0**-8))
    value = parts.dequantise(torch.float32)
    again = quantise_nvfp4(value, global_scale=parts.global_scale)
    # A group's largest code may be 4 or 6 under half or the whole scale: the values are what holds.
    full = parts.dequantise(torch.float32).unflatten(1, (-1, 16)).abs().amax(-1)
    kept = full == 6.0 * parts.block_scale.to(torch.float32) * parts.global_scale
    same = (again.dequantise(torch.float32) == value).unflatten(1, (-1, 16)).all(-1)
    assert same[kept].all()


def test_nvfp4_error_on_gaussian_weights_is_that_of_the_format():
    weight = gaussian(3, 128, 512)
    error = (quantise_nvfp4(weight).dequantise(torch.float32) - weight).norm() / weight.norm()
    assert NVFP4_GAUSSIAN_ERROR[0] < error < NVFP4_GAUSSIAN_ERROR[1]


def test_multiplier_of_a_dividing_global_scale_is_its_reciprocal():
    parts = quantise_nvfp4(gaussian(4, 2, 16), global_divides=True)
    assert parts.global_multiplier == 1 / parts.global_scale
    plain = quantise_nvfp4(gaussian(4, 2, 16))
    assert plain.global_multiplier == plain.global_scale


def test_zero_group_and_zero_matrix_stay_zero():
    weight = gaussian(5, 4, 48)
    weight[:, 16:32] = 0
    assert not quantise_nvfp4(weight).dequantise(torch.float32)[:, 16:32].any()
    assert torch.equal(
        quantise_nvfp4(torch.zeros(2, 16)).dequantise(torch.float32).abs(), torch.zeros(2, 16)
    )


def test_two_matrices_keep_their_own_global_scales():
    gate, up = quantise_nvfp4(gaussian(6, 32, 64)), quantise_nvfp4(gaussian(7, 32, 64) * 100)
    assert gate.global_scale != up.global_scale
    wrong = Nvfp4Parts(up.packed, up.block_scale, gate.global_scale).dequantise(torch.float32)
    assert not torch.allclose(wrong, up.dequantise(torch.float32))


@given(seeds, sizes, sizes, st.sampled_from([(8, 8), (16, 32), (128, 128)]))
@settings(max_examples=40)
def test_fp8_dequantises_as_the_block_loop_does_and_stays_near(seed, rows, columns, block):
    weight = gaussian(seed, rows, columns)
    parts = quantise_fp8_block(weight, block)
    assert parts.scale_inv.shape == (-(-rows // block[0]), -(-columns // block[1]))
    value = fp8_value(parts.weight, parts.scale_inv, block)
    assert torch.equal(parts.dequantise(torch.float32), value)
    assert torch.equal(parts.dequantise(torch.bfloat16), value.to(torch.bfloat16))
    scale = fp8_value(torch.ones_like(weight), parts.scale_inv, block)
    bound = torch.maximum(weight.abs() * FP8_STEP, scale * FP8_FLOOR) * (1 + FLOAT_SLACK)
    assert ((value - weight).abs() <= bound + FLOAT_SLACK * weight.abs()).all()


@pytest.mark.parametrize(("row", "column"), list(itertools.product((0, 3, 8, 13), (0, 5, 16, 19))))
def test_fp8_rectangle_with_covering_blocks_equals_the_cut_whole(row, column):
    block = (8, 16)
    parts = quantise_fp8_block(gaussian(8, 30, 50), block)
    rows, columns = (row, row + 12), (column, column + 23)
    covering = tuple(
        slice(start // edge, -(-stop // edge))
        for (start, stop), edge in zip((rows, columns), block, strict=True)
    )
    cut = Fp8BlockParts(
        parts.weight[slice(*rows), slice(*columns)],
        parts.scale_inv[covering],
        block,
        (row % block[0], column % block[1]),
    )
    whole = parts.dequantise(torch.float32)[slice(*rows), slice(*columns)]
    assert torch.equal(cut.dequantise(torch.float32), whole)


def test_fp8_zero_block_keeps_a_finite_scale():
    parts = quantise_fp8_block(torch.zeros(4, 4), (2, 2))
    assert torch.equal(parts.scale_inv, torch.ones(2, 2))
    assert not parts.dequantise(torch.float32).any()
