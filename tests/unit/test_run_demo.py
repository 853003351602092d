"""The demo's driver against small local servers: it must fail whenever the demo did not happen."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from deployments.demo import run_demo
from deployments.demo.run_demo import DemoFailure


def chunk(**delta: str) -> str:
    return "data: " + json.dumps({"choices": [{"delta": delta}]})


USAGE = "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": 2}})
WHOLE_STREAM = [chunk(role="assistant"), chunk(content="Once "), chunk(content="upon"), USAGE]
DONE = "data: [DONE]"


@pytest.fixture
def service() -> Iterator[dict]:
    """An HTTP server whose answers the test sets: health status, models, stream lines."""
    state = {"health": [200], "models": ["demo"], "status": 200, "lines": [*WHOLE_STREAM, DONE]}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/health":
                self.send(state["health"][0], "loading")
                state["health"] = state["health"][1:] or state["health"]
            else:
                listed = {"data": [{"id": name} for name in state["models"]]}
                self.send(200, json.dumps(listed))

        def do_POST(self):
            length = int(self.headers["Content-Length"])
            state["request"] = json.loads(self.rfile.read(length))
            self.send(state["status"], "\n\n".join(state["lines"]) + "\n\n")

        def send(self, status, text):
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state["port"] = server.server_address[1]
    state["url"] = f"http://127.0.0.1:{state['port']}"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def answer(service) -> str:
    chunks = run_demo.stream_chat(service["url"], "demo", "Hello")
    return run_demo.print_answer(chunks)


def test_answer_is_printed_as_streamed(service, capsys):
    assert answer(service) == "Once upon"
    printed = capsys.readouterr().out
    assert "Once upon\n[2 tokens in" in printed
    assert service["request"]["model"] == "demo" and service["request"]["stream"] is True


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (WHOLE_STREAM, "without \\[DONE\\]"),
        ([chunk(role="assistant"), USAGE, DONE], "no text"),
        ([chunk(reasoning_content="Hm."), USAGE, DONE], "no text"),
        ([chunk(content="Once"), DONE], "no usage"),
        ([chunk(content="Once"), 'data: {"error": {"message": "rank 1"}}', DONE], "rank 1"),
    ],
)
def test_broken_stream_fails_the_demo(service, lines, message):
    service["lines"] = lines
    with pytest.raises(DemoFailure, match=message):
        answer(service)


def test_refused_request_fails_the_demo_with_its_body(service):
    service.update(status=400, lines=["unknown model"])
    with pytest.raises(DemoFailure, match="status 400: unknown model"):
        answer(service)


def test_another_model_on_the_port_fails_the_demo(service):
    run_demo.require_model(service["url"], "demo")
    with pytest.raises(DemoFailure, match="expected 'other'"):
        run_demo.require_model(service["url"], "other")


def test_wait_goes_on_while_health_is_503(service, sleeper):
    service["health"] = [503, 503, 200]
    run_demo.wait_until_ready(sleeper, service["url"], limit_s=20.0)


def test_wait_ends_at_its_limit_and_reports_the_last_answer(service, sleeper):
    service["health"] = [503]
    with pytest.raises(DemoFailure, match="status 503: loading"):
        run_demo.wait_until_ready(sleeper, service["url"], limit_s=0.3)


def test_wait_ends_when_the_server_ends(free_port):
    server = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    server.wait()
    with pytest.raises(DemoFailure, match="status 7"):
        run_demo.wait_until_ready(server, f"http://127.0.0.1:{free_port()}")


def test_taken_port_is_refused(service, free_port):
    run_demo.require_free_port("127.0.0.1", free_port())
    with pytest.raises(DemoFailure, match=r"http_options\.port"):
        run_demo.require_free_port("127.0.0.1", service["port"])


def test_stop_ends_a_server_that_obeys(sleeper):
    run_demo.stop_server(sleeper, limit_s=20.0)
    assert sleeper.poll() is not None


STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(60)"


def spawn(code: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_stop_kills_a_server_that_does_not_and_says_so():
    server = spawn(STUBBORN)
    with pytest.raises(DemoFailure, match="was killed"):
        run_demo.stop_server(server, limit_s=0.2)
    assert server.poll() is not None


def test_stop_kills_what_the_server_left_behind_and_says_so(monkeypatch):
    monkeypatch.setattr(run_demo, "ORPHAN_LIMIT_S", 0.2)
    server = spawn(
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-uc', {STUBBORN!r}], stdout=-1)\n"
        "p.stdout.readline(); print('up'); time.sleep(60)"
    )
    (child,) = psutil.Process(server.pid).children()
    with pytest.raises(DemoFailure, match="left 1 process"):
        run_demo.stop_server(server, limit_s=20.0)
    assert not run_demo.is_running(child)


SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def send(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    def do_GET(self):
        self.send(sys.argv[2])
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send(sys.argv[3])
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_whole_demo_runs_and_stops_its_server(free_port, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_demo, "LOG_FILE", tmp_path / "logs" / "serve.log")
    port = free_port()
    document = {
        "http_options": {"port": port},
        "applications": [{"args": {"model_name": "demo"}}],
    }
    models = json.dumps({"data": [{"id": "demo"}]})
    stream = "\n\n".join([*WHOLE_STREAM, DONE]) + "\n\n"
    command = [sys.executable, "-c", SERVER, str(port), models, stream]
    run_demo.show(command, document, "Hello")
    printed = capsys.readouterr().out
    assert "> Hello\nOnce upon\n" in printed and printed.endswith("stopped cleanly\n")
    run_demo.require_free_port("127.0.0.1", port)


def test_demo_stops_its_server_when_the_answer_is_broken(free_port, tmp_path, monkeypatch):
    monkeypatch.setattr(run_demo, "LOG_FILE", tmp_path / "serve.log")
    port = free_port()
    document = {
        "http_options": {"port": port},
        "applications": [{"args": {"model_name": "demo"}}],
    }
    models = json.dumps({"data": [{"id": "demo"}]})
    with pytest.raises(DemoFailure, match="DONE"):
        run_demo.show([sys.executable, "-c", SERVER, str(port), models, "\n"], document, "Hello")
    run_demo.require_free_port("127.0.0.1", port)


def test_address_and_model_come_from_the_deployment():
    document = {
        "http_options": {"host": "0.0.0.0", "port": 8123},
        "applications": [{"args": {"model_name": "demo"}}],
    }
    assert run_demo.address_of(document) == ("127.0.0.1", 8123)
    assert run_demo.address_of({}) == ("127.0.0.1", 8000)
    assert run_demo.model_of(document) == "demo"
    with pytest.raises(DemoFailure, match="model_name"):
        run_demo.model_of({"applications": [{}]})


def test_missing_deployment_file_fails_with_status_one(tmp_path, capsys):
    assert run_demo.main([str(tmp_path / "absent.yaml")]) == 1
    assert "absent.yaml" in capsys.readouterr().err
