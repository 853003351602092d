"""What the HTTP benchmark compares, a process of its own: ``python -m ...http_server ARM``.

    ingress   the product's routes, client and output stream over the paced engine
    bare      an ASGI application without a framework that streams frames of the same form at the
              same pace

Both under uvicorn in its default form, as an ingress replica runs behind HAProxy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import zmq
import zmq.asyncio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from benchmarks.serving.http_engine import (
    CANCEL,
    ENGINE_ID,
    PHASES,
    SECRET,
    STAMP_LETTERS,
    STATS,
    SUBMIT,
    open_codec,
    stamp_of,
)
from flare_ray.actors.stream_receiver import StreamReceiver
from flare_ray.contracts.manifest import SamplingDefaults
from flare_ray.contracts.messages import Failed, Finished
from flare_ray.contracts.request import GenerationRequest
from flare_ray.frontend.api import build_api
from flare_ray.frontend.client import EngineInfo
from flare_ray.frontend.remote import RemoteClient
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.stream import StreamTable

MODEL = "paced"
STATS_PATH = "/benchmark/open"
HEARTBEAT_TIMEOUT_S = 30.0
Message = dict[str, Any]


class _Engine:
    """The paced engine, as `RemoteClient` submits to it."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.connect(address)
        self._ends: dict[str, asyncio.Future[Finished]] = {}
        self._stats: asyncio.Queue[int] = asyncio.Queue()

    async def receive(self) -> None:
        """Take answers for ever."""
        while True:
            kind, body = await self._socket.recv_multipart()
            if kind == STATS:
                self._stats.put_nowait(int(body))
                continue
            end = msgspec.msgpack.decode(body, type=Finished)
            future = self._ends.get(end.request_id)
            if future is not None and not future.done():
                future.set_result(end)

    def submit(self, request: GenerationRequest) -> _Call:
        """Begin a call."""
        future = asyncio.get_running_loop().create_future()
        self._ends[request.request_id] = future
        self.send(SUBMIT, msgspec.msgpack.encode(request))
        return _Call(self, request.request_id, future)

    def forget(self, name: str) -> None:
        """The call is over."""
        self._ends.pop(name, None)

    def send(self, kind: bytes, body: bytes) -> None:
        """Queue a message."""
        self._socket.send_multipart([kind, body])

    async def running(self) -> int:
        """Requests that the engine runs."""
        self.send(STATS, b"")
        return await self._stats.get()


class _Call:
    """See `SubmitCall`."""

    def __init__(self, engine: _Engine, name: str, future: asyncio.Future[Finished]) -> None:
        self._engine, self._name, self._future = engine, name, future

    async def result(self) -> Finished | Failed:
        """See `SubmitCall.result`."""
        try:
            return await self._future
        finally:
            self._engine.forget(self._name)

    def cancel(self) -> None:
        """See `SubmitCall.cancel`."""
        self._engine.forget(self._name)
        self._engine.send(CANCEL, self._name.encode())


async def serve_ingress(port: int, checkpoint: Path, address: str) -> None:
    """The product's HTTP side."""
    codec, chat = open_codec(checkpoint)
    engine, table = _Engine(address), StreamTable()

    async def secret_of(engine_id: str) -> bytes | None:
        return SECRET if engine_id == ENGINE_ID else None

    outputs = StreamReceiver(
        secret_of, table.deliver, host="127.0.0.1", heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S
    )
    info = EngineInfo(
        engine_id=ENGINE_ID,
        context_tokens=1 << 20,
        max_prompt_tokens=1 << 16,
        vocab_size=len(codec.token_bytes),
        sampling_defaults=SamplingDefaults(),
    )

    async def find() -> EngineInfo:
        return info

    async def no_metrics() -> str:
        return ""

    client = RemoteClient(
        submit=engine.submit, outputs=outputs, table=table, find=find, metrics=no_metrics
    )

    async def open_requests(request: Request) -> Response:
        counts = {
            "streams": len(client.streams),
            "calls": len(client.calls),
            "inboxes": len(table),
            "expected": len(outputs),
            "engine": await engine.running(),
        }
        return JSONResponse(counts)

    settings = ApiSettings(model_name=MODEL, codec=codec, chat=chat, max_body_bytes=1 << 20)
    app = build_api(client, settings)
    app.add_route(STATS_PATH, open_requests, methods=["GET"])
    outputs.start()
    receiving = asyncio.create_task(engine.receive())
    try:
        await _uvicorn(app, port)
    finally:
        receiving.cancel()
        await outputs.close()


class BareApp:
    """Frames at the engine's pace, and nothing else. Phases as in the engine."""

    def __init__(self, rate: float) -> None:
        self._tick_s = 1.0 / rate / PHASES
        self._waiting: list[set[asyncio.Queue[bytes]]] = [set() for _ in range(PHASES)]

    async def tick(self) -> None:
        """Pace for ever."""
        due_s, tick = time.monotonic(), 0
        while True:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            stamp = stamp_of(time.monotonic_ns() // 1000)
            for queue in self._waiting[tick % PHASES]:
                queue.put_nowait(stamp)
            tick, due_s = tick + 1, due_s + self._tick_s

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        deltas = json.loads(body)["max_tokens"] // STAMP_LETTERS if body else 0
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        phase = min(self._waiting, key=len)
        phase.add(queue)
        try:
            for _ in range(deltas):
                frame = FRAME.replace(b"#####", await queue.get())
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        finally:
            phase.discard(queue)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


FRAME = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"paced","choices":[{"index":0,"delta":{"content":"#####"},'
    b'"finish_reason":null}]}\n\n'
)


async def serve_bare(port: int, rate: float) -> None:
    """The comparison."""
    app = BareApp(rate)
    ticking = asyncio.create_task(app.tick())
    try:
        await _uvicorn(app, port)
    finally:
        ticking.cancel()


async def _uvicorn(app: Any, port: int) -> None:
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, log_level="warning", access_log=False, lifespan="off"
    )
    await uvicorn.Server(config).serve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", choices=("ingress", "bare"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--address", required=True, help="the paced engine's")
    parser.add_argument("--rate", type=float, required=True, help="deltas a second and stream")
    options = parser.parse_args()
    # uvicorn's own default where uvloop is installed; a loop made by hand would not take it.
    from uvicorn.loops.auto import auto_loop_factory

    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        if options.arm == "ingress":
            runner.run(serve_ingress(options.port, options.checkpoint, options.address))
        else:
            runner.run(serve_bare(options.port, options.rate))


if __name__ == "__main__":
    main()
