"""Terminal chat against a small HTTP server that plays scripted event streams."""

import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from flare_ray.cli.chat import Answer, ChatClient, printable, run_chat, summary
from flare_ray.errors import FlareError

WAIT_S = 5.0


def chunk(content: str = "", *, reasoning: str = "", finish: str | None = None) -> dict:
    delta = {"content": content} if content else {}
    if reasoning:
        delta["reasoning_content"] = reasoning
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": None}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}


class ScriptedServer:
    """Answers each chat request with the next script: a list of chunks, or (status, body).

    A chunk may be a number: seconds to stay silent. Attributes: `bodies` as received, `broken`
    counts answers whose client hung up.
    """

    def __init__(self, *scripts) -> None:
        self.scripts = list(scripts)
        self.bodies: list[dict] = []
        self.broken = 0
        self.models = ["m"]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_args) -> None:
                pass

            def do_GET(self) -> None:
                self._json(200, {"data": [{"id": name} for name in outer.models]})

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                outer.bodies.append(json.loads(self.rfile.read(length)))
                script = outer.scripts.pop(0)
                if isinstance(script, tuple):
                    self._json(*script)
                    return
                self.send_response(200)
                self.end_headers()
                try:
                    for item in script:
                        self._event(item)
                except OSError:
                    outer.broken += 1

            def _event(self, item) -> None:
                if isinstance(item, int | float):
                    time.sleep(item)
                    return
                text = item if isinstance(item, str) else json.dumps(item)
                self.wfile.write(f"data: {text}\n\n".encode())
                self.wfile.flush()

            def _json(self, status: int, document) -> None:
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                if status == 429:
                    self.send_header("retry-after", "2")
                self.end_headers()
                self.wfile.write(body)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def serve() -> Iterator:
    servers = []

    def start(*scripts) -> ScriptedServer:
        servers.append(ScriptedServer(*scripts))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def terminal(monkeypatch, lines) -> tuple[Console, io.StringIO]:
    """A console whose `input` plays `lines`, then ends; and what it prints."""
    output = io.StringIO()
    console = Console(file=output, width=200, force_terminal=False)
    remaining = list(lines)

    def read(*_args, **_kwargs) -> str:
        if not remaining:
            raise EOFError
        line = remaining.pop(0)
        if isinstance(line, type):
            raise line
        return line

    monkeypatch.setattr(console, "input", read)
    return console, output


def ask(client: ChatClient, text: str) -> tuple[str, Answer]:
    answer = Answer()
    return "".join(piece.text for piece in client.ask(text, answer)), answer


def test_answer_streams_and_both_turns_are_remembered(serve):
    server = serve([chunk("Hel"), chunk("lo"), chunk(finish="stop"), USAGE, "[DONE]"])
    client = ChatClient(server.url)
    client.connect()
    text, answer = ask(client, "hi")
    assert text == "Hello"
    assert answer.finish_reason == "stop" and answer.usage["completion_tokens"] == 2
    assert [m["content"] for m in client.messages] == ["hi", "Hello"]


def test_request_carries_model_settings_and_usage_wish(serve):
    server = serve([chunk("x"), "[DONE]"])
    client = ChatClient(server.url + "/v1/", settings={"temperature": 0.0}, system="be brief")
    client.connect()
    ask(client, "hi")
    body = server.bodies[0]
    assert body["model"] == "m" and body["stream"] is True and body["temperature"] == 0.0
    assert body["stream_options"] == {"include_usage": True}
    assert [m["role"] for m in body["messages"]] == ["system", "user"]


def test_reasoning_is_shown_but_not_sent_back(serve):
    server = serve([chunk(reasoning="hmm"), chunk("yes"), "[DONE]"], [chunk("ok"), "[DONE]"])
    client = ChatClient(server.url, model="m")
    text, _ = ask(client, "one")
    assert text == "hmmyes"
    ask(client, "two")
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["one", "yes", "two"]


