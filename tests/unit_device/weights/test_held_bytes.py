"""What is budgeted for a CPU rank's weights, against what it really holds."""

from typing import Any

import torch

from flare_ray.config import EngineConfig
from flare_ray.device.prepare import make_plan
from flare_ray.device.weights.budget import rank_weight_bytes
from flare_ray.device.weights.index import open_checkpoint
from flare_ray.device.weights.loader import RankWeights
from flare_ray.recipes.declaration import BuildOptions, resolve
from tests.rules.sources import ROOT

DEMO = ROOT / "deployments" / "demo" / "glm"
SLACK = 1.75
"""Most by which the bound may exceed what is held: matrices that are bfloat16 at heart take half
(device/ops/panels), lookup tables and matrices multiplied at load do not."""


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
    storages: dict[int, int] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
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
    bound = rank_weight_bytes(specs, world_size=1, element_bytes=4)
    assert bound / 2 < held <= bound <= SLACK * held
