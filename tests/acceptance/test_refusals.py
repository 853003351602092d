"""What cannot run is refused by name: the real model on a host without its GPUs or weights, a
damaged checkpoint, an unknown key (contract: A2, R5; known faults of `ray.serve` files).
"""

from __future__ import annotations

import json
import math
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.rules.sources import ROOT
from tests.support.served_glm import VOCAB_SIZE, deployment_args, engine_settings, served_glm
from tests.support.service import FLARE_RAY, SERVE, Tree, machine_load, wait_for, write_deployment

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

REFUSAL_LIMIT_S = 30.0
"""Of the command from its start, of an application from when Serve begins to build it. Promised for
an idle machine; the message of a failure says how idle it was."""
COMMAND_LIMIT_S = 120.0
STOP_LIMIT_S = 60.0
REAL = ROOT / "deployments" / "glm.yaml"
LAYERS = "model.language_model.layers."
MISSING = f"{LAYERS}2.self_attn.kv_b_proj.weight"
EXTRA = f"{LAYERS}9.mystery.weight"
MISSHAPEN = f"{LAYERS}0.mlp.up_proj.weight"
CUT = f"{LAYERS}1.mlp."
"""Tensors of the second file, whose last one is cut."""
NO_GPU = pytest.mark.skipif(
    torch.cuda.device_count() >= 4, reason="this host has the GPUs that the test needs to lack"
)
RAY_PROBE = """
import sys, ray
ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False, configure_logging=False)
from ray import serve
for name, state in serve.status().applications.items():
    print(name, state.status.value, state.message)
"""


def run(*words: str, limit_s: float = COMMAND_LIMIT_S) -> subprocess.CompletedProcess[str]:
    """A `flare-ray` command, run to its end."""
    return subprocess.run(
        [*FLARE_RAY, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
    )


# The real model on this host.


@pytest.fixture
def real_file(tmp_path: Path, free_port, checkpoint: Path) -> Callable[..., Path]:
    """deployments/glm.yaml but for its port: Serve would share one that another server has."""

    def make(*, weights: bool) -> Path:
        text = REAL.read_text()
        document = yaml.safe_load(text)
        port, folder = document["http_options"]["port"], _engine(document)["checkpoint"]
        assert text.count(f"port: {port}\n") == 1 and text.count(f"checkpoint: {folder}\n") == 1
        text = text.replace(f"port: {port}\n", f"port: {free_port()}\n")
        if weights:
            text = text.replace(f"checkpoint: {folder}\n", f"checkpoint: {checkpoint}\n")
        file = tmp_path / "glm.yaml"
        file.write_text(text)
        return file

    return make


def _engine(document: dict) -> dict:
    return document["applications"][0]["args"]["engine"]


def assert_names_what_is_missing(text: str, *, weights: bool) -> None:
    assert "4 GPU each" in text and " 0 GPU" in text, text
    if not weights:
        assert f"{_engine(yaml.safe_load(REAL.read_text()))['checkpoint']} is no folder" in text
    assert "run deployments/glm-demo.yaml" in text


@NO_GPU
def test_flare_ray_serve_of_the_real_model_ends_in_time_and_names_what_is_missing(tmp_path):
    served = Tree([*FLARE_RAY, "serve", str(REAL)], tmp_path / "serve.log")
    try:
        status = served.wait(COMMAND_LIMIT_S)
        took_s = time.monotonic() - served.started_s
        assert not served.processes()
    finally:
        served.kill()
    assert status == 2, served.tail()
    error = served.text()[served.text().index("error: ") :]
    assert_names_what_is_missing(error, weights=False)
    assert took_s < REFUSAL_LIMIT_S, f"{took_s:.1f} s, {machine_load()}"


@NO_GPU
@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek", "qwen"])
def test_every_other_real_model_ends_in_time_and_names_what_is_missing(tmp_path, name):
    file = REAL.with_name(f"{name}.yaml")
    served = Tree([*FLARE_RAY, "serve", str(file)], tmp_path / "serve.log")
    try:
        status = served.wait(COMMAND_LIMIT_S)
        took_s = time.monotonic() - served.started_s
    finally:
        served.kill()
    assert status == 2, served.tail()
    error = served.text()[served.text().index("error: ") :]
    assert f"{_engine(yaml.safe_load(file.read_text()))['checkpoint']} is no folder" in error
    assert "GPU" in error
    assert took_s < REFUSAL_LIMIT_S, f"{took_s:.1f} s, {machine_load()}"


@NO_GPU
@pytest.mark.slow
def test_flare_ray_serve_of_the_real_model_with_weights_names_the_gpus(tmp_path, real_file):
    served = Tree([*FLARE_RAY, "serve", str(real_file(weights=True))], tmp_path / "serve.log")
    try:
        status = served.wait(COMMAND_LIMIT_S)
        took_s = time.monotonic() - served.started_s
    finally:
        served.kill()
    assert status == 2, served.tail()
    assert_names_what_is_missing(served.text(), weights=True)
    assert took_s < REFUSAL_LIMIT_S, f"{took_s:.1f} s, {machine_load()}"


@NO_GPU
@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(False, id="neither"),
        pytest.param(True, id="weights-without-gpus", marks=pytest.mark.slow),
    ],
)
def test_plain_serve_run_of_the_real_model_ends_in_deploy_failed_with_the_message(
    tmp_path, real_file, weights
):
    served = Tree([*SERVE, "run", str(real_file(weights=weights))], tmp_path / "run.log")
    try:
        wait_for_line(served, "Importing application 'flare'")
        building_s = time.monotonic()
        wait_for_line(served, "Deploying app 'flare' failed")
        took_s = time.monotonic() - building_s
        told = subprocess.run(
            [sys.executable, "-c", RAY_PROBE, gcs_address(served)],
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
        ).stdout
    finally:
        served.kill()
    assert told.startswith("flare DEPLOY_FAILED"), told or served.tail()
    assert_names_what_is_missing(told, weights=weights)
    assert took_s < REFUSAL_LIMIT_S, f"{took_s:.1f} s, {machine_load()}"


