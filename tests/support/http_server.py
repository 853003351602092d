"""The routes over a scripted engine behind a real socket."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from flare_ray.frontend.api import build_api
from flare_ray.frontend.settings import ApiSettings
from tests.support.fake_engine_client import FakeEngineClient

START_LIMIT_S = 20.0
STOP_LIMIT_S = 20.0


@contextmanager
def http_server(client: FakeEngineClient, settings: ApiSettings, port: int) -> Iterator[str]:
    """Serve until the block ends; yields the base URL without a path."""
    app = build_api(client, settings)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_LIMIT_S
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(STOP_LIMIT_S)
        assert not thread.is_alive()
