"""Small checkpoints in every storage form, and what their tensors are worth.

References are computed here by loops over bytes and blocks, not by the package's own formats.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from flare_ray.device.weights.formats.fp8_block import quantise_fp8_block
from flare_ray.device.weights.formats.nvfp4 import MAGNITUDES, quantise_nvfp4
from flare_ray.recipes.declaration import TensorSpec

BLOCK = (16, 32)
"""FP8 block of the synthetic checkpoints: small, and not square, so that a swap shows."""
PREFIX = "model.language_model.layers"

CONFIGS = {
    "bf16": None,
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.o_proj"],
    },
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": {"targets": ["Linear"]}},
        "ignore": ["lm_head", "model.language_model.layers.*.self_attn*"],
    },
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["re:.*mlp.*"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group",
                    "group_size": 16,
                },
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*"],
    },
}
FP8_GROUP = {
    "targets": ["re:.*layers.1.mlp.*"],
    "weights": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": list(BLOCK),
    },
}
CONFIGS["mixed"] = {
    **CONFIGS["compressed"],
    "format": "mixed-precision",
    "config_groups": {**CONFIGS["compressed"]["config_groups"], "group_1": FP8_GROUP},
}

# Matrices are [32 or 96 rows, multiple of 64 columns], so that 2 and 4 ranks divide them, FP8
# blocks are cut on the way, and NVFP4 groups never are.
SPECS = (
    TensorSpec("lm_head.weight", (64, 96), "target", quantisable=True, shard_dim=0),
    TensorSpec(f"{PREFIX}.0.norm.weight", (96,), "target"),
    TensorSpec(f"{PREFIX}.0.conv.weight", (64, 1, 4), "target", shard_dim=0),
    TensorSpec(
        f"{PREFIX}.0.self_attn.o_proj.weight", (96, 64), "target", quantisable=True, shard_dim=1
    ),
    TensorSpec(
        f"{PREFIX}.0.mlp.gate_proj.weight", (96, 64), "target", quantisable=True, shard_dim=0
    ),
    TensorSpec(f"{PREFIX}.0.mlp.up_proj.weight", (96, 64), "target", quantisable=True, shard_dim=0),
    TensorSpec(
        f"{PREFIX}.0.mlp.down_proj.weight", (64, 192), "target", quantisable=True, shard_dim=1
    ),
    TensorSpec(f"{PREFIX}.1.enorm.weight", (96,), "drafter"),
    TensorSpec(
        f"{PREFIX}.1.mlp.down_proj.weight", (64, 128), "drafter", quantisable=True, shard_dim=1
    ),
    TensorSpec(f"{PREFIX}.1.head.weight", (64, 96), "drafter", required=False, shard_dim=0),
)
GATE, UP, DOWN = (f"{PREFIX}.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
O_PROJ, NORM, CONV = (f"{PREFIX}.0.{name}.weight" for name in ("self_attn.o_proj", "norm", "conv"))
HEAD, DRAFT_NORM, DRAFT_DOWN, DRAFT_HEAD = (
    "lm_head.weight",
    *(f"{PREFIX}.1.{name}.weight" for name in ("enorm", "mlp.down_proj", "head")),
)
SPEC = {spec.name: spec for spec in SPECS}


@dataclass
class Checkpoint:
    """A folder's content before it is written: change it, then `write` it.

    Attributes:
        tensors: stored tensors by stored name.
        config: config.json.
        values: what each listed tensor is worth, [full shape] float32.
        shards: number of files; 1 = a single model.safetensors.
        total_size: metadata.total_size of the index; None = the right one.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    shards: int = 1
    total_size: int | None = None

    def write(self, folder: Path) -> Path:
        """Write config.json, the weights and, where there are several files, their index."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.shards == 1:
            save_file(self.tensors, folder / "model.safetensors", {"format": "pt"})
            return folder
        # Round robin in reverse order: a weight and its scales land in different files, and the
        # scales come first.
        names = sorted(self.tensors, reverse=True)
        weight_map = {}
        for shard in range(self.shards):
            file = f"model-{shard + 1:05d}-of-{self.shards:05d}.safetensors"
            mine = names[shard :: self.shards]
            save_file({name: self.tensors[name] for name in mine}, folder / file)
            weight_map |= dict.fromkeys(mine, file)
        total = sum(t.numel() * t.element_size() for t in self.tensors.values())
        metadata = {"total_size": total if self.total_size is None else self.total_size}
        index = {"metadata": metadata, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder


def build(form: str, *, shards: int = 1, seed: int = 5) -> Checkpoint:
    """A checkpoint of SPECS in one of the forms of CONFIGS (optional tensors left out).

    What each form quantises follows its own skip list; `modelopt` leaves the drafter plain without
    saying so; `mixed` stores the drafter in FP8 beside an NVFP4 target.
    """
    generator = torch.Generator().manual_seed(seed)
    made = Checkpoint({}, {"architectures": ["Synthetic"]}, {}, shards)
    if CONFIGS[form] is not None:
        made.config["quantization_config"] = json.loads(json.dumps(CONFIGS[form]))
    for spec in SPECS:
        if not spec.required:
            continue
        weight = torch.randn(spec.shape, generator=generator)
        storage = storage_of(form, spec)
        stored, value = STORE[storage](spec.name, weight)
        made.tensors |= stored
        made.values[spec.name] = value
    return made


def storage_of(form: str, spec: TensorSpec) -> str:
    """How a form of CONFIGS stores a listed tensor: a key of STORE."""
    skipped = spec.name in (HEAD, O_PROJ) or not spec.quantisable
    if form == "bf16" or skipped:
        return "plain"
    if spec.family == "drafter" and form in ("modelopt", "mixed"):
        return "plain" if form == "modelopt" else "fp8"
    return "compressed" if form == "mixed" else form


def store_plain(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    stored = weight.to(torch.bfloat16)
    return {name: stored}, stored.to(torch.float32)


def store_fp8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    parts = quantise_fp8_block(weight, BLOCK)
    value = fp8_value(parts.weight, parts.scale_inv, BLOCK)
    return {name: parts.weight, name + "_scale_inv": parts.scale_inv}, value


def store_fp8_compressed(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    parts = quantise_fp8_block(weight, BLOCK)
    scale = parts.scale_inv.to(torch.bfloat16)
    value = fp8_value(parts.weight, scale.to(torch.float32), BLOCK)
    return {name: parts.weight, name + "_scale": scale}, value


def store_modelopt(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    parts = quantise_nvfp4(weight)
    values = nvfp4_codes(parts.packed, parts.block_scale) * parts.global_scale
    module = name.removesuffix("weight")
    return {
        name: parts.packed,
        name + "_scale": parts.block_scale,
        name + "_scale_2": parts.global_scale,
        module + "input_scale": torch.tensor(0.25),
    }, values


def store_compressed(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    parts = quantise_nvfp4(weight, global_divides=True)
    values = nvfp4_codes(parts.packed, parts.block_scale) / parts.global_scale
    return {
        name + "_packed": parts.packed,
        name + "_scale": parts.block_scale,
        name + "_global_scale": parts.global_scale.reshape(1),
    }, values


STORE = {
    "plain": store_plain,
    "fp8": store_fp8,
    "fp8_compressed": store_fp8_compressed,
    "modelopt": store_modelopt,
    "compressed": store_compressed,
}


def fp8_value(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Block by block: [N, K] float32."""
    value = weight.to(torch.float32)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            rows = slice(row * block[0], (row + 1) * block[0])
            columns = slice(column * block[1], (column + 1) * block[1])
            value[rows, columns] *= scale[row, column]
    return value


def nvfp4_codes(packed: Tensor, block_scale: Tensor) -> Tensor:
    """Byte by byte: code x block scale, [N, K] float32, without the global scale."""
    scales = block_scale.to(torch.float32).tolist()
    rows = []
    for bytes_of_row, scales_of_row in zip(packed.tolist(), scales, strict=True):
        codes = [code for byte in bytes_of_row for code in (byte % 16, byte // 16)]
        rows.append(
            [
                MAGNITUDES[code % 8] * (-1.0 if code >= 8 else 1.0) * scales_of_row[column // 16]
                for column, code in enumerate(codes)
            ]
        )
    return torch.tensor(rows)


def whole(values: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """A listed tensor's value in the engine's type."""
    return values[name].to(dtype)