def wait_for_line(served: Tree, words: str) -> None:
    def told() -> bool:
        assert served.process.poll() is None, served.tail()
        return words in served.text()

    wait_for(told, COMMAND_LIMIT_S, words)


def gcs_address(served: Tree) -> str:
    """Where the cluster of a tree answers."""
    flag = "--gcs-address="
    words = [word for process in served.processes() for word in process.cmdline()]
    return next(word.removeprefix(flag) for word in words if word.startswith(flag))


# Damaged checkpoints.


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tensor missing, one too many, one transposed, and one file cut short."""
    folder = served_glm(tmp_path_factory.mktemp("damaged"))
    whole = folder / "model.safetensors"
    first = load_file(whole)
    whole.unlink()
    second = {name: first.pop(name) for name in sorted(first) if name.startswith(CUT)}
    del first[MISSING]
    first[EXTRA] = torch.zeros(3)
    first[MISSHAPEN] = first[MISSHAPEN].t().contiguous()
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    cut = folder / "model-00002-of-00002.safetensors"
    os.truncate(cut, cut.stat().st_size - 4)
    return folder


def assert_names_every_damage(text: str) -> None:
    lines = text.splitlines()

    def told(name: str, *words: str) -> bool:
        return any(name in line and all(word in line for word in words) for line in lines)

    assert told(MISSING, "missing", "expected [96, 32]"), text
    assert told(EXTRA, "not in the manifest"), text
    assert told(MISSHAPEN, "shape [64, 96]", "expected [96, 64]"), text
    assert told(CUT, "model-00002-of-00002.safetensors", "truncated"), text


def test_inspect_names_every_damaged_tensor(damaged):
    done = run("inspect", str(damaged))
    assert done.returncode == 1
    assert_names_every_damage(done.stdout)


def test_debug_serve_names_every_damaged_tensor(damaged, free_port):
    done = run("debug-serve", str(damaged), "--device", "cpu", "--port", str(free_port()))
    assert done.returncode == 2
    assert_names_every_damage(done.stdout)


def test_serve_names_every_damaged_tensor(damaged, tmp_path, free_port):
    file = write_deployment(tmp_path / "damaged.yaml", deployment_args(damaged), free_port())
    served = Tree([*FLARE_RAY, "serve", str(file)], tmp_path / "damaged.log")
    try:
        status = served.wait(COMMAND_LIMIT_S)
        took_s = time.monotonic() - served.started_s
        assert not served.processes()
    finally:
        served.kill()
    assert status == 2, served.tail()
    text = served.text()
    assert_names_every_damage(text[text.rindex("error: ") :])
    assert took_s < REFUSAL_LIMIT_S, f"{took_s:.1f} s, {machine_load()}"
    # Headers are read before Serve starts: no attempt to construct an engine, let alone three.
    assert "ServeController" not in text


# The same, one fault at a time, in a checkpoint that no memory would hold.

GIB = 1 << 30
HUGE_ROWS = 64 * GIB // 256
"""Rows of a vocabulary whose embedding alone takes 64 GiB."""
MEMORY_LIMIT_BYTES = 4 * GIB
"""Address space of the command; libraries and threads take about two."""


def write_huge(folder: Path, *, fault: str) -> Path:
    """The micro checkpoint with a vast vocabulary, as a file of holes; one thing is wrong."""
    served_glm(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = HUGE_ROWS
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    shapes = {name: list(tensor.shape) for name, tensor in load_file(file).items()}
    for shape in shapes.values():
        if shape[0] == VOCAB_SIZE:
            shape[0] = HUGE_ROWS
    if fault == "missing":
        del shapes[MISSING]
    elif fault == "extra":
        shapes[EXTRA] = [3]
    elif fault == "misshapen":
        shapes[MISSHAPEN].reverse()
    header, place = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [place, place + size]}
        place += size
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(file, 8 + len(raw) + place - (4 if fault == "truncated" else 0))
    return folder


NAMED = {
    "missing": (MISSING, "missing"),
    "extra": (EXTRA, "not in the manifest"),
    "misshapen": (MISSHAPEN, "expected [96, 64]"),
    "truncated": ("truncated", "the file holds"),
}


@pytest.mark.parametrize("command", ["inspect", "debug-serve"])
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("missing"),
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("extra", "misshapen", "truncated")),
    ],
)
def test_fault_is_named_before_anything_is_allocated(tmp_path, free_port, command, fault):
    """The command has memory for itself alone: had it asked for the first tensor, it would say so
    and not what is wrong."""
    folder = write_huge(tmp_path / "huge", fault=fault)
    words = ["--device", "cpu", "--port", str(free_port())] if command == "debug-serve" else []
    done = subprocess.run(
        [*FLARE_RAY, command, str(folder), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
        preexec_fn=_bound_memory,
    )
    assert done.returncode in (1, 2), done.stderr
    text = done.stdout + done.stderr
    for words in NAMED[fault]:
        assert words in text, text


def _bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))


# Unknown keys.

TYPOS = {
    "applications[0].args.engine.concurency": "concurrency",
    "applications[0].args.engine.speculation.draft_token": "draft_tokens",
    "http_options.prt": "port",
}
"""What is wrong by its path, and what the message suggests."""


@pytest.mark.parametrize("command", ["check", "serve"])
def test_unknown_keys_are_named_with_their_paths(checkpoint, tmp_path, free_port, command):
    file = tmp_path / "typos.yaml"
    write_deployment(file, deployment_args(checkpoint), free_port())
    document = yaml.safe_load(file.read_text())
    engine = _engine(document)
    engine["concurency"] = engine.pop("concurrency")
    engine["speculation"] = {"draft_token": 3}
    document["http_options"]["prt"] = 1
    file.write_text(yaml.safe_dump(document))
    done = run(command, str(file))
    assert done.returncode == 2
    for path, right in TYPOS.items():
        [line] = [line for line in done.stdout.splitlines() if path in line]
        assert "unknown key" in line and right in line


def test_good_file_passes_the_check(checkpoint, tmp_path, free_port):
    """The control: the same file without the typing errors."""
    file = write_deployment(tmp_path / "good.yaml", deployment_args(checkpoint), free_port())
    assert engine_settings(checkpoint)["concurrency"] == 4
    done = run("check", str(file))
    assert done.returncode == 0, done.stdout
    assert "correct" in done.stdout
