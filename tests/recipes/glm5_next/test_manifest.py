"""Names, shapes, parameter counts and state bytes of the published model, from shapes alone."""

from __future__ import annotations

import math

from flare_ray.recipes.glm5_next.geometry import read_geometry
from flare_ray.recipes.glm5_next.state import ring_entries, state_spec
from flare_ray.recipes.glm5_next.weights import manifest
from tests.recipes.glm5_next.published import published_config
from tests.support.model_shapes import state_bytes

GEOMETRY = read_geometry(published_config())
SPECS = manifest(GEOMETRY)
# Published counts; the routers' correction biases are buffers there, not parameters.
TARGET_PARAMETERS = 313_326_799_870
DRAFTER_PARAMETERS = 7_432_592_128
DRAFTER_TENSORS = 889
MIB = 1 << 20


def parameters(family: str) -> int:
    return sum(
        math.prod(spec.shape)
        for spec in SPECS
        if spec.family == family
        and spec.required
        and not spec.name.endswith("e_score_correction_bias")
    )


def test_parameter_counts_are_the_published_ones():
    assert parameters("target") == TARGET_PARAMETERS
    assert parameters("drafter") == DRAFTER_PARAMETERS


def test_drafter_has_the_published_number_of_tensors():
    drafter = [spec for spec in SPECS if spec.family == "drafter" and spec.required]
    assert len(drafter) == DRAFTER_TENSORS
    assert all(spec.name.startswith("model.language_model.layers.45.") for spec in drafter)


def test_every_name_is_listed_once():
    assert len({spec.name for spec in SPECS}) == len(SPECS)


def test_published_names_and_shapes():
    shapes = {spec.name: spec.shape for spec in SPECS}
    prefix = "model.language_model.layers."
    for name, shape in {
        "lm_head.weight": (154880, 4096),
        "model.language_model.embed_tokens.weight": (154880, 4096),
        f"{prefix}0.hc_attn_fn": (24, 16384),
        f"{prefix}0.self_attn.q_conv1d.weight": (8192, 1, 4),
        f"{prefix}0.self_attn.f_b_proj.weight": (8192, 128),
        f"{prefix}0.mlp.down_proj.weight": (4096, 12288),
        f"{prefix}3.self_attn.kv_b_proj.weight": (32768, 512),
        f"{prefix}3.self_attn.indexer.index_kpool_compress_gate": (128, 4096),
        f"{prefix}3.self_attn.indexer.index_kpool_compress_ape": (4, 128),
        f"{prefix}3.mlp.experts.287.gate_proj.weight": (2048, 4096),
        f"{prefix}45.eh_proj.weight": (4096, 8192),
        f"{prefix}45.shared_head.norm.weight": (4096,),
    }.items():
        assert shapes[name] == shape, name
    assert f"{prefix}45.hc_attn_fn" not in shapes


def test_every_projection_may_be_quantised_and_nothing_else():
    """More than the published releases do; those name what they leave alone."""
    assert all(len(spec.shape) == 2 for spec in SPECS if spec.quantisable)
    plain = [spec for spec in SPECS if len(spec.shape) == 2 and not spec.quantisable]
    assert {spec.name.split(".", 4)[-1] for spec in plain} == {
        "weight",  # lm_head and the target's embedding
        "embed_tokens.weight",
        "shared_head.head.weight",
        "mlp.gate.weight",
        "hc_attn_fn",
        "hc_ffn_fn",
        "self_attn.indexer.index_kpool_compress_gate",
        "self_attn.indexer.index_kpool_compress_ape",
    }


def test_tolerated_tensors_are_the_drafters_own_embedding_and_head():
    assert [spec.name for spec in SPECS if not spec.required] == [
        "model.language_model.layers.45.embed_tokens.weight",
        "model.language_model.layers.45.shared_head.head.weight",
    ]


def test_state_bytes_are_the_published_ones():
    """136 MiB per saved recurrent state, 13,056 bytes per cached token, 72 KiB of rings."""
    per_slot = state_bytes(state_spec(GEOMETRY, 1), GEOMETRY.vocab_size)

    def total(purpose: str) -> int:
        return sum(size for name, size in per_slot.items() if name.endswith(purpose))

    assert total(".recurrent") == 8 * 136 * MIB
    assert total(".latent") + total(".pooled") == 64 * 13_056
    assert total(".tail") == 72 * 1024
    assert total(".window") == 34 * 11 * 24_576 * 2


def test_ring_holds_an_open_pool_and_a_rejected_round():
    assert [ring_entries(pool) for pool in (1, 2, 4, 8, 16)] == [8, 8, 12, 16, 32]
