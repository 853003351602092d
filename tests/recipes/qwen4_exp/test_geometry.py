"""config.json: what is read, and what is refused with its key, value and expectation."""

from __future__ import annotations

from typing import Any

import pytest

from flare_ray.errors import CheckpointError
from flare_ray.recipes.qwen4_exp.geometry import read_geometry
from tests.recipes.qwen4_exp.published import ATTENTION, LAYERS, published_config
from tests.support.model_shapes import with_text_settings


def changed(**settings: Any) -> dict[str, Any]:
    return with_text_settings(published_config(), settings)


def rope(**settings: Any) -> dict[str, Any]:
    """rope_parameters with some replaced."""
    parameters = {**published_config()["text_config"]["rope_parameters"], **settings}
    return {"rope_parameters": {k: v for k, v in parameters.items() if v is not ...}}


def test_published_config_gives_the_published_schedule():
    geometry = read_geometry(published_config())
    assert [n for n in range(LAYERS) if not geometry.recurrent[n]] == ATTENTION
    assert geometry.num_drafter_layers == 1
    assert geometry.eos_ids == (248044,)
    assert geometry.max_context_tokens == 262144
    assert (geometry.attention.rotary, geometry.attention.theta) == (64, 1e7)
    assert geometry.gdn.gate == "sigmoid"
    assert list(geometry.ngram.hashes) == [1]
    assert geometry.ngram.reset_id == 248044


def test_text_settings_may_stand_at_the_top_level():
    assert read_geometry(published_config()["text_config"]) == read_geometry(published_config())


def test_indexed_attention_is_another_word_for_full_attention():
    words = published_config()["text_config"]["layer_types"]
    renamed = [word.replace("full", "indexed") for word in words]
    assert read_geometry(changed(layer_types=renamed)) == read_geometry(published_config())


def test_an_absent_output_gate_is_the_models_activation():
    assert read_geometry(changed(output_gate_type=...)).gdn.gate == "silu"


def test_hashing_resets_on_the_first_of_several_eos_ids():
    geometry = read_geometry(changed(eos_token_id=[248046, 248044]))
    assert geometry.ngram.reset_id == 248046
    assert geometry.eos_ids == (248046, 248044)


def test_a_checkpoint_without_ngram_layers_or_drafter_is_accepted():
    geometry = read_geometry(changed(ple_layer_ids=..., mtp_num_hidden_layers=...))
    assert not geometry.ngram.hashes
    assert geometry.num_drafter_layers == 0


@pytest.mark.parametrize(
    ("settings", "key", "expected"),
    [
        ({"hidden_size": ...}, "hidden_size", "missing, expected a whole number of at least 1"),
        ({"layer_types": ...}, "layer_types", "missing, expected one attention kind per layer"),
        ({"layer_types": ["conv"] * LAYERS}, "layer_types", "got ['conv'], expected words out of"),
        ({"output_gate_type": "tanh"}, "output_gate_type", "got 'tanh', expected sigmoid or silu"),
        (rope(rope_type="yarn"), "rope_parameters.rope_type", "expected 'default', the only one"),
        (rope(rope_theta=...), "rope_parameters.rope_theta", "missing"),
        (
            rope(partial_rotary_factor=0.02),
            "rope_parameters.partial_rotary_factor",
            "an even number of up to head_dim = 256",
        ),
        ({"mtp": {"rope_theta": 10000}}, "mtp.rope_theta", "10000000.0, as the target's"),
        ({"mtp": {"layer_types": ["linear_attention"]}}, "mtp.layer_types", "the only one served"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings", "False, the only"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads", "expected 1, the only one served"),
        ({"indexer_compress_ratio": 5}, "indexer_compress_ratio", "a divisor of the page size 64"),
        ({"indexer_budget": 2047}, "indexer_budget", "a multiple of indexer_compress_ratio 4"),
        ({"indexer_head_dim": 32}, "indexer_head_dim", "at least the 64 rotary channels"),
        ({"linear_num_value_heads": 40}, "linear_num_value_heads", "linear_num_key_heads 16"),
        ({"num_key_value_heads": 5}, "num_attention_heads", "num_key_value_heads 5"),
        ({"num_experts_per_tok": 513}, "num_experts_per_tok", "at most num_experts 512"),
        (
            {"shared_expert_intermediate_size": 900},
            "shared_expert_intermediate_size",
            "a multiple of moe_intermediate_size 640",
        ),
        ({"ple_layer_ids": [49]}, "ple_layer_ids", "distinct layer numbers from 1 to 48"),
        ({"ple_layer_ids": [2, 2]}, "ple_layer_ids", "distinct layer numbers from 1 to 48"),
        ({"ple_embed_dim": 2561}, "ple_embed_dim", "a multiple of the 16 hashing heads"),
        ({"split_ngram_parts": 100}, "split_ngram_parts", "a divisor of the table's rows"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers", "0 or 1 drafter layer"),
        ({"eos_token_id": 248320}, "eos_token_id", "ids below vocab_size 248320"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", "expected False"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_the_expected_one(settings, key, expected):
    with pytest.raises(CheckpointError) as caught:
        read_geometry(changed(**settings))
    problems = caught.value.problems
    assert any(line.startswith(f"{key}:") and expected in line for line in problems), problems
