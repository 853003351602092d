"""What stays packed on CUDA: whole layers in one uncut format; the byte count follows."""

from pathlib import Path

import pytest
import torch

from flare_ray.device.ops.moe.packed import Fp8Stack, Mxfp4Stack, Nvfp4Stack
from flare_ray.device.parallel.groups import SingleGroup
from flare_ray.device.weights.budget import HeldForm, rank_weight_bytes
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.formats.fp8_block import quantise_fp8_block
from flare_ray.device.weights.formats.mxfp4 import quantise_mxfp4
from flare_ray.device.weights.formats.nvfp4 import quantise_nvfp4
from flare_ray.device.weights.index import StoredTensor, open_checkpoint
from flare_ray.device.weights.kept import Keeping, held_forms, kept_format
from flare_ray.device.weights.loader import RankWeights
from flare_ray.device.weights.stored import StoredWeight
from flare_ray.errors import ConfigError
from flare_ray.recipes import packed
from flare_ray.recipes.declaration import TensorSpec
from flare_ray.recipes.reading import RankReader
from tests.unit_device.weights.synthetic import Checkpoint

WIDTH, HIDDEN, EXPERTS = 128, 256, 2
NVFP4, FP8, PLAIN = WeightFormat.NVFP4_MODELOPT, WeightFormat.FP8_BLOCK, WeightFormat.PLAIN
MXFP4 = WeightFormat.MXFP4
NAMES = [f"layers.0.mlp.experts.{expert}" for expert in range(EXPERTS)]
CONFIGS = {
    NVFP4: {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []},
    FP8: {"quant_method": "fp8", "weight_block_size": [128, 128]},
    MXFP4: {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
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
        elif form is MXFP4:
            parts = quantise_mxfp4(weight)
            made.tensors[spec.name] = parts.packed.view(torch.int8)
            made.tensors[f"{stem}scale"] = parts.exponents.view(torch.float8_e8m0fnu)
        else:
            parts = quantise_nvfp4(weight)
            made.tensors[spec.name] = parts.packed
            made.tensors[f"{stem}weight_scale"] = parts.block_scale
            made.tensors[f"{stem}weight_scale_2"] = parts.global_scale
        made.values[spec.name] = parts.dequantise(torch.float32)
    return made, made.write(folder)


def stored(form: WeightFormat, **settings) -> StoredWeight:
    part = StoredTensor("w", "F8_E8M0" if form is MXFP4 else "F32", (), 4, Path("f"))
    return StoredWeight(specs()[0], form, {"weight": part, "scale": part}, **settings)


@pytest.mark.parametrize(
    ("formats", "device", "sizes", "wanted"),
    [
        ([NVFP4], "cuda", (2048, 4096), NVFP4),
        ([FP8], "cuda", (2048, 4096), FP8),
        ([MXFP4], "cuda", (2048, 4096), MXFP4),
        ([NVFP4], "cpu", (2048, 4096), PLAIN),
        ([NVFP4, FP8], "cuda", (2048, 4096), PLAIN),
        ([NVFP4, PLAIN], "cuda", (2048, 4096), PLAIN),
        ([FP8], "cuda", (192, 4096), PLAIN),
        ([NVFP4], "cuda", (24, 4096), PLAIN),
        ([MXFP4], "cuda", (48, 4096), PLAIN),
    ],
)
def test_only_whole_layers_of_one_format_stay_packed(formats, device, sizes, wanted):
    assert kept_format(map(stored, formats), Keeping(device), sizes=sizes) is wanted


@pytest.mark.parametrize("other", [{"block": (32, 32)}, {"block": (1, 128)}])
def test_fp8_of_other_blocks_is_dequantised(other):
    assert kept_format([stored(FP8, **other)], Keeping("cuda"), sizes=(2048, 4096)) is PLAIN


@pytest.mark.parametrize(
    ("device", "forms", "sizes", "words"),
    [
        ("cpu", [FP8], (128, 256), "fp8_block, of 128 x 256 a rank, which nothing on cpu"),
        ("cuda", [NVFP4, PLAIN], (128, 256), "nvfp4_modelopt and plain"),
        ("cuda", [MXFP4], (48, 256), "mxfp4, of 48 x 256"),
        ("cuda", [], (48, 256), "one tensor a layer"),
    ],
)
def test_experts_that_must_stay_packed_and_cannot_are_refused(device, forms, sizes, words):
    keeping = Keeping(device, "packed")
    with pytest.raises(ConfigError, match=words):
        kept_format(map(stored, forms), keeping, sizes=sizes, layer="layers.0.mlp")


def forms_of(folder, keeping):
    return held_forms(folder, specs(), keeping, world_size=1, families=("target",))


@pytest.mark.parametrize("form", [NVFP4, FP8, MXFP4])
def test_planned_bytes_follow_what_is_kept(tmp_path, form):
    _made, folder = checkpoint(tmp_path, form)

    def planned(keeping):
        form_of = forms_of(folder, keeping)
        return rank_weight_bytes(specs(), world_size=1, element_bytes=2, form_of=form_of)

    kind = {FP8: Fp8Stack, MXFP4: Mxfp4Stack}.get(form, Nvfp4Stack)
    stack = kind.empty(EXPERTS, WIDTH, HIDDEN, torch.device("cpu"))
    held = sum(getattr(stack, name).nbytes for name in stack.__slots__ if name != "divides")
    dequantised = EXPERTS * 3 * WIDTH * HIDDEN * 2
    assert planned(Keeping("cuda")) == held
    assert planned(Keeping("cuda", "dequantised")) == planned(Keeping("cpu")) == dequantised
    if form is not FP8:
        assert planned(Keeping("cpu", "packed")) == held


def test_a_plan_without_files_counts_everything_dequantised(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    form_of = forms_of(tmp_path, Keeping("cuda"))
    assert {form_of(spec) for spec in specs()} == {HeldForm()}


@pytest.mark.parametrize("form", [NVFP4, FP8, MXFP4])
def test_stacks_hold_what_the_checkpoint_stores(tmp_path, monkeypatch, form):
    made, folder = checkpoint(tmp_path, form)
    monkeypatch.setattr(packed, "kept_format", lambda stored, *_, **__: form)
    weights = RankWeights(
        open_checkpoint(folder), specs(), device="cpu", dtype=torch.float32, families=("target",)
    )
    reader = RankReader(None, weights, SingleGroup())
    stack = packed.packed_stack(reader, packed.StoredExperts(NAMES, WIDTH, HIDDEN))
    weights.assert_all_used("target")
    for expert, name in enumerate(NAMES):
        gate, up, down = (made.values[f"{name}.{part}.weight"] for part in packed.PARTS)
        both, lowered = stack.dequantised(expert)
        assert torch.equal(both, torch.cat((gate, up)))
        assert torch.equal(lowered, down)
