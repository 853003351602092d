"""The published text configuration of one family and the bytes its releases would have, as sparse
files: headers are whole, data is holes."""

import json
import math
import struct
from pathlib import Path

from flare_ray.device.weights.budget import HeldForm
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.index import DTYPE_BITS
from flare_ray.recipes.declaration import TensorSpec

LAYERS = 45
FULL = [layer for layer in range(LAYERS) if layer % 4 == 3]
GLM_CONFIG = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "text_config": {
        "model_type": "glm5_next_text",
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "hidden_size": 4096,
        "vocab_size": 154880,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "swiglu_limit": 10.0,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_kpool": 4,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "linear_attn_config": {
            "num_heads": 64,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": [layer for layer in range(LAYERS) if layer not in FULL],
            "full_attn_layers": FULL,
        },
        "layer_types": [
            "deepseek_sparse_attention" if layer in FULL else "linear_attention"
            for layer in range(LAYERS)
        ],
        "mhc": True,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "eos_token_id": [154820, 154827, 154829],
    },
}
FP8_KINDS = (
    ".mlp.experts.",
    ".mlp.shared_experts.",
    ".mlp.gate_proj.",
    ".mlp.up_proj.",
    ".mlp.down_proj.",
    ".self_attn.q_a_proj.",
    ".self_attn.q_b_proj.",
    ".self_attn.kv_a_proj_with_mqa.",
)
"""What the FP8 release quantises, the output projection of attention with a latent besides."""
F32_SUFFIXES = ("_base", "_scale", "dt_bias", "A_log", "e_score_correction_bias")
"""Ends of the names that releases store in float32."""


def is_routed_expert(spec: TensorSpec) -> bool:
    return ".mlp.experts." in spec.name


def experts_as(format: WeightFormat):
    """Routed experts in a format, everything else plain."""
    return lambda spec: HeldForm(format if is_routed_expert(spec) else WeightFormat.PLAIN)


def is_fp8(spec: TensorSpec) -> bool:
    """Whether the FP8 release quantises a tensor; 1,509 others are listed there as exceptions."""
    layer = spec.name.partition(".layers.")[2].partition(".")[0]
    latent = layer.isdigit() and (int(layer) in FULL or int(layer) >= LAYERS)
    output = ".self_attn.o_proj." in spec.name and latent
    return spec.quantisable and (output or any(kind in spec.name for kind in FP8_KINDS))


def fp8_entries(spec: TensorSpec) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, type, shape) under which the FP8 release stores a listed tensor."""
    if not is_fp8(spec):
        dtype = "F32" if spec.name.endswith(F32_SUFFIXES) else "BF16"
        return [(spec.name, dtype, spec.shape)]
    grid = tuple(-(-size // 128) for size in spec.shape)
    return [(spec.name, "F8_E4M3", spec.shape), (spec.name + "_scale_inv", "F32", grid)]


def write_sparse(folder: Path, entries, config: dict) -> Path:
    """A checkpoint of the right size whose data takes no space."""
    header, position = {}, 0
    for name, dtype, shape in entries:
        end = position + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + position)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
