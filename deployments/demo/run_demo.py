"""Serve a deployment, print one streamed chat answer, stop it: what ``make demo`` runs.

The server is the installed ``flare-ray serve FILE``, a process of its own, and this script is a
plain HTTP client of it. Exit status 0 means: it became ready, answered, and left no process behind.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_FILE = ROOT / "deployments" / "glm-demo.yaml"
LOG_FILE = ROOT / ".cache" / "demo" / "serve.log"
DEFAULT_PROMPT = "Write a short story about Mia the fox."
LOG_TAIL_LINES = 40
READY_LIMIT_S = 180.0
# Serve drains its proxies before it leaves; the variable below shortens that to about a second.
STOP_LIMIT_S = 60.0
# What the server started must be gone this long after the server itself.
ORPHAN_LIMIT_S = 10.0
SERVER_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}


class DemoFailure(Exception):
    """The demo could not show what it promises; the message says what happened."""


def address_of(document: dict[str, Any]) -> tuple[str, int]:
    """Host and port a Serve YAML listens on, with Serve's own defaults."""
    options = document.get("http_options") or {}
    host = options.get("host", "127.0.0.1")
    return ("127.0.0.1" if host == "0.0.0.0" else host), int(options.get("port", 8000))


def model_of(document: dict[str, Any]) -> str:
    """The name the deployment serves; it tells our server from another one on the port."""
    for application in document.get("applications") or []:
        name = (application.get("args") or {}).get("model_name")
        if name:
            return str(name)
    raise DemoFailure("the deployment names no args.model_name in any application")


def require_free_port(host: str, port: int) -> None:
    """Refuse a port that something listens on: Serve would share it and split the requests."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        if sock.connect_ex((host, port)) == 0:
            raise DemoFailure(
                f"{host}:{port} is in use: stop that server, or change http_options.port"
            )


def start_server(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start the server with its output in ``log``, in a session of its own."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**SERVER_ENVIRONMENT, **os.environ},
            start_new_session=True,
        )


def wait_until_ready(
    server: subprocess.Popen[bytes], base_url: str, *, limit_s: float = READY_LIMIT_S
) -> None:
    """Poll ``/health`` until it answers 200.

    Raises:
        DemoFailure: if the server ends first or the limit passes.
    """
    deadline = time.monotonic() + limit_s
    last = "no connection"
    while time.monotonic() < deadline:
        status = server.poll()
        if status is not None:
            raise DemoFailure(f"the server ended with status {status} before it was ready")
        try:
            answer = httpx.get(f"{base_url}/health", timeout=5.0)
            if answer.status_code == httpx.codes.OK:
                return
            last = f"status {answer.status_code}: {answer.text[:200]}"
        except httpx.TransportError as error:
            last = type(error).__name__
        time.sleep(0.25)
    raise DemoFailure(f"{base_url}/health was not ready within {limit_s:.0f} s (last: {last})")


def require_model(base_url: str, model: str) -> None:
    """Check that the answering server is the one just started."""
    listed = httpx.get(f"{base_url}/v1/models", timeout=10.0).raise_for_status().json()
    names = [entry["id"] for entry in listed["data"]]
    if model not in names:
        raise DemoFailure(f"{base_url} serves {names}, expected {model!r}")


def stream_chat(base_url: str, model: str, prompt: str) -> Iterator[dict[str, Any]]:
    """Chunks of one streamed chat completion, usage included.

    Raises:
        DemoFailure: if the answer is an error, or the stream breaks off before ``[DONE]``.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 256,
    }
    url = f"{base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=120.0) as answer:
        if answer.status_code != httpx.codes.OK:
            raise DemoFailure(f"status {answer.status_code}: {answer.read().decode()[:500]}")
        for line in answer.iter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise DemoFailure(f"error in the stream: {chunk['error']}")
            yield chunk
    raise DemoFailure("the stream ended without [DONE]")


def print_answer(chunks: Iterator[dict[str, Any]]) -> str:
    """Print text as it arrives, then one line of figures; returns the visible text."""
    started = time.monotonic()
    first_s: float | None = None
    text = ""
    usage: dict[str, Any] | None = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", []):
            delta = choice.get("delta", {})
            piece = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            if piece:
                first_s = time.monotonic() - started if first_s is None else first_s
                text += delta.get("content") or ""
                print(piece, end="", flush=True)
    took_s = time.monotonic() - started
    print()
    if first_s is None or not text.strip():
        raise DemoFailure("the stream carried no text")
    if usage is None:
        raise DemoFailure("the stream carried no usage although it was asked for")
    tokens = usage["completion_tokens"]
    print(f"[{tokens} tokens in {took_s:.2f} s, first text after {first_s:.2f} s]")
    return text


def stop_server(server: subprocess.Popen[bytes], *, limit_s: float = STOP_LIMIT_S) -> None:
    """Ask the server to stop and see that its whole process tree is gone.

    Raises:
        DemoFailure: if it had to be killed, or left children behind (they are killed).
    """
    if server.poll() is not None:
        return
    tree = psutil.Process(server.pid).children(recursive=True)
    server.send_signal(signal.SIGTERM)
    complaint = ""
    try:
        server.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
        complaint = f"the server did not stop within {limit_s:.0f} s and was killed"
    _, remaining = psutil.wait_procs(tree, timeout=ORPHAN_LIMIT_S)
    alive = [process for process in remaining if is_running(process)]
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=ORPHAN_LIMIT_S)
    if alive and not complaint:
        complaint = f"the server left {len(alive)} process(es) behind; they were killed"
    if complaint:
        raise DemoFailure(complaint)


def is_running(process: psutil.Process) -> bool:
    """Whether it still executes; one that only waits for init to collect it does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tail(log: Path) -> str:
    """The end of the server's output."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])


def show(command: Sequence[str], document: dict[str, Any], prompt: str) -> None:
    """Run the whole demo; the server is stopped whatever happens."""
    host, port = address_of(document)
    model = model_of(document)
    base_url = f"http://{host}:{port}"
    require_free_port(host, port)
    started = time.monotonic()
    print(f"$ {' '.join(command)}    (output in {os.path.relpath(LOG_FILE)})", flush=True)
    server = start_server(command, LOG_FILE)
    try:
        wait_until_ready(server, base_url)
        require_model(base_url, model)
        print(f"ready after {time.monotonic() - started:.1f} s at {base_url}, model {model}")
        print(f"> {prompt}", flush=True)
        print_answer(stream_chat(base_url, model, prompt))
    finally:
        stop_server(server)
    print("stopped cleanly")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT_FILE, help="Serve YAML")
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="the user's message")
    options = parser.parse_args(arguments)
    executable = Path(sys.executable).with_name("flare-ray")
    try:
        document = yaml.safe_load(options.file.read_text(encoding="utf-8"))
        show([str(executable), "serve", str(options.file)], document, options.prompt)
    except (DemoFailure, OSError, httpx.HTTPError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        if LOG_FILE.exists():
            print(f"--- end of {LOG_FILE}\n{tail(LOG_FILE)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
