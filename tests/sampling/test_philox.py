"""The Philox stream equals published vectors and an integer model (contract: S4, S5)."""

import random

import pytest
import torch

from flare_ray.device.sampling import philox

MASK32 = 0xFFFFFFFF


def model_words(key: int, block: int) -> list[int]:
    """Philox4x32-10 in plain integers, written from the paper."""
    counter = [block & MASK32, block >> 32, 0, 0]
    k0, k1 = key & MASK32, key >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (b >> 32) ^ counter[1] ^ k0,
            b & MASK32,
            (a >> 32) ^ counter[3] ^ k1,
            a & MASK32,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return counter


def signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


def test_zero_key_and_counter_give_the_published_words():
    words = philox.blocks(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 1)
    assert words[0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("uniforms", [philox.uniforms, philox.plain_uniforms])
def test_random_keys_and_offsets_equal_the_integer_model(uniforms):
    rng = random.Random(5)
    keys = [rng.getrandbits(64) for _ in range(40)]
    offsets = [rng.randrange(1 << 40) for _ in range(40)]
    got = uniforms(torch.tensor([signed(k) for k in keys]), torch.tensor(offsets), 11)
    for row, (key, offset) in enumerate(zip(keys, offsets, strict=True)):
        for n in range(11):
            word = model_words(key, (offset + n) // 4)[(offset + n) % 4]
            expected = torch.tensor(word).to(torch.float32) * 2.0**-32 + 2.0**-33
            assert got[row, n] == expected, (key, offset, n)


@pytest.mark.parametrize("uniforms", [philox.uniforms, philox.plain_uniforms])
def test_uniform_of_exactly_one_occurs_at_the_known_seeds(uniforms):
    keys = torch.tensor([16390493, 2871038, 12118387])
    offsets = torch.tensor([0, 2, 2])
    assert uniforms(keys, offsets, 1).flatten().tolist() == [1.0, 1.0, 1.0]


def test_lanes_are_interchangeable():
    keys, offsets = torch.tensor([7, 8, 9]), torch.tensor([12, 24, 0])
    alone = philox.uniforms(keys[1:2], offsets[1:2], 9)
    assert torch.equal(philox.uniforms(keys, offsets, 9)[1:2], alone)
