"""The routes over a scripted engine behind a real socket."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from flare_ray.frontend.access import Access
from flare_ray.frontend.api import build_api
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.tokenizer import TextCodec
from tests.support.chat_checkpoint import CHAT, write_chat_checkpoint
from tests.support.fake_engine_client import FakeEngineClient, Script

START_LIMIT_S = 20.0
STOP_LIMIT_S = 20.0
CANCEL_LIMIT_S = 10.0


def chat_codec(folder: Path) -> TextCodec:
    """Codec of a chat checkpoint, which is written to the folder."""
    return TextCodec(write_chat_checkpoint(folder), CHAT)


def wait_running(engine: FakeEngineClient, wanted: Set[str] = frozenset()) -> None:
    """Wait until the requests of these ids, and no others, are being answered."""
    deadline = time.monotonic() + CANCEL_LIMIT_S
    while engine.running != wanted:
        assert time.monotonic() < deadline, engine.running
        time.sleep(0.01)


@contextmanager
def http_server(
    codec: TextCodec,
    port: int,
    script: Script | None = None,
    *,
    send_buffer: int = 0,
    access: Access | None = None,
    wrap: Callable[[Any], Any] = lambda app: app,
) -> Iterator[tuple[FakeEngineClient, str]]:
    """Serve until the block ends; yields the engine and the base URL without a path.

    Args:
        send_buffer: bytes that the kernel keeps for a client that does not read; 0 = what it likes.
        access: who may ask; None = anyone.
        wrap: puts something before the routes.
    """
    client = FakeEngineClient(script)
    settings = ApiSettings(
        model_name="tiny",
        codec=codec,
        chat=CHAT,
        max_body_bytes=1 << 20,
        access=access or Access(),
    )
    app = wrap(build_api(client, settings))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", port))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    deadline = time.monotonic() + START_LIMIT_S
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    try:
        yield client, f"http://127.0.0.1:{port}"
    finally:
        # A test that has failed may have left a connection open.
        server.should_exit = server.force_exit = True
        thread.join(STOP_LIMIT_S)
        assert not thread.is_alive()
