"""config.json of the family: spellings, scaled positions, and what is refused by name."""

from __future__ import annotations

import json

import pytest
import torch

from flare_ray.config import EngineConfig
from flare_ray.device.prepare import make_plan
from flare_ray.errors import CheckpointError, ConfigError
from flare_ray.recipes.llama.geometry import read_geometry
from tests.support.llama_tiny import TEXTS, UNDRAFTED, write_checkpoint

SMALL = {"context_tokens": 256, "prefill_tokens": 64}


def config(**settings):
    return TEXTS["llama-odd"]() | settings


def test_both_spellings_of_the_rotary_base_are_read():
    flat = config()
    nested = {k: v for k, v in flat.items() if k != "rope_theta"}
    nested["rope_parameters"] = {"rope_type": "default", "rope_theta": flat["rope_theta"]}
    assert read_geometry(flat) == read_geometry(nested)
    with pytest.raises(CheckpointError, match="rope_theta: disagrees"):
        read_geometry(flat | {"rope_parameters": {"rope_theta": 5.0}})


def test_head_size_and_key_heads_follow_from_other_settings():
    plain = config()
    del plain["num_key_value_heads"]
    attention = read_geometry(plain).attention
    assert (attention.head_dim, attention.kv_heads) == (8, 9)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_scaled_frequencies_equal_transformers(spelling):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    text = TEXTS["llama-scaled"]()
    theirs, _ = rope_utils.ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**text), device="cpu")
    if spelling == "rope_scaling":
        rope = text.pop("rope_parameters")
        text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    ours = torch.tensor(read_geometry(text).attention.frequencies())
    assert torch.allclose(ours, theirs, rtol=1e-6)
    assert not torch.allclose(ours, ours[0] ** torch.arange(8) / 8)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"attention_bias": True}, "attention_bias: got True, expected False"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ({"num_key_value_heads": 4}, "a multiple of num_key_value_heads 4"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type: got 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor: missing"),
        ({"num_nextn_predict_layers": 2}, "0 or 1 drafter layer"),
        ({"draft_vocab_size": 161}, "draft_vocab_size: got 161, expected at most 160"),
        ({"num_nextn_predict_layers": 0}, "draft_vocab_size: got 48, expected at most 0"),
        ({"eos_token_id": 160}, "ids below vocab_size 160"),
        ({"head_dim": 7}, "head_dim: got 7, expected an even number"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(settings, told):
    with pytest.raises(CheckpointError, match=told):
        read_geometry(config(**settings))


def test_without_a_drafter_ordinary_rounds_are_planned_and_others_refused(tmp_path):
    folder = write_checkpoint(tmp_path, "llama-odd", **UNDRAFTED)
    assert "model.layers.3" not in json.dumps(sorted(_names(folder)))
    settings = {"checkpoint": str(folder), "device": "cpu", "dtype": "float32"} | SMALL
    plan = make_plan(EngineConfig(**settings, speculation={"families": "ordinary"}))
    assert not plan.manifest.speculation
    with pytest.raises(ConfigError, match="holds no drafter; set families: ordinary"):
        make_plan(EngineConfig(**settings))


@pytest.mark.parametrize(("ranks", "heads"), [(1, 3), (2, 2), (4, 1)])
def test_plan_counts_the_padded_heads(tmp_path, ranks, heads):
    """Three key heads of eight channels, and their twenty-four query channels each."""
    folder = write_checkpoint(tmp_path, "llama-odd")
    config = EngineConfig(
        checkpoint=str(folder), device="cpu", dtype="float32", tensor_parallel_size=ranks, **SMALL
    )
    budget = make_plan(config).manifest.budget
    hidden, width, vocabulary, layers = 72, 96, 160, 4
    attention = heads * (24 + 8 + 8 + 24) * hidden
    layer = attention + 3 * width // ranks * hidden + 2 * hidden
    floats = vocabulary * hidden + layers * layer + hidden
    floats += hidden * (2 * hidden) + 3 * hidden  # what the drafter's layer adds
    tokens = 48  # that the drafter may propose
    assert budget.weights_bytes == 4 * floats + 8 * tokens


def _names(folder):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return file.keys()
