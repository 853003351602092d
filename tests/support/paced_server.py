"""A chat server whose every delivery has a known time: what a measuring client is measured by."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(slots=True)
class Paced:
    """Answers of `tokens` pieces, the first after `first_s`, then one every `gap_s`.

    Attributes:
        serial: one request at a time, others wait in the order of arrival.
        refuse: requests (counted from 0) that are answered with status 500.
        bodies: requests as they came.
    """

    first_s: float
    gap_s: float
    tokens: int
    serial: bool = False
    refuse: frozenset[int] = frozenset()
    metrics: str | None = None
    bodies: list[dict] = field(default_factory=list)
    url: str = ""

    @property
    def service_s(self) -> float:
        """Whole answer of an idle server."""
        return self.first_s + self.gap_s * (self.tokens - 1)


def sleep_until(moment_s: float) -> None:
    """Absolute, so that pauses do not add up what each oversleeps."""
    while (left_s := moment_s - time.perf_counter()) > 0:
        time.sleep(left_s)


class Handler(BaseHTTPRequestHandler):
    """Answers as `server.paced` says."""

    protocol_version = "HTTP/1.1"
    server: PacedHttpServer

    def log_message(self, *_: object) -> None:
        """Silence."""

    def do_GET(self) -> None:
        metrics = self.server.paced.metrics
        if self.path == "/v1/models":
            self._whole(200, json.dumps({"data": [{"id": "paced"}]}))
        elif self.path == "/metrics" and metrics is not None:
            self._whole(200, metrics)
        else:
            self._whole(404, "nothing")

    def do_POST(self) -> None:
        arrived_s, paced = time.perf_counter(), self.server.paced
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = len(paced.bodies)
        paced.bodies.append(body)
        if number in paced.refuse:
            self._whole(500, "broken on purpose")
        else:
            self._stream(self.server.start_of(arrived_s) if paced.serial else arrived_s)

    def _stream(self, started_s: float) -> None:
        paced = self.server.paced
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for place in range(paced.tokens):
            sleep_until(started_s + paced.first_s + paced.gap_s * place)
            self._event({"choices": [{"index": 0, "delta": {"content": f"{place} "}}]})
        usage = {"prompt_tokens": 3, "completion_tokens": paced.tokens}
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, value: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def _whole(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class PacedHttpServer(ThreadingHTTPServer):
    """A thread a connection; knows when a serial answer may begin."""

    daemon_threads = True

    def __init__(self, paced: Paced) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.paced = paced
        self._turn, self._free_s = threading.Lock(), 0.0

    def start_of(self, arrived_s: float) -> float:
        """When whoever arrived then is served, after all that came before."""
        with self._turn:
            started_s = max(arrived_s, self._free_s)
            self._free_s = started_s + self.paced.service_s
            return started_s


@contextmanager
def paced_server(paced: Paced) -> Iterator[Paced]:
    """Serve on a free port of this host."""
    server = PacedHttpServer(paced)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    paced.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield paced
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
