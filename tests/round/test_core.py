"""Prepared cores: written, taken over, selected from, refused by name (contract: G7)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flare_ray.cli.main import main
from flare_ray.cli.prepare import prepare_core
from flare_ray.config import EngineConfig
from flare_ray.contracts.manifest import manifest_digest
from flare_ray.device.parallel.groups import SingleGroup
from flare_ray.device.prepare import plan_engine, prepare_rank
from flare_ray.errors import ConfigError
from tests.support.scripted import recipe
from tests.support.scripted.geometry import Script, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("c") / "scripted", Script(vocab_size=16))


def config_of(checkpoint: Path, **fields) -> EngineConfig:
    settings = {
        "checkpoint": str(checkpoint),
        "recipe": recipe.DOTTED,
        "device": "cpu",
        "dtype": "float32",
        "concurrency": 2,
        "context_tokens": 256,
        "prefill_tokens": 32,
        **fields,
    }
    return EngineConfig(**settings)


@pytest.fixture(scope="module")
def core(checkpoint, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("core")
    prepare_core(config_of(checkpoint), folder)
    return folder


def test_start_takes_the_prices_of_its_core_and_times_nothing(checkpoint, core, monkeypatch):
    monkeypatch.setattr("flare_ray.device.executor.RankExecutor.price", None)
    rank = prepare_rank(config_of(checkpoint, core=str(core)), SingleGroup())
    kept = json.loads((core / "core.json").read_text())["manifest"]["prices"]
    assert len(rank.manifest.prices) == len(kept) > 0
    without = plan_engine(config_of(checkpoint))
    assert manifest_digest(rank.manifest) == manifest_digest(without)


def test_fewer_drafts_lanes_and_tokens_select_a_part_of_the_core(checkpoint, core):
    fields = {"concurrency": 1, "context_tokens": 128, "speculation": {"draft_tokens": 2}}
    manifest = plan_engine(config_of(checkpoint, core=str(core), **fields))
    assert {shape for shape, _ in manifest.prices} <= set(manifest.shapes)
    assert 0 < len(manifest.prices) < len(plan_engine(config_of(checkpoint)).shapes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"concurrency": 4}, "slots is 4, the core holds 2"),
        ({"context_tokens": 512}, "context_tokens is 512"),
        ({"tensor_parallel_size": 2}, "world_size is 2"),
        ({"speculation": {"token_capacity": 512, "draft_tokens": 6}}, "programs are not in it"),
        ({"device": "cuda", "dtype": "bfloat16"}, "device is cuda, the core holds cpu"),
    ],
)
def test_what_a_core_does_not_hold_is_refused_by_name(checkpoint, core, fields, message):
    with pytest.raises(ConfigError, match=message):
        plan_engine(config_of(checkpoint, core=str(core), **fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda core: core | {"version": 99}, "version 99"),
        (lambda core: {"version": core["version"]}, "is no prepared core"),
        (lambda core: core | {"device_name": "another"}, "device another"),
        (lambda core: core | {"torch": "1.0"}, "torch 1.0"),
    ],
)
def test_foreign_core_is_refused(checkpoint, core, tmp_path, change, message):
    changed = change(json.loads((core / "core.json").read_text()))
    (tmp_path / "core.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match=message):
        prepare_rank(config_of(checkpoint, core=str(tmp_path)), SingleGroup())


def test_missing_core_and_a_core_of_a_core_are_refused(checkpoint, core, tmp_path):
    with pytest.raises(ConfigError, match="flare-ray prepare"):
        plan_engine(config_of(checkpoint, core=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="measures anew"):
        prepare_core(config_of(checkpoint, core=str(core)), tmp_path)


def test_command_writes_a_core_of_two_ranks(checkpoint, tmp_path, monkeypatch, capsys):
    options = ("--recipe", recipe.DOTTED, "--device", "cpu", "--context-tokens", "128")
    lanes = ("--concurrency", "1", "--tensor-parallel-size", "2", "--prefill-tokens", "32")
    arguments = ("prepare", str(checkpoint), *options, *lanes, "--out", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["flare-ray", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "rounds priced" in capsys.readouterr().out
    kept = json.loads((tmp_path / "core.json").read_text())
    assert kept["manifest"]["world_size"] == 2
