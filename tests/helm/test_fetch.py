"""The weights job and the waiting pods: `flare-ray fetch` against a stand-in for the hub."""

import os
import random
import subprocess
import sys
import threading
import time

import pytest

from flare_ray.cli.fetch import MANIFEST_NAME
from tests.helm.hub import COMMIT, REPOSITORY, StandInHub

LIMIT_S = 90.0
PIECE_BYTES = 10 << 20
"""What the client of the hub writes at once; less than that is lost when it is killed."""
WEIGHTS_BYTES = PIECE_BYTES + (2 << 20)
WEIGHTS = random.Random(7).randbytes(WEIGHTS_BYTES)
FILES = {
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
    "config.json": b'{"model_type": "x"}',
    "tokenizer.json": b"{}",
    "modeling.py": b"raise SystemExit('never run')",
    "original/consolidated.safetensors": b"a second copy",
}
FETCHED = {name for name in FILES if "/" not in name and not name.endswith(".py")}


@pytest.fixture
def hub():
    server = StandInHub(FILES)
    yield server
    server.close()


def command(hub, folder, *arguments, token=""):
    home = folder.parent / "home"
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
    }
    if token:
        environment["HF_TOKEN"] = token
    flare_ray = (sys.executable, "-m", "flare_ray.cli.main")
    return {
        "args": (*flare_ray, "fetch", REPOSITORY, "--out", str(folder), *arguments),
        "env": environment,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }


def fetch(hub, folder, *arguments, **options):
    return subprocess.run(**command(hub, folder, *arguments, **options), timeout=LIMIT_S)


def fetched(folder):
    return {path.name for path in folder.iterdir() if path.is_file()}


def test_fetch_leaves_verified_weights_and_no_code(hub, tmp_path):
    folder = tmp_path / "model"
    result = fetch(hub, folder)
    assert result.returncode == 0, result.stderr
    assert fetched(folder) == FETCHED | {MANIFEST_NAME}
    assert all((folder / name).read_bytes() == FILES[name] for name in FETCHED)
    assert f'"commit": "{COMMIT}"' in (folder / MANIFEST_NAME).read_text()


def test_second_fetch_downloads_nothing(hub, tmp_path):
    assert fetch(hub, tmp_path / "model").returncode == 0
    hub.requested.clear()
    result = fetch(hub, tmp_path / "model")
    assert "is complete" in result.stdout
    assert not any("/resolve/" in path for path in hub.requested)


def test_fetch_after_a_kill_keeps_whole_files_and_clears_partial_ones(hub, tmp_path):
    folder, stalled = tmp_path / "model", "model-00002-of-00002.safetensors"
    hub.stall_after[stalled] = PIECE_BYTES + 1
    process = subprocess.Popen(**command(hub, folder))
    whole = FETCHED - {stalled}
    deadline = time.monotonic() + LIMIT_S
    while not (
        any(p.stat().st_size >= PIECE_BYTES for p in folder.rglob("*.incomplete"))
        and fetched(folder) == whole
    ):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.communicate()
    hub.stalled.set()
    assert fetch(hub, folder, "--wait-s", "0").returncode == 2
    hub.requested.clear()
    result = fetch(hub, folder)
    assert result.returncode == 0, result.stderr
    assert (folder / stalled).read_bytes() == FILES[stalled]
    assert {path.rpartition("/")[2] for path in hub.requested if "/resolve/" in path} == {stalled}
    assert not list(folder.rglob("*.incomplete"))


def test_fetch_continues_inside_a_file_when_the_connection_is_lost(hub, tmp_path):
    name = "model-00001-of-00002.safetensors"
    hub.stall_after[name] = PIECE_BYTES + 1
    hub.stalled.set()
    result = fetch(hub, tmp_path / "model")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "model" / name).read_bytes() == WEIGHTS
    [asked] = hub.ranges
    assert int(asked.removeprefix("bytes=").removesuffix("-")) >= PIECE_BYTES


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "config.json"])
def test_corrupted_file_is_named_and_removed_and_the_folder_is_not_whole(hub, tmp_path, name):
    """Both kinds of checksum: SHA-256 of large files, git's of small ones."""
    folder = tmp_path / "model"
    hub.declared[name] = hub.files[name]
    hub.files[name] = bytes(len(hub.files[name]))
    result = fetch(hub, folder)
    assert result.returncode == 2
    assert name in result.stderr
    assert "expected" in result.stderr
    assert not (folder / name).exists()
    assert not (folder / MANIFEST_NAME).exists()
    hub.files[name] = hub.declared[name]
    assert fetch(hub, folder).returncode == 0
    assert (folder / name).read_bytes() == FILES[name]


def test_verify_finds_a_changed_byte_without_the_hub(hub, tmp_path):
    folder = tmp_path / "model"
    assert fetch(hub, folder).returncode == 0
    hub.requested.clear()
    assert fetch(hub, folder, "--verify").returncode == 0
    path = folder / "model-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    result = fetch(hub, folder, "--verify")
    assert (result.returncode, path.name in result.stderr) == (2, True)
    assert not hub.requested
    assert not (folder / MANIFEST_NAME).exists()


def test_wait_returns_when_another_process_has_fetched(hub, tmp_path):
    folder = tmp_path / "model"
    waiting = subprocess.Popen(**command(hub, folder, "--wait-s", str(LIMIT_S)))
    fetching = threading.Thread(target=fetch, args=(hub, folder))
    fetching.start()
    output, errors = waiting.communicate(timeout=LIMIT_S)
    fetching.join()
    assert waiting.returncode == 0, errors
    assert "complete" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--wait-s", "0"), "has no flare-weights.json"),
        (("--verify",), "has no flare-weights.json"),
        (("--verify", "--wait-s", "1"), "exclude each other"),
    ],
)
def test_folder_that_is_not_whole_is_refused(hub, tmp_path, arguments, said):
    result = fetch(hub, tmp_path / "model", *arguments)
    assert result.returncode == 2
    assert said in result.stderr


def test_wait_refuses_weights_of_another_revision(hub, tmp_path):
    folder = tmp_path / "model"
    assert fetch(hub, folder).returncode == 0
    assert fetch(hub, folder, "--wait-s", "0", "--revision", COMMIT).returncode == 0
    result = fetch(hub, folder, "--wait-s", "0", "--revision", "v2")
    assert result.returncode == 2
    assert "wanted is org/model at v2" in result.stderr


def test_private_repository_needs_the_token(hub, tmp_path):
    hub.token = "hf_right"
    refused = fetch(hub, tmp_path / "model")
    assert refused.returncode == 2
    assert "HF_TOKEN" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert fetch(hub, tmp_path / "model", token="hf_right").returncode == 0


def test_hub_that_is_away_is_told_in_one_line(hub, tmp_path):
    hub.url = "http://127.0.0.1:9"
    result = fetch(hub, tmp_path / "model")
    assert result.returncode == 2
    assert "HF_ENDPOINT" in result.stderr
    assert "Traceback" not in result.stderr
