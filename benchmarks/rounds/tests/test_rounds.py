"""The benchmark's rounds on CPU in small sizes, and the bytes that it holds them against."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rounds import gpu
from benchmarks.rounds.engine import PARTS, Placement, TimedRound, build_rank
from benchmarks.rounds.floor import distinct_experts, expert_bytes, round_bytes
from benchmarks.rounds.geometry import geometry, small_geometry
from benchmarks.support.results import read_result
from flare_ray.device.state.layout import Core
from flare_ray.device.weights.formats import WeightFormat

NVFP4 = WeightFormat.NVFP4_MODELOPT


@pytest.mark.parametrize("experts", [WeightFormat.PLAIN, NVFP4], ids=lambda form: form.value)
@torch.inference_mode()
def test_every_part_of_a_round_runs_from_one_state(experts):
    rank = build_rank(
        small_geometry(top_k=128),
        experts,
        slots=3,
        context=70,
        place=Placement("cpu", "float32"),
    )
    timed = TimedRound(rank, batch=3, width=4)
    core = rank.model.store.request.core
    for part in PARTS:
        timed.restore()
        timed.upto(part)()
    assert bool((core[:3, Core.CONSUMED] > 70).all())
    rank.model.store.check_integrity()
    timed.restore()
    assert core[:3, Core.CONSUMED].tolist() == [70] * 3


def test_expert_bytes_are_those_of_the_released_checkpoints():
    shape = geometry(16)
    assert expert_bytes(shape, NVFP4) == 3 * (4096 * 2048 * 9 // 16 + 4)
    assert expert_bytes(shape, WeightFormat.PLAIN) == 3 * 4096 * 2048 * 2


def test_distinct_experts_grow_to_all_of_them():
    assert distinct_experts(288, 8, 1) == pytest.approx(8)
    assert 40 < distinct_experts(288, 8, 6) < 48
    assert distinct_experts(288, 8, 10_000) == pytest.approx(288)


def test_wider_rounds_and_larger_batches_move_more_bytes():
    shape = geometry(16)

    def total(batch, width):
        return sum(round_bytes(shape, NVFP4, batch=batch, width=width, context=1000).values())

    assert total(1, 1) < total(1, 6) < total(4, 6)
    # the head, twelve recurrent layers and thirteen of experts of a one-row round
    assert 8.5e9 < total(1, 1) < 9.2e9


def test_the_table_holds_the_captured_shapes_only():
    assert len(gpu.shapes("nvfp4", quick=False)) == 44
    assert all(b * w <= 128 for b, w in gpu.shapes("plain", quick=False))


def test_targets_are_judged_from_the_table(tmp_path):
    row = {"bandwidth_ratio": 0.6, "sampler_us": 1.0, "round_us": 10.0}
    gpu._write({"nvfp4": {"b1w1": row, "b1w6": row}}, tmp_path)
    assert [t.met for t in read_result(tmp_path / "gpu_rounds.json").targets] == [True, True]
