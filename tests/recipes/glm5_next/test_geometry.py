"""config.json: accepted spellings, and what is refused with its key, value and expectation."""

from __future__ import annotations

from typing import Any

import pytest

from flare_ray.errors import CheckpointError
from flare_ray.recipes.glm5_next.geometry import Geometry, read_geometry
from tests.recipes.glm5_next.published import ATTENTION, LAYERS, published_config
from tests.support.model_shapes import with_text_settings


def changed(**settings: Any) -> dict[str, Any]:
    return with_text_settings(published_config(), settings)


def problems_of(config: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        read_geometry(config)
    return caught.value.problems


def test_published_config_gives_the_published_schedule():
    geometry = read_geometry(published_config())
    assert isinstance(geometry, Geometry)
    assert [n for n in range(LAYERS) if not geometry.recurrent[n]] == ATTENTION
    assert geometry.sparse == (False,) * 3 + (True,) * 42
    assert geometry.num_drafter_layers == 1
    assert geometry.eos_ids == (154820, 154827, 154829)
    assert geometry.max_context_tokens == 1048576
    assert geometry.index.pool == 4
    assert geometry.kda.lower_bound == -5.0


FLAT = {
    "linear_attn_config": ...,
    "linear_num_heads": 64,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_lower_bound": -5.0,
}
LISTED = published_config()["text_config"]["layer_types"]


@pytest.mark.parametrize(
    "settings",
    [
        {"layer_types": [t.replace("deepseek_sparse", "full") for t in LISTED]},
        {"layer_types": [t.replace("deepseek_sparse", "indexed") for t in LISTED]},
        {"layer_types": ...},
        FLAT,
        {**FLAT, "layer_types": [t.replace("deepseek_sparse", "indexed") for t in LISTED]},
        {"linear_num_heads": 64, "linear_head_dim": 128},
        {"mlp_layer_types": ...},
        {"first_k_dense_replace": ...},
        {"indexer_types": ..., "scoring_func": ..., "mhc": ..., "qk_head_dim": ...},
    ],
)
def test_every_spelling_means_the_same(settings):
    assert read_geometry(changed(**settings)) == read_geometry(published_config())


def test_text_settings_may_stand_at_the_top_level():
    assert read_geometry(published_config()["text_config"]) == read_geometry(published_config())


def test_outer_eos_is_used_where_the_text_has_none():
    config = changed(eos_token_id=...)
    config["eos_token_id"] = 7
    assert read_geometry(config).eos_ids == (7,)


def test_a_checkpoint_without_drafter_layer_is_accepted():
    assert read_geometry(changed(num_nextn_predict_layers=...)).num_drafter_layers == 0


@pytest.mark.parametrize(
    ("settings", "key", "expected"),
    [
        ({"hidden_size": ...}, "hidden_size", "missing, expected a whole number of at least 1"),
        ({"hidden_size": "4096"}, "hidden_size", "got '4096', expected a whole number"),
        ({"hidden_size": True}, "hidden_size", "got True, expected a whole number"),
        ({"hidden_size": 0}, "hidden_size", "got 0, expected a whole number of at least 1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps", "got 0.0, expected above 0"),
        ({"layer_types": LISTED[:-1]}, "layer_types", "a list of num_hidden_layers = 45 words"),
        ({"layer_types": ["conv"] * LAYERS}, "layer_types", "got ['conv'], expected words out of"),
        ({"layer_types": ["linear_attention"] * LAYERS}, "layer_types", "disagrees with linear"),
        ({"layer_types": ..., **FLAT}, "layer_types", "missing, expected one attention kind"),
        ({"linear_attn_config": 3}, "linear_attn_config", "got 3, expected an object"),
        ({"linear_num_heads": 32}, "linear_num_heads", "disagrees with linear_attn_config.num"),
        ({"mlp_layer_types": ["dense"] * LAYERS}, "mlp_layer_types", "disagrees with first_k"),
        (
            {"mlp_layer_types": ..., "first_k_dense_replace": ...},
            "mlp_layer_types",
            "missing, expected dense or sparse per layer",
        ),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim", "got 64, expected 0, the only one served"),
        ({"n_group": 8}, "n_group", "got 8, expected 1, the only one served"),
        ({"scoring_func": "softmax"}, "scoring_func", "expected 'sigmoid'"),
        ({"indexer_types": ["shared"] * LAYERS}, "indexer_types", "the only one served"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", "expected False"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail", "True"),
        ({"num_key_value_heads": 8}, "num_key_value_heads", "expected 64"),
        ({"index_kpool": 5}, "index_kpool", "a divisor of the page size 64"),
        ({"index_topk": 2047}, "index_topk", "a multiple of index_kpool 4"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok", "at most n_routed_experts 288"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers", "0 or 1 drafter layer"),
        ({"eos_token_id": [154880]}, "eos_token_id", "ids below vocab_size 154880"),
        ({"eos_token_id": []}, "eos_token_id", "a token id or a list of token ids"),
        ({**FLAT, "linear_lower_bound": 5.0}, "linear_lower_bound", "below 0"),
        ({**FLAT, "linear_lower_bound": -81.0}, "linear_lower_bound", "at least -80"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_the_expected_one(settings, key, expected):
    problems = problems_of(changed(**settings))
    assert any(line.startswith(f"{key}:") and expected in line for line in problems), problems


def test_nested_keys_are_named_with_their_path():
    config = published_config()
    config["text_config"]["linear_attn_config"]["kda_layers"] = [0]
    problems = problems_of(config)
    assert any(line.startswith("linear_attn_config.kda_layers:") for line in problems)


def test_every_problem_is_reported_at_once():
    problems = problems_of(changed(hidden_size=..., vocab_size=-1, hidden_act="gelu"))
    assert {line.split(":")[0] for line in problems} >= {"hidden_size", "vocab_size", "hidden_act"}
