"""Experts kept packed and tables off the device: what a rank computes is the same bit by bit,
whatever is kept how, at every TP degree, width and cut (contract: M6, M8, R5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flare_ray.cli.inspect import inspect_checkpoint
from flare_ray.config import EngineConfig
from flare_ray.device.parallel.groups import run_ranks
from flare_ray.device.prepare import plan_engine
from flare_ray.device.weights.kept import Keeping
from flare_ray.errors import CheckpointError, ConfigError
from tests.support import deepseek_tiny, glm_tiny, qwen_tiny
from tests.support.recipe_driver import RecipeDriver

LENGTH = 40
CUTS = (20, 7)
"""Lengths of the first prompt chunks; what follows is verified in rounds of changing widths."""
WIDTHS = (1, 4, 8, 2, 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("kept")
    return {
        "deepseek": deepseek_tiny.write_quantised(
            root / "deepseek", "packed", moe_intermediate_size=128, o_lora_rank=32
        ),
        "qwen": qwen_tiny.write_quantised(
            root / "qwen",
            "qwen-fused",
            moe_intermediate_size=64,
            shared_expert_intermediate_size=128,
        ),
        "narrow": qwen_tiny.write_quantised(root / "narrow", "qwen-fused"),
    }


def outputs(folder: Path, keeping: Keeping, comm: Any = None) -> list[torch.Tensor]:
    """Logits of chunks and rounds, and of the drafter's proposals."""
    torch.set_num_threads(1)
    driver = RecipeDriver(folder, comm, slots=2, num_pages=8, keeping=keeping)
    tokens = torch.randint(3, 100, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
    (lane,) = driver.fresh()
    seen, at = [], 0
    for cut in CUTS:
        seen.append(driver.prefill([lane], [tokens[at : at + cut]])[0])
        at += cut
    for width in WIDTHS:
        seen += driver.propose([lane], [tokens[at]], depth=3).logits
        verified = driver.verify([lane], [tokens[at : at + width]])
        seen.append(verified.output.logits.clone())
        emitted = (width + 1) // 2
        driver.commit(verified, [emitted])
        at += emitted
    assert all(bool(torch.isfinite(logits).all()) for logits in seen)
    return seen


KEPT = [
    Keeping("cpu", "packed", "device"),
    Keeping("cpu", "auto", "host"),
    Keeping("cpu", "packed", "disk"),
]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("model", ["deepseek", "qwen"])
def test_what_is_kept_how_changes_no_bit(folders, model, size):
    folder = folders[model]

    def run(keeping):
        if size == 1:
            return [outputs(folder, keeping)]
        return run_ranks(size, lambda comm: outputs(folder, keeping, comm))

    wanted = run(Keeping("cpu"))
    for keeping in KEPT:
        for rank, before in zip(run(keeping), wanted, strict=True):
            assert len(rank) == len(before)
            assert all(map(torch.equal, rank, before)), keeping


TABLE_SCALE = torch.tensor(0.0371, dtype=torch.bfloat16)


def with_tables(folder: Path, origin: Path, *, packed: bool) -> Path:
    """A checkpoint whose tables are FP8 with one scale, as it is or dequantised."""
    tensors = load_file(origin / "model.safetensors")
    for name in [name for name in tensors if "ngram_embedding" in name]:
        rows = (tensors[name].float() / TABLE_SCALE.float()).to(torch.float8_e4m3fn)
        tensors[name] = rows if packed else rows.float() * TABLE_SCALE.float()
        if packed:
            tensors[f"{name.partition('.shard_')[0]}.weight_scale"] = TABLE_SCALE
    folder.mkdir()
    (folder / "config.json").write_text((origin / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_a_table_in_fp8_with_one_scale_reads_like_its_dequantised_rows(
    folders, tmp_path, place, size
):
    def run(packed, where):
        folder = with_tables(tmp_path / str(packed), folders["qwen"], packed=packed)
        keeping = Keeping("cpu", tables=where)
        if size == 1:
            return [outputs(folder, keeping)]
        return run_ranks(size, lambda comm: outputs(folder, keeping, comm))

    for kept, plain in zip(run(True, place), run(False, "device"), strict=True):
        assert all(map(torch.equal, kept, plain))


def test_a_table_in_fp8_takes_a_byte_an_entry(folders, tmp_path):
    packed, plain = (
        plan_engine(config_of(with_tables(tmp_path / str(packed), folders["qwen"], packed=packed)))
        for packed in (True, False)
    )
    entries = sum(
        tensor.numel()
        for name, tensor in load_file(tmp_path / "True" / "model.safetensors").items()
        if ".shard_" in name
    )
    assert plain.budget.weights_bytes - packed.budget.weights_bytes == 3 * entries


def test_one_scale_of_several_shards_is_reported_once(folders, tmp_path):
    report = inspect_checkpoint(with_tables(tmp_path / "true", folders["qwen"], packed=True))
    assert not report.problems
    assert sum(share.num_bytes for share in report.shares) == report.total_bytes
    assert sum(share.tensors for share in report.shares) == report.num_tensors


def test_a_table_in_fp8_without_its_scale_is_refused(folders, tmp_path):
    folder = with_tables(tmp_path / "true", folders["qwen"], packed=True)
    tensors = load_file(folder / "model.safetensors")
    lonely = {name: value for name, value in tensors.items() if not name.endswith("g.weight_scale")}
    save_file(lonely, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="ngram_embedding"):
        RecipeDriver(folder, keeping=Keeping("cpu"))


def test_another_row_of_a_table_shows(folders, tmp_path):
    """Negative control: the table of another checkpoint gives other logits."""
    tensors = load_file(folders["qwen"] / "model.safetensors")
    for name, value in tensors.items():
        if "ngram_embedding" in name:
            tensors[name] = value.flip(0).contiguous()
    (tmp_path / "config.json").write_text((folders["qwen"] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    kept = Keeping("cpu", tables="disk")
    assert not torch.equal(outputs(tmp_path, kept)[0], outputs(folders["qwen"], kept)[0])


def config_of(folder: Path, **settings) -> EngineConfig:
    return EngineConfig.model_validate(
        {"checkpoint": str(folder), "device": "cpu", "dtype": "float32", **settings}
    )


@pytest.mark.parametrize("model", ["deepseek", "qwen"])
def test_planned_bytes_move_with_the_tables_and_shrink_with_the_experts(folders, model):
    def planned(**settings):
        return plan_engine(config_of(folders[model], **settings)).budget

    plain, host, disk = (planned(tables=place) for place in ("device", "host", "disk"))
    assert plain.table_bytes == 0 < host.table_bytes == disk.table_bytes
    # off the device rows keep their stored type; on it FP8 rows do, too
    factor = 1 if model == "deepseek" else 2
    assert plain.weights_bytes - host.weights_bytes == factor * host.table_bytes
    assert planned(expert_weights="packed").weights_bytes < plain.weights_bytes
    assert planned(expert_weights="dequantised") == plain


CUDA_DISK = {"tables": "disk", "device": "cuda", "dtype": "bfloat16"}
CUT = {"expert_weights": "packed", "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [("deepseek", CUDA_DISK, "device: cpu alone"), ("narrow", CUT, "8 x 48 a rank")],
)
def test_what_cannot_be_kept_so_is_refused_by_name(folders, model, settings, words):
    with pytest.raises(ConfigError, match=words):
        plan_engine(config_of(folders[model], **settings))


def test_models_without_tables_or_packed_experts_refuse_to_keep_them(tmp_path):
    folder = glm_tiny.write_checkpoint(tmp_path, "flat")
    with pytest.raises(ConfigError, match="has no tables"):
        plan_engine(config_of(folder, tables="host"))
    with pytest.raises(ConfigError, match="expert_weights: packed"):
        plan_engine(config_of(folder, expert_weights="packed"))


def test_a_scale_that_no_weight_has_is_refused(folders, tmp_path):
    tensors = load_file(folders["deepseek"] / "model.safetensors")
    name = "layers.2.ffn.experts.1.w3.scale"
    bytes_of = tensors[name].view(torch.uint8).clone()
    bytes_of[0, 0] = 255
    tensors[name] = bytes_of.view(torch.float8_e8m0fnu)
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_text((folders["deepseek"] / file).read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.2\.ffn have a scale"):
        RecipeDriver(tmp_path, keeping=Keeping("cpu", "packed"))
