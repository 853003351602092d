"""What float32 CPU ranks keep beside the stored weights, against what they really hold."""

import json
import math
from typing import Any

import pytest
import torch

from flare_ray.config import EngineConfig
from flare_ray.device.prepare import make_plan
from flare_ray.device.weights.budget import cpu_second_layout_bytes, rank_weight_bytes
from flare_ray.device.weights.index import open_checkpoint
from flare_ray.device.weights.loader import RankWeights
from flare_ray.recipes.declaration import BuildOptions, resolve
from tests.rules.sources import ROOT
from tests.unit_device.weights.synthetic import SPECS

DEMO = ROOT / "deployments" / "demo" / "glm"
SLACK = 1.25
"""Most by which the bound may exceed what is held: the demo's lookup table is an eighth of it."""


class Alone:
    """The communicator of a single rank."""

    rank, size = 0, 1

    def all_reduce(self, x):
        return x

    def all_gather(self, x):
        return x


def held_bytes(root: Any) -> int:
    """Bytes of all tensors that objects of this project hold, each storage once."""
    seen: set[int] = set()
    storages: dict[object, int] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.is_mkldnn:  # packed: opaque, without a storage of its own
                storages[value] = value.numel() * 4
            else:
                storage = value.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif type(value).__module__.startswith("flare_ray."):
            slots = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())]
            names = [*getattr(value, "__dict__", ()), *slots]
            waiting += [getattr(value, name) for name in names if hasattr(value, name)]
    return sum(storages.values())


def test_bound_of_the_demo_is_what_its_rank_holds_and_little_more():
    config = EngineConfig(checkpoint=str(DEMO), device="cpu", dtype="float32", context_tokens=256)
    plan = make_plan(config)
    specs = resolve(plan.recipe.manifest)(plan.geometry)
    options = BuildOptions(device="cpu", dtype="float32", prefill_tokens=64, max_width=6)
    weights = RankWeights(open_checkpoint(DEMO), specs, device="cpu", dtype=torch.float32)
    with torch.inference_mode(), weights:
        target = resolve(plan.recipe.target)(plan.geometry, weights, Alone(), options)
        drafter = resolve(plan.recipe.drafter)(plan.geometry, weights, Alone(), options)
    held = held_bytes([target, drafter])
    second = cpu_second_layout_bytes(json.loads((DEMO / "config.json").read_text()))
    plain = rank_weight_bytes(specs, world_size=1, element_bytes=4)
    bound = rank_weight_bytes(specs, world_size=1, element_bytes=4, second_layout_bytes=second)
    assert plain < held <= bound <= SLACK * held


@pytest.mark.parametrize("size", [1, 2])
def test_second_layout_counts_matrices_alone_and_each_ranks_part(size):
    def total(second):
        return rank_weight_bytes(
            SPECS, world_size=size, element_bytes=4, second_layout_bytes=second
        )

    elements = sum(
        math.prod(s.shape) // (size if s.shard_dim is not None else 1)
        for s in SPECS
        if s.required and len(s.shape) == 2
    )
    assert total(2) - total(0) == 2 * elements
    assert total(4) - total(0) == 4 * elements


@pytest.mark.parametrize(
    ("config_json", "expected"),
    [
        ({"dtype": "bfloat16"}, 2),
        ({"torch_dtype": "bfloat16"}, 2),
        ({"text_config": {"dtype": "bfloat16"}}, 2),
        ({"dtype": "bfloat16", "text_config": {"dtype": "float32"}}, 4),
        ({"dtype": "float16"}, 4),
        ({}, 4),
        ({"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}, 4),
        ({"dtype": "bfloat16", "text_config": {"quantization_config": {}}}, 4),
    ],
)
def test_only_unquantised_bfloat16_is_kept_in_half_the_bytes(config_json, expected):
    assert cpu_second_layout_bytes(config_json) == expected
