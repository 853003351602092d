"""config.json: what is read, and what is refused with its key, value and expectation."""

from __future__ import annotations

from typing import Any

import pytest

from flare_ray.errors import CheckpointError
from flare_ray.recipes.deepseek_v41.geometry import read_geometry
from tests.recipes.deepseek_v41.published import published_config
from tests.support.model_shapes import with_text_settings


def changed(**settings: Any) -> dict[str, Any]:
    return with_text_settings(published_config(), settings)


def problems_of(config: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        read_geometry(config)
    return caught.value.problems


def test_published_config_is_read():
    geometry = read_geometry(published_config())
    assert geometry.num_layers == 40 and geometry.num_drafter_layers == 3
    assert geometry.eos_ids == (1,)
    assert geometry.norm_eps == 1e-20
    assert geometry.engram.columns == 24
    assert geometry.context_width == 15360
    assert geometry.dspark.moe.experts == 128 and geometry.moe.experts == 384
    assert geometry.rounds_keys


def test_a_flat_config_without_engram_or_drafter_is_read():
    text = changed(
        compress_ratios=[0, 0, *[2] * 18, *[1] * 20],
        num_nextn_predict_layers=0,
        engram_layer_ids=...,
        dspark_target_layer_ids=...,
    )["text_config"]
    geometry = read_geometry({**text, "eos_token_id": [1, 5]})
    assert geometry.engram.layers == () and geometry.dspark.taps == ()
    assert geometry.eos_ids == (1, 5)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"hidden_size": ...}, "hidden_size: missing"),
        ({"compress_ratios": [0, 0]}, "43 of them"),
        ({"compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 1]}, "0 for every drafter layer"),
        ({"compress_ratios": [0, 0, *[2] * 19, *[1] * 19, 0, 0, 0]}, "kv source of ratio"),
        ({"compress_ratios": [0, 0, *[3] * 18, *[1] * 20, 0, 0, 0]}, "divisors of the page size"),
        ({"kv_source_layer_ids": [8, 2]}, "rising numbers"),
        ({"kv_source_layer_ids": [2, 8, 15, 20]}, "every kv_source_layer_id among them"),
        ({"candidate_source_layer_id": 22}, "an index source"),
        ({"candidate_topk_blocks": 64}, "enough blocks"),
        ({"o_groups": 7}, "a divisor"),
        ({"qk_rope_head_dim": 63}, "even"),
        ({"index_head_dim": 120}, "a multiple of 32"),
        ({"scoring_func": "sigmoid"}, "'sqrtsoftplus'"),
        ({"n_shared_experts": 2}, "the only one served"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type"),
        ({"rope_scaling": ...}, "factor: missing"),
        ({"engram_num_embeddings": [1]}, "2 of them"),
        ({"engram_layer_ids": [1, 40]}, "layers of the target"),
        ({"dspark_target_layer_ids": [40]}, "layers of the target"),
        ({"dspark_noise_token_id": 200000}, "below vocab_size"),
        ({"dspark_num_experts_per_tok": 200}, "at most the 128"),
        ({"kv_fake_quantisation": "no"}, "true or false"),
    ],
)
def test_a_setting_that_cannot_be_served_is_refused_by_name(settings, part):
    assert any(part in problem for problem in problems_of(changed(**settings)))
