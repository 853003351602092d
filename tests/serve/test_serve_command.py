"""`flare-ray serve` as a process: ready, answering, stopped by a signal; refusals by name."""

import signal
import time
from collections.abc import Callable

import httpx
import pytest

from tests.serve.processes import deployment_file, launch, running
from tests.support.served_checkpoint import alphabet_from, served_checkpoint, served_deployment

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

START_LIMIT_S = 90.0
REFUSAL_LIMIT_S = 60.0
"""The promise is 30 s; a busy machine needs longer for the start of Ray alone."""


@pytest.mark.slow  # acceptance/test_faults.py starts and stops the command, too
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_answers_and_stops_on_a_signal(tmp_path, free_port, number):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    checkpoint = served_checkpoint(tmp_path)
    file = deployment_file(tmp_path, served_deployment(checkpoint), port)
    log = tmp_path / "log"
    with running(
        "serve",
        str(file),
        "--concurrency",
        "3",
        log=log,
        url=url,
        start_limit_s=START_LIMIT_S,
        number=number,
    ):
        body = {"model": "letters", "prompt": "a", "max_tokens": 9, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30.0)
        assert answer.json()["choices"][0]["text"] == alphabet_from("a", 9)
    assert "option replaces engine.concurrency: 2 -> 3" in log.read_text()


def test_serve_without_its_checkpoint_ends_with_its_name_and_the_demo(
    tmp_path, free_port: Callable[[], int]
):
    file = deployment_file(tmp_path, served_deployment("/none/such"), free_port())
    log = tmp_path / "log"
    started = time.monotonic()
    process = launch("serve", str(file), log=log)
    assert process.wait(REFUSAL_LIMIT_S) != 0
    text = log.read_text()
    assert "/none/such" in text
    assert "-demo.yaml" in text
    assert "Traceback" not in text
    assert time.monotonic() - started < REFUSAL_LIMIT_S
