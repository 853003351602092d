"""Bytes from shapes: closed forms, what the loader really keeps, and the published sizes."""

import dataclasses
import math

import pytest
import torch

from flare_ray.device.weights.budget import format_bytes, rank_shape, rank_weight_bytes
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.index import open_checkpoint
from flare_ray.device.weights.loader import RankWeights, Split
from flare_ray.device.weights.manifest import validate
from flare_ray.errors import ConfigError
from flare_ray.recipes.declaration import TensorSpec, resolve
from flare_ray.recipes.registry import get
from tests.unit_device.weights.published import GLM_CONFIG, experts_as
from tests.unit_device.weights.synthetic import BLOCK, CONFIGS, SPECS, build

GIB = 1 << 30
NVFP4 = WeightFormat.NVFP4_MODELOPT


@pytest.fixture(scope="module")
def published():
    recipe = get("glm-5.3-flash")
    return resolve(recipe.manifest)(resolve(recipe.geometry)(GLM_CONFIG))


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        (WeightFormat.PLAIN, 130 * 48 * 2),
        (WeightFormat.FP8_BLOCK, 130 * 48 + 2 * 1 * 4),
        (NVFP4, 130 * 24 + 130 * 3 + 4),
        (WeightFormat.NVFP4_COMPRESSED, 130 * 24 + 130 * 3 + 4),
    ],
)
def test_bytes_of_a_matrix_in_every_format(format, expected):
    assert format_bytes((130, 48), format, element_bytes=2) == expected


@pytest.mark.parametrize("form", list(CONFIGS))
def test_formula_equals_the_stored_bytes_of_every_tensor(tmp_path, form):
    weights = validate(open_checkpoint(build(form).write(tmp_path)), SPECS).weights
    for weight in weights.values():
        activation = 4 if weight.quantises_activations else 0
        computed = format_bytes(weight.spec.shape, weight.format, element_bytes=2, block=BLOCK)
        assert computed + activation == weight.num_bytes


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sum_equals_what_a_rank_holds_after_loading(tmp_path, size):
    index = open_checkpoint(build("compressed").write(tmp_path))
    weights = RankWeights(index, SPECS, device="cpu", dtype=torch.bfloat16)
    held = 0
    for spec in SPECS:
        if spec.required:
            split = None if spec.shard_dim is None else Split(spec.shard_dim, size - 1, size)
            tensor = weights.tensor(spec.name, split=split)
            assert tuple(tensor.shape) == rank_shape(spec, size)
            held += tensor.numel() * tensor.element_size()
    assert rank_weight_bytes(SPECS, world_size=size, element_bytes=2) == held


def test_families_not_loaded_and_tolerated_tensors_weigh_nothing():
    both = rank_weight_bytes(SPECS, world_size=1, element_bytes=4)
    target = rank_weight_bytes(SPECS, world_size=1, element_bytes=4, families=("target",))
    drafter = rank_weight_bytes(SPECS, world_size=1, element_bytes=4, families=("drafter",))
    assert target + drafter == both
    assert drafter == 4 * (96 + 64 * 128)


def test_ranks_that_cannot_share_a_tensor_are_refused_by_name():
    spec = TensorSpec("a.weight", (6, 10), "target", shard_dim=1)
    with pytest.raises(ConfigError, match=r"a\.weight.*10 entries.*4 ranks"):
        rank_weight_bytes([spec], world_size=4, element_bytes=2)


# Published sizes (contract: R10). Parameter counts there leave out the router's correction biases.


@pytest.mark.parametrize(
    ("family", "params", "tensors"),
    [("target", 313_326_799_870, 37_534), ("drafter", 7_432_592_128, 889)],
)
def test_published_parameter_and_tensor_counts_follow_from_the_manifest(
    published, family, params, tensors
):
    listed = [spec for spec in published if spec.family == family and spec.required]
    assert len(listed) == tensors
    counted = [spec for spec in listed if not spec.name.endswith("e_score_correction_bias")]
    assert sum(math.prod(spec.shape) for spec in counted) == params


@pytest.mark.parametrize(
    ("format", "expected", "digits"),
    [
        (WeightFormat.PLAIN, (597, 299, 150, 75), 0),
        (WeightFormat.FP8_BLOCK, (307, 154, 77, 39), 0),
        (NVFP4, (180.2, 90.4, 45.5, 23.1), 1),
    ],
)
def test_published_gib_per_rank_follow_with_a_divided_embedding(
    published, format, expected, digits
):
    # published figures count every plain tensor in bfloat16
    narrow = [dataclasses.replace(spec, wide=False) for spec in published]
    specs = [
        dataclasses.replace(spec, shard_dim=0) if "embed_tokens" in spec.name else spec
        for spec in narrow
    ]
    found = tuple(
        rank_weight_bytes(specs, world_size=n, element_bytes=2, form_of=experts_as(format)) / GIB
        for n in (1, 2, 4, 8)
    )
    assert tuple(round(gib, digits) for gib in found) == expected


def test_replicated_embedding_costs_its_undivided_part(published):
    divided = [
        dataclasses.replace(spec, shard_dim=0) if "embed_tokens" in spec.name else spec
        for spec in published
    ]
    extra = rank_weight_bytes(published, world_size=4, element_bytes=2) - rank_weight_bytes(
        divided, world_size=4, element_bytes=2
    )
    assert extra == 154880 * 4096 * 2 * 3 // 4
