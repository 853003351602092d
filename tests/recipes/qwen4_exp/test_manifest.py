"""Names, shapes, parameter counts, bytes and state of the published model, from shapes alone
(contract: R10)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flare_ray.device.weights.budget import format_bytes, rank_shape
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.recipes.qwen4_exp.geometry import Geometry, read_geometry
from flare_ray.recipes.qwen4_exp.state import ring_entries, state_spec
from flare_ray.recipes.qwen4_exp.weights import manifest
from tests.recipes.qwen4_exp.published import published_config
from tests.support.model_shapes import state_bytes

GEOMETRY = read_geometry(published_config())
SPECS = manifest(GEOMETRY)
TABLE = 51_200_245_760
TARGET_PARAMETERS = 176_943_899_520
DRAFTER_PARAMETERS = 2_607_150_848
MIB = 1 << 20
NVFP4_PARTS = 3
"""Packed weight, block scales, global scale; no activation scale: W4A16."""


def parameters(family: str) -> int:
    return sum(
        math.prod(spec.shape)
        for spec in SPECS
        if spec.family == family and spec.required and not spec.integer
    )


def stored_fused() -> list:
    """What the bfloat16 release stores: experts in two tensors a layer."""
    return [spec for spec in SPECS if not spec.instead]


def test_parameter_counts_are_the_published_ones():
    assert parameters("target") == TARGET_PARAMETERS
    assert parameters("drafter") == DRAFTER_PARAMETERS
    table = sum(math.prod(s.shape) for s in SPECS if ".ngram_embedding.shard_" in s.name)
    assert table == TABLE


def test_bfloat16_release_has_the_published_number_of_tensors():
    fused = stored_fused()
    gram = [spec for spec in fused if ".ple." in spec.name]
    drafter = [spec for spec in fused if spec.family == "drafter"]
    assert len(gram) == 137
    assert len(drafter) == 31
    assert len(fused) - len(gram) - len(drafter) == 1157
    assert sum(math.prod(spec.shape) for spec in fused if spec.integer) == 35


def test_both_spellings_of_the_experts_hold_the_same_weights():
    fused = sum(math.prod(spec.shape) for spec in stored_fused() if not spec.integer)
    assert fused == parameters("target") + parameters("drafter")
    replaced = {spec.instead for spec in SPECS if spec.instead}
    assert replaced == {spec.name for spec in SPECS if not spec.required}


def test_quantised_drafter_has_the_tensors_and_bytes_of_the_source_text():
    """4,637 tensors of 1,596,720,640 bytes: experts NVFP4 as W4A16, the rest bfloat16."""
    tensors = num_bytes = 0
    for spec in SPECS:
        if spec.family != "drafter" or not spec.required:
            continue
        packed = spec.quantisable and ".mlp.experts." in spec.name
        format = WeightFormat.NVFP4_MODELOPT if packed else WeightFormat.PLAIN
        tensors += NVFP4_PARTS if packed else 1
        num_bytes += format_bytes(spec.shape, format, element_bytes=2)
    assert (tensors, num_bytes) == (4_637, 1_596_720_640)


def test_every_name_is_listed_once():
    assert len({spec.name for spec in SPECS}) == len(SPECS)


def test_published_names_and_shapes():
    shapes = {spec.name: spec.shape for spec in SPECS}
    prefix = "model.language_model.layers."
    for name, shape in {
        "lm_head.weight": (248320, 2560),
        f"{prefix}0.linear_attn.in_proj_qkv.weight": (10240, 2560),
        f"{prefix}0.linear_attn.conv1d.weight": (10240, 1, 4),
        f"{prefix}0.linear_attn.A_log": (48,),
        f"{prefix}0.attn_hyper_connection.block_inject_weight.weight": (4, 10240),
        f"{prefix}1.ple.key_proj.weight": (10240, 2560),
        f"{prefix}1.ple.ple_embedding.ngram_embedding.shard_127.weight": (2500012, 160),
        f"{prefix}3.self_attn.q_proj.weight": (12288, 2560),
        f"{prefix}3.self_attn.k_proj.weight": (512, 2560),
        f"{prefix}3.self_attn.indexer.index_qk_proj.weight": (640, 2560),
        f"{prefix}47.mlp.experts.gate_up_proj": (512, 1280, 2560),
        f"{prefix}47.mlp.experts.511.down_proj.weight": (2560, 640),
        "model.language_model.hyper_connection_mixer.input_mix_weight_up.weight": (10240, 320),
        "mtp.pre_fc_norm_hidden.weight": (10240,),
        "mtp.layers.0.mlp.shared_expert_gate.weight": (1, 2560),
    }.items():
        assert shapes[name] == shape, name
    assert "model.language_model.hyper_connection_mixer.block_inject_weight.weight" not in shapes


def test_metadata_may_number_the_drafters_layer_after_the_targets():
    aliases = {spec.name: spec.alias for spec in SPECS if spec.alias}
    assert aliases["mtp.layers.0.mlp.gate.weight"] == "mtp.layers.48.mlp.gate.weight"
    assert all(name.startswith("mtp.layers.0.") for name in aliases)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_tensor_is_shared_by_every_degree(size):
    shapes = {spec.name: rank_shape(spec, size) for spec in SPECS}
    keys = shapes["model.language_model.layers.3.self_attn.k_proj.weight"]
    assert keys == (512 // min(size, 2), 2560)
    assert shapes["model.language_model.layers.0.linear_attn.A_log"] == (48 // size,)


def test_a_saved_column_is_95_times_a_record():
    columns = replace(GEOMETRY, recurrence="columns")
    sizes = per_slot(1, columns)
    saved = sum(size for name, size in sizes.items() if name.endswith(".recurrent"))
    assert saved == 8 * 108 * MIB
    assert round(saved / (8 * 1_186_560)) == 95


def per_slot(size: int = 1, geometry: Geometry = GEOMETRY) -> dict[str, int]:
    return state_bytes(state_spec(geometry, size), GEOMETRY.vocab_size)


def test_state_bytes_are_the_published_ones():
    """108 MiB per recurrent state, 1.13 MiB per recorded row, 2,112 bytes per cached token and
    layer, 20 KiB of tail, 80 MiB of feedback for 4,096 rows."""
    sizes = per_slot()

    def total(*purposes: str) -> int:
        return sum(size for name, size in sizes.items() if name.rpartition(".")[2] in purposes)

    cached = ("keys", "values", "pooled")
    assert total("recurrent") == 108 * MIB
    assert total("corrections", "key_rows", "decays") == 8 * 1_186_560
    assert total(*cached) == 13 * 64 * 2_112
    assert sum(sizes[f"layers.48.{name}"] for name in cached) == 64 * 2_112
    assert sizes["tail"] == 20 * 1024
    assert sizes["tail"] * 4096 == 80 * MIB
    assert total("tail") - sizes["tail"] == 13 * 12 * 128 * 2
    assert total("grams") == 10_240 * (9 + 8) * 2
    assert total("tokens") == (2 + 8) * 8
    assert total("window") == 36 * 10_240 * (3 + 8) * 2


def test_ranks_beyond_the_key_heads_keep_copies():
    cached = {size: per_slot(size)["layers.3.keys"] for size in (1, 2, 4)}
    assert cached[1] == 2 * cached[2] == 2 * cached[4]
    assert per_slot(4)["layers.0.recurrent"] * 4 == per_slot(1)["layers.0.recurrent"]


def test_ring_holds_an_open_group_and_a_rejected_round():
    assert [ring_entries(group) for group in (2, 4, 8, 16)] == [8, 12, 16, 32]
