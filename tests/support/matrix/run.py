"""Runs cells against engines of this process, as HTTP requests that share their rounds."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from flare_ray.actors.inprocess import start_inprocess
from flare_ray.controller import sampling
from flare_ray.frontend.api import build_api
from flare_ray.frontend.inprocess import InProcessClient
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.tokenizer import TextCodec
from flare_ray.recipes.declaration import ChatFormat
from tests.support.matrix.cells import DRAFTERS, Cell
from tests.support.matrix.model import SCRIPT, WRONG, checkpoint, engine_config

IN_FLIGHT = 12
REQUEST_LIMIT_S = 60.0
_UNSEEDED: ContextVar[random.Random] = ContextVar("unseeded")


@dataclass
class Answer:
    """A response: `choices` as of a whole answer, joined where it was streamed from `chunks`. A
    stream that ends with an error has the status that a whole answer would have."""

    status: int
    error: dict[str, Any] = field(default_factory=dict)
    choices: list[dict[str, Any]] = field(default_factory=list)
    completion_tokens: int = 0
    cached_tokens: int = 0
    chunks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of the only choice."""
        [choice] = self.choices
        text: str = choice["text"]
        return text


class Engine:
    """An engine of this process behind the HTTP routes.

    Args:
        path: a checkpoint of the scripted recipe.
        settings: engine settings beside those of `engine_config`.
    """

    def __init__(self, path: str, **settings: Any) -> None:
        self.core = start_inprocess(engine_config(path, **settings))
        codec = TextCodec(Path(path), ChatFormat())
        self._settings = ApiSettings(
            model_name="micro", codec=codec, chat=ChatFormat(), max_body_bytes=1 << 20
        )

    def post(self, **body: Any) -> Answer:
        """Send one body."""
        [answer] = self.post_all([body])
        return answer

    def post_raw(self, data: bytes, path: str = "/v1/completions") -> Answer:
        """Send bytes; they are taken for the body of one answer in one piece."""

        async def call() -> Answer:
            async with self._http() as http:
                return read(await http.post(path, content=data), {})

        return asyncio.run(call())

    def post_all(self, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
        """Send every body, several at once; answers in their order."""
        return asyncio.run(self._post_all(bodies))

    async def _post_all(self, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
        places = asyncio.Semaphore(IN_FLIGHT)
        async with self._http() as http:

            async def post(number: int, body: dict[str, Any]) -> Answer:
                _UNSEEDED.set(random.Random(number))
                async with places:
                    sent = {"model": "micro", **body}
                    call = http.post("/v1/completions", json=sent)
                    return read(await asyncio.wait_for(call, REQUEST_LIMIT_S), sent)

            return await asyncio.gather(*(post(i, body) for i, body in enumerate(bodies)))

    def _http(self) -> httpx.AsyncClient:
        client = InProcessClient(self.core, max_prompt_tokens=None, render_metrics=str)
        app = build_api(client, self._settings)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
        return httpx.AsyncClient(transport=transport, base_url="http://micro")

    def close(self) -> None:
        """Stop it; a round that failed shows here."""
        fatal = self.core.fatal
        self.core.shutdown(0.0)
        assert not fatal, fatal


def fix_unseeded_requests(monkeypatch: Any) -> None:
    """Requests without a seed get one from their place in the call: a failure can be repeated."""
    monkeypatch.setattr(
        sampling.secrets, "randbits", lambda bits: _UNSEEDED.get().getrandbits(bits)
    )


def drafter_engine(drafter: str, folder: Path) -> Engine:
    """The micro checkpoint with one of the axis's drafters."""
    script = WRONG if drafter.startswith("wrong") else SCRIPT
    return Engine(checkpoint(folder, script), **DRAFTERS[drafter])


def run_cells(cells: Sequence[Cell], folder: Path) -> dict[Cell, Answer]:
    """Answers of all cells, engine by engine."""
    answers: dict[Cell, Answer] = {}
    for drafter in DRAFTERS:
        own = [cell for cell in cells if cell.drafter == drafter]
        if not own:
            continue
        engine = drafter_engine(drafter, folder / drafter.replace(" ", "-"))
        try:
            found = engine.post_all([cell.body() for cell in own])
        finally:
            engine.close()
        answers |= dict(zip(own, found, strict=True))
    return answers


def read(response: httpx.Response, body: dict[str, Any]) -> Answer:
    """A response, with chunks of a stream joined as a client joins them."""
    if response.status_code != httpx.codes.OK:
        return Answer(response.status_code, error=response.json()["error"])
    if not body.get("stream"):
        whole = json.loads(response.text, parse_constant=_no_constant)
        usage = whole["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = usage["completion_tokens"], cached
        return Answer(200, {}, whole["choices"], *counts)
    return _joined(response.text, body)


def _joined(text: str, body: dict[str, Any]) -> Answer:
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], text[-200:]
    chunks = [
        json.loads(event.removeprefix("data: "), parse_constant=_no_constant)
        for event in events[:-2]
    ]
    if "error" in chunks[-1]:
        error = chunks[-1]["error"]
        refused = error["type"] == "invalid_request_error"
        return Answer(400 if refused else 500, error, chunks=chunks)
    answer = Answer(200, chunks=list(chunks))
    if (body.get("stream_options") or {}).get("include_usage"):
        last = chunks.pop()
        assert last["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
        answer.completion_tokens = last["usage"]["completion_tokens"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in range(body.get("n") or 1):
        answer.choices.append(_choice([c["choices"][0] for c in chunks], index))
    return answer


def _choice(parts: Sequence[dict[str, Any]], index: int) -> dict[str, Any]:
    own = [part for part in parts if part["index"] == index]
    finishes = [part["finish_reason"] is not None for part in own]
    assert finishes == [False] * (len(own) - 1) + [True], "exactly one finish, last (H-15)"
    joined = {**own[-1], "text": "".join(part["text"] for part in own)}
    if own[-1]["logprobs"] is not None:
        names = own[-1]["logprobs"]
        joined["logprobs"] = {n: [v for p in own for v in p["logprobs"][n]] for n in names}
    return joined


def _no_constant(name: str) -> float:
    raise AssertionError(f"the JSON holds {name} (H-11)")
