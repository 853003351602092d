"""`flare-ray debug-serve` as a process: a scripted checkpoint, real HTTP, no Ray, a clean stop."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from flare_ray.cli.chat import Answer, ChatClient
from tests.rules.sources import ROOT
from tests.support.chat_checkpoint import write_chat_checkpoint
from tests.support.scripted.geometry import Script, write_checkpoint
from tests.support.scripted.recipe import DOTTED

READY_LIMIT_S = 60.0
STOP_LIMIT_S = 20.0
VOCABULARY = 272
CYCLE = tuple((token + 1) % VOCABULARY for token in range(VOCABULARY))

# Runs the command, and as it ends says which of the named libraries were ever imported.
PROGRAM = """
import atexit, sys
atexit.register(lambda: print("imported:", [m for m in ("ray",) if m in sys.modules]))
from flare_ray.cli.main import main
main()
"""


def start(folder: Path, port: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, "debug-serve", str(folder), "--port", str(port)]
    command += ["--recipe", DOTTED, "--device", "cpu", "--context-tokens", "256", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scripted")
    script = Script(vocab_size=VOCABULARY, next_tokens=CYCLE, drafter="prefix", draft_right=3)
    return write_chat_checkpoint(write_checkpoint(folder, script))


@pytest.fixture(scope="module")
def server(folder, free_port) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    port = free_port()
    process = start(folder, port, "--mtp-draft-tokens", "3", "--no-mtp-adaptive-verification")
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + READY_LIMIT_S
    try:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if httpx.get(f"{url}/health").status_code == httpx.codes.OK:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        else:
            pytest.fail(f"not ready: {process.poll()} {process.communicate(timeout=1)[0]}")
        yield url, process
    finally:
        process.kill()
        process.wait()


def test_completion_is_the_models_text(server):
    url, _ = server
    body = {"model": "x", "prompt": "abc", "temperature": 0, "max_tokens": 12}
    body["model"] = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30.0).json()
    assert answer["choices"][0]["text"] == "defghijklmno"


def test_options_reach_the_engine(server):
    # Three drafts at most, where the recipe's default is five.
    url, _ = server
    text = httpx.get(f"{url}/metrics").text
    counts = {
        line.split("{")[0].split()[0]: float(line.split()[-1])
        for line in text.splitlines()
        if not line.startswith("#")
    }
    drafts = counts["vllm:spec_decode_num_drafts_total"]
    assert drafts > 0
    assert counts["vllm:spec_decode_num_draft_tokens_total"] <= 3 * drafts


def test_chat_talks_to_it(server):
    url, _ = server
    client = ChatClient(url, settings={"temperature": 0, "max_tokens": 8})
    assert client.connect() != ""
    answer = Answer()
    pieces = list(client.ask("hi", answer))
    assert pieces and answer.usage["completion_tokens"] == 8
    client.close()


def test_interrupt_stops_it_cleanly_and_ray_was_never_imported(server):
    # Ends the module's server: the last test that uses it.
    _, process = server
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=STOP_LIMIT_S)
    assert process.returncode == 0, output
    assert output.rstrip().endswith("imported: []") and "Traceback" not in output


def test_engine_that_cannot_start_is_one_message(folder, free_port):
    process = start(folder, free_port(), "--fixed-width", "8")
    output, _ = process.communicate(timeout=READY_LIMIT_S)
    assert process.returncode == 2
    assert "Traceback" not in output and "error: speculation.fixed_width is 8" in output
