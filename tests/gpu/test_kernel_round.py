"""A small GLM's whole rounds on CUDA kernels in float32 against the CPU's, on equal weights."""

from __future__ import annotations

import zlib

import pytest
import torch

from benchmarks.rounds import engine
from benchmarks.rounds.engine import Placement, TimedRound, build_rank
from benchmarks.rounds.geometry import small_geometry
from benchmarks.rounds.weights import RandomWeights
from flare_ray.device.weights.formats import WeightFormat

pytestmark = pytest.mark.gpu

STATE_ATOL = 2e-3


class SeededWeights(RandomWeights):
    """Values that follow from the tensor's name, on any device."""

    def tensor(self, name, *, split=None, dtype=None):
        device, self.device = self.device, torch.device("cpu")
        torch.manual_seed(zlib.crc32(name.encode()))
        made = super().tensor(name, split=split, dtype=dtype)
        self.device = device
        return made.to(device)


@pytest.mark.parametrize("top_k", [128, 64])
@pytest.mark.parametrize(("batch", "width"), [(1, 1), (3, 6)])
def test_rounds_equal_the_cpus(monkeypatch, top_k, batch, width):
    monkeypatch.setattr(engine, "RandomWeights", SeededWeights)
    ranks, rounds = {}, {}
    with torch.inference_mode():
        for device in ("cpu", "cuda"):
            ranks[device] = build_rank(
                small_geometry(top_k=top_k),
                WeightFormat.PLAIN,
                slots=3,
                context=70,
                place=Placement(device, "float32"),
            )
        here, there = ranks["cpu"].model.store, ranks["cuda"].model.store
        there.request.core.copy_(here.request.core)
        for name, tensor in here.groups.items():
            there.groups[name].copy_(tensor)
        for device, rank in ranks.items():
            rounds[device] = TimedRound(rank, batch=batch, width=width)
        for _ in range(3):
            for device in ("cpu", "cuda"):
                rounds[device].run()
            wanted, got = (rounds[d]._scratch.record for d in ("cpu", "cuda"))
            assert torch.equal(got.cpu(), wanted)
        for name, tensor in here.groups.items():
            # the null slot and the null page hold what nobody reads
            kept = slice(1, None) if name.endswith(("latent", "pooled")) else slice(0, 3)
            difference = (there.groups[name].cpu()[kept] - tensor[kept]).abs().max()
            assert float(difference) <= STATE_ATOL, name
