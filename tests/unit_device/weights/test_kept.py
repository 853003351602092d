"""What stays packed on CUDA: whole layers in one uncut format; the byte count follows."""

import pytest
import torch

from flare_ray.device.ops.moe.packed import Fp8Stack, Nvfp4Stack
from flare_ray.device.parallel.groups import SingleGroup
from flare_ray.device.weights.budget import rank_weight_bytes
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.formats.fp8_block import quantise_fp8_block
from flare_ray.device.weights.formats.nvfp4 import quantise_nvfp4
from flare_ray.device.weights.index import open_checkpoint
from flare_ray.device.weights.kept import kept_format, kept_formats
from flare_ray.device.weights.loader import RankWeights
from flare_ray.recipes import packed
from flare_ray.recipes.declaration import TensorSpec
from flare_ray.recipes.reading import RankReader
from tests.unit_device.weights.synthetic import Checkpoint

WIDTH, HIDDEN, EXPERTS = 128, 256, 2
NVFP4, FP8, PLAIN = WeightFormat.NVFP4_MODELOPT, WeightFormat.FP8_BLOCK, WeightFormat.PLAIN
NAMES = [f"layers.0.mlp.experts.{expert}" for expert in range(EXPERTS)]
CONFIGS = {
    NVFP4: {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []},
    FP8: {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def specs() -> list[TensorSpec]:
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return [
        TensorSpec(
            f"{name}.{part}_proj.weight",
            shape,
            "target",
            quantisable=True,
            shard_dim=1 if part == "down" else 0,
        )
        for name in NAMES
        for part, shape in shapes.items()
    ]


def checkpoint(folder, form: WeightFormat):
    """Experts with global scales of their own, written in a format."""
    made = Checkpoint(config={"quantization_config": CONFIGS[form]})
    torch.manual_seed(3)
    for number, spec in enumerate(specs()):
        weight = torch.randn(spec.shape) * (number + 1)
        stem = spec.name.removesuffix("weight")
        if form is FP8:
            parts = quantise_fp8_block(weight)
            made.tensors[spec.name] = parts.weight
            made.tensors[f"{stem}weight_scale_inv"] = parts.scale_inv
        else:
            parts = quantise_nvfp4(weight)
            made.tensors[spec.name] = parts.packed
            made.tensors[f"{stem}weight_scale"] = parts.block_scale
            made.tensors[f"{stem}weight_scale_2"] = parts.global_scale
        made.values[spec.name] = parts.dequantise(torch.float32)
    return made, made.write(folder)


@pytest.mark.parametrize(
    ("formats", "device", "sizes", "wanted"),
    [
        ({NVFP4}, "cuda", (2048, 4096), NVFP4),
        ({FP8}, "cuda", (2048, 4096), FP8),
        ({NVFP4}, "cpu", (2048, 4096), PLAIN),
        ({NVFP4, FP8}, "cuda", (2048, 4096), PLAIN),
        ({NVFP4, PLAIN}, "cuda", (2048, 4096), PLAIN),
        ({FP8}, "cuda", (192, 4096), PLAIN),
        ({NVFP4}, "cuda", (24, 4096), PLAIN),
        ({WeightFormat.MXFP4}, "cuda", (2048, 4096), PLAIN),
    ],
)
def test_only_whole_layers_of_one_format_stay_packed(formats, device, sizes, wanted):
    assert kept_format(formats, device=device, sizes=sizes) is wanted


@pytest.mark.parametrize("form", [NVFP4, FP8])
def test_planned_bytes_follow_what_is_kept(tmp_path, form):
    _made, folder = checkpoint(tmp_path, form)
    listed = specs()

    def planned(device):
        format_of = kept_formats(folder, listed, device=device, world_size=1, families=("target",))
        return rank_weight_bytes(listed, world_size=1, element_bytes=2, format_of=format_of)

    stack = (Fp8Stack if form is FP8 else Nvfp4Stack).empty(
        EXPERTS, WIDTH, HIDDEN, torch.device("cpu")
    )
    held = sum(getattr(stack, name).nbytes for name in stack.__slots__)
    assert planned("cuda") == held
    assert planned("cpu") == EXPERTS * 3 * WIDTH * HIDDEN * 2


def test_a_plan_without_files_counts_everything_dequantised(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    format_of = kept_formats(tmp_path, specs(), device="cuda", world_size=1, families=("target",))
    assert {format_of(spec) for spec in specs()} == {PLAIN}


@pytest.mark.parametrize("form", [NVFP4, FP8])
def test_stacks_hold_what_the_checkpoint_stores(tmp_path, monkeypatch, form):
    made, folder = checkpoint(tmp_path, form)
    monkeypatch.setattr(packed, "kept_format", lambda formats, **_: next(iter(set(formats))))
    weights = RankWeights(
        open_checkpoint(folder), specs(), device="cpu", dtype=torch.float32, families=("target",)
    )
    reader = RankReader(None, weights, SingleGroup())
    stack = packed.packed_stack(reader, NAMES, width=WIDTH, hidden=HIDDEN)
    weights.assert_all_used("target")
    for expert, name in enumerate(NAMES):
        gate, up, down = (made.values[f"{name}.{part}.weight"] for part in packed.PARTS)
        both, lowered = stack.dequantised(expert)
        assert torch.equal(both, torch.cat((gate, up)))
        assert torch.equal(lowered, down)
