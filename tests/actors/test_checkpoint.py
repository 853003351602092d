"""A damaged checkpoint is refused by the name of its tensor before a rank is placed."""

import json
import struct
import time

import pytest

from flare_ray.actors import launch as launching
from flare_ray.actors.checkpoint import check_checkpoint
from flare_ray.actors.placement import preflight
from flare_ray.config import DeploymentConfig, EngineConfig
from flare_ray.errors import CheckpointError, ConfigError
from tests.support.served_glm import deployment_args, served_glm

GONE = "model.language_model.layers.2.self_attn.kv_b_proj.weight"
DRAFTER = "model.language_model.layers.3."
PREFLIGHT_LIMIT_S = 5.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return served_glm(tmp_path_factory.mktemp("whole"))


def config_of(folder, **engine) -> DeploymentConfig:
    return DeploymentConfig.model_validate(deployment_args(folder, **engine))


def engine_of(folder, **engine) -> EngineConfig:
    return config_of(folder, **engine).engine


def damaged(whole, folder, change):
    """A copy of the checkpoint whose header `change` has altered; its data are one hole, so that
    whoever reads a tensor reads zeros and not what is wrong."""
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((whole / name).read_bytes())
    with (whole / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    change(header)
    place = 0
    for entry in header.values():
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = [place, place := place + end - begin]
    raw = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw)) + raw)
    with file.open("r+b") as opened:
        opened.truncate(8 + len(raw) + place)
    return folder


def drop(name):
    def change(header):
        del header[name]

    return change


def test_whole_checkpoint_passes(whole, tmp_path):
    check_checkpoint(engine_of(whole))
    check_checkpoint(engine_of(damaged(whole, tmp_path, lambda header: None)))


def test_missing_tensor_is_named_from_headers_alone(whole, tmp_path):
    with pytest.raises(CheckpointError, match=f"{GONE}: missing"):
        check_checkpoint(engine_of(damaged(whole, tmp_path, drop(GONE))))


def test_tensors_of_a_drafter_that_is_not_loaded_may_be_missing(whole, tmp_path):
    with (whole / "model.safetensors").open("rb") as file:
        names = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    name = next(name for name in names if name.startswith(DRAFTER))
    folder = damaged(whole, tmp_path, drop(name))
    with pytest.raises(CheckpointError, match=name):
        check_checkpoint(engine_of(folder))
    check_checkpoint(engine_of(folder, speculation={"families": "ordinary"}))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_broken_config_json_is_named(whole, tmp_path, text):
    folder = damaged(whole, tmp_path, lambda header: None)
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        check_checkpoint(engine_of(folder))


def test_checkpoint_of_another_family_is_refused(whole, tmp_path):
    folder = damaged(whole, tmp_path, lambda header: None)
    (folder / "config.json").write_text('{"model_type": "other"}')
    with pytest.raises(ConfigError, match="other"):
        check_checkpoint(engine_of(folder))


@pytest.mark.ray
def test_preflight_refuses_a_damaged_checkpoint_at_once(cluster, whole, tmp_path):
    folder = damaged(whole, tmp_path, drop(GONE))
    started_s = time.monotonic()
    with pytest.raises(CheckpointError, match=f"{GONE}: missing"):
        preflight(config_of(folder))
    assert time.monotonic() - started_s < PREFLIGHT_LIMIT_S


@pytest.mark.ray
def test_engine_refuses_a_damaged_checkpoint_before_a_rank_is_prepared(
    cluster, whole, tmp_path, monkeypatch
):
    """As when the files are damaged after the deployment was accepted."""
    touched = tmp_path / "prepared"

    def prepare(start):
        touched.touch()
        raise AssertionError("a rank was prepared")

    monkeypatch.setattr(launching, "preflight", lambda config: None)
    (tmp_path / "glm").mkdir()
    folder = damaged(whole, tmp_path / "glm", drop(GONE))
    with pytest.raises(CheckpointError, match=f"{GONE}: missing"):
        launching.launch_engine(config_of(folder), application="damaged", prepare=prepare)
    assert not touched.exists()