def test_refused_question_is_forgotten_and_names_status_message_and_retry(serve):
    server = serve((429, {"error": {"message": "queue is full"}}), [chunk("ok"), "[DONE]"])
    client = ChatClient(server.url, model="m")
    with pytest.raises(FlareError, match=r"status 429: queue is full \(retry in 2 s\)"):
        ask(client, "one")
    assert client.messages == ()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([chunk("a"), {"error": {"message": "rank 1 died"}}], "rank 1 died"),
        ([chunk("a")], "ended without"),
        ([chunk("a"), "{broken"], "malformed"),
    ],
)
def test_stream_that_breaks_off_is_an_error(serve, script, message):
    client = ChatClient(serve(script).url, model="m")
    with pytest.raises(FlareError, match=message):
        ask(client, "one")
    assert [m["content"] for m in client.messages] == ["one", "a"]


def test_absent_server_is_named_with_what_to_do(free_port):
    client = ChatClient(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(FlareError, match=r"no server answers at .* flare-ray serve"):
        client.connect()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost"])
def test_address_without_scheme_is_named(url):
    with pytest.raises(FlareError, match="needs http://"):
        ChatClient(url).connect()


def test_unknown_model_is_refused_with_the_served_names(serve):
    with pytest.raises(FlareError, match="serves m, not 'other'"):
        ChatClient(serve().url, model="other").connect()


def test_closing_the_pieces_closes_the_connection_and_keeps_what_arrived(serve):
    slow = [chunk("part"), *([0.05, chunk("more")] * 100), "[DONE]"]
    server = serve(slow)
    client = ChatClient(server.url, model="m")
    pieces = client.ask("go", Answer())
    assert next(pieces).text == "part"
    pieces.close()
    deadline = time.monotonic() + WAIT_S
    while not server.broken and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.broken == 1
    assert [m["content"] for m in client.messages] == ["go", "part"]


def test_interrupt_cancels_the_answer_and_the_conversation_goes_on(serve, monkeypatch):
    slow = [chunk("part"), *([0.05, chunk("more")] * 100), "[DONE]"]
    server = serve(slow, [chunk("fine"), USAGE, "[DONE]"])
    console, output = terminal(monkeypatch, ["one", "two", "/quit"])
    written = console.print

    def interrupt_once(*args, **kwargs):
        written(*args, **kwargs)
        if args and args[0] == "part":
            raise KeyboardInterrupt

    monkeypatch.setattr(console, "print", interrupt_once)
    run_chat(ChatClient(server.url), console)
    text = output.getvalue()
    assert "part (cancelled)" in text and "fine" in text and "2 tokens" in text
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["one", "part", "two"]


def test_interrupt_at_the_prompt_does_not_leave(serve, monkeypatch):
    server = serve([chunk("ok"), "[DONE]"])
    console, output = terminal(monkeypatch, [KeyboardInterrupt, "hi"])
    run_chat(ChatClient(server.url), console)
    assert "/quit leaves" in output.getvalue() and "ok" in output.getvalue()


def test_reset_forgets_all_but_the_system_message(serve, monkeypatch):
    server = serve([chunk("a"), "[DONE]"], [chunk("b"), "[DONE]"])
    console, _ = terminal(monkeypatch, ["one", "/reset", "two"])
    run_chat(ChatClient(server.url, system="s"), console)
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["s", "two"]


def test_unknown_command_is_named_and_not_sent(serve, monkeypatch):
    server = serve()
    console, output = terminal(monkeypatch, ["/help me"])
    run_chat(ChatClient(server.url), console)
    assert "no command '/help'" in output.getvalue() and not server.bodies


def test_failed_answer_leaves_the_terminal_running(serve, monkeypatch):
    server = serve((400, {"error": {"message": "too long"}}), [chunk("ok"), "[DONE]"])
    console, output = terminal(monkeypatch, ["one", "two"])
    run_chat(ChatClient(server.url), console)
    assert "status 400: too long" in output.getvalue() and "ok" in output.getvalue()


def test_terminal_controls_of_a_model_are_not_obeyed():
    assert printable("a\x1b[31mb\x07\x9b2J\r\n\tc") == "a[31mb2J\n\tc"


def test_summary_needs_usage():
    assert summary(Answer(content="x")) == ""
    answer = Answer(usage={"completion_tokens": 10}, total_s=2.0, finish_reason="length")
    assert summary(answer) == "10 tokens, 5.0 tokens/s, cut at the token limit"


def test_server_that_accepts_but_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr("flare_ray.cli.chat.READ_TIMEOUT_S", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client = ChatClient(f"http://127.0.0.1:{listener.getsockname()[1]}", model="m")
        with pytest.raises(FlareError, match="no server answers"):
            ask(client, "hi")
