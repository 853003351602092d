"""One API over a scripted engine, called without a socket."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from flare_ray.frontend.api import build_api
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.tokenizer import TextCodec
from tests.support.chat_checkpoint import CHAT, write_chat_checkpoint
from tests.support.described import assert_described
from tests.support.fake_engine_client import FakeEngineClient

MAX_BODY_BYTES = 20_000


@dataclass
class Api:
    """Synchronous access to the routes; every call runs on an event loop of its own."""

    client: FakeEngineClient
    settings: ApiSettings

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """The answer; what is accepted must be what the OpenAPI document describes."""

        async def call() -> httpx.Response:
            app = build_api(self.client, self.settings)
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                return await http.request(method, path, **kwargs)

        response = asyncio.run(call())
        if response.status_code == 200 and method == "POST" and "json" in kwargs:
            assert_described(path, kwargs["json"])
        return response

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **kwargs)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", chat_body(**fields))

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "tiny", "prompt": "abc", **fields})

    def chunks(self, **fields: Any) -> list[dict[str, Any]]:
        """Chunks of a streamed chat; checks that the stream ends with [DONE]."""
        return sse_chunks(self.chat(stream=True, **fields))

    @property
    def prompt(self) -> str:
        """The last prompt the engine was given, as text."""
        tokens = self.client.requests[-1].prompt_tokens
        names = {
            token.content: ident
            for ident, token in self.settings.codec._tokenizer.get_added_tokens_decoder().items()
        }
        table = dict(enumerate(self.settings.codec.token_bytes))
        table |= {ident: f"[{name}]".encode() for name, ident in names.items()}
        return b"".join(table[token] for token in tokens).decode()


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def chat_body(**fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
    return {key: value for key, value in body.items() if value is not ...}


def sse_chunks(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Events of a stream, each named after its type."""
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The inner error object; checks status and shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(write_chat_checkpoint(tmp_path_factory.mktemp("checkpoint")), CHAT)


@pytest.fixture
def make_api(codec: TextCodec) -> Callable[..., Api]:
    def make(script: Any = None) -> Api:
        settings = ApiSettings(
            model_name="tiny", codec=codec, chat=CHAT, max_body_bytes=MAX_BODY_BYTES
        )
        return Api(FakeEngineClient(script), settings)

    return make


@pytest.fixture
def api(make_api: Callable[..., Api]) -> Api:
    return make_api()
