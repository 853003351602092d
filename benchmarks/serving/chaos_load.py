"""Clients of ``chaos``: they send, and tell every possible end of a request apart.

complete       the whole answer
error_status   a status above 399 in the API's error form
proxy_status   a status above 499 in plain text: Serve's proxy speaks for a replica that died
               before it answered, and knows no API's error form; clients tell it by its status
error_event    a stream whose last event is an error
connection     the connection broke, or was refused: a client can tell this from an answer
truncated      a 200 that ended without its end, or an error that was not the last thing said
silent         no end within the limit
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.serving.workload import CHAT_PATH, Prompt

CLEAR = ("complete", "error_status", "proxy_status", "error_event", "connection")
END_NAMES = (*CLEAR, "truncated", "silent")
REQUEST_LIMIT_S = 150.0
"""Longer than a request may wait for an engine to be rebuilt, and run."""
OUTPUT_TOKENS = (4, 400)
"""Long enough that some request is always in the middle of its answer."""
WHOLE_RATIO = 0.3
SCHEMA_RATIO = 0.15
"""Of conversations without tools: their masks travel to the ranks in shared memory."""
SCHEMA = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 40}},
    "required": ["numbers"],
    "additionalProperties": False,
}
PAUSE_S = 0.3
MAX_NOTED = 20
DATA = "data: "
OWN = "request-id"
"""A header of every response that an HTTP replica wrote itself; Serve's proxy has none of it."""


class Clients:
    """Sends requests until the time is over.

    Attributes:
        ends: requests by outcome.
        noted: the first unclear ends, in words.
    """

    def __init__(self, base_url: str, model: str, prompts: Sequence[Prompt], *, seed: int) -> None:
        self.ends: Counter[str] = Counter()
        self.noted: list[str] = []
        self._base_url = base_url
        self._model = model
        self._prompts = prompts
        self._random = random.Random(seed)

    async def run(self, until_s: float, clients: int) -> None:
        """So many at a time; returns once every request has ended."""
        await asyncio.gather(*(self._client(until_s) for _ in range(clients)))

    async def _client(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            end, note = await self._one()
            self.ends[end] += 1
            if end not in CLEAR and len(self.noted) < MAX_NOTED:
                self.noted.append(f"{end}: {note}")
            if end != "complete":
                await asyncio.sleep(PAUSE_S)

    async def _one(self) -> tuple[str, str]:
        prompt = self._random.choice(self._prompts)
        body = prompt.body(self._model, self._random.randint(*OUTPUT_TOKENS))
        if prompt.path == CHAT_PATH and not prompt.tools and self._random.random() < SCHEMA_RATIO:
            schema = {"name": "numbers", "schema": SCHEMA, "strict": True}
            body |= {"response_format": {"type": "json_schema", "json_schema": schema}}
        else:
            body |= {"ignore_eos": True}
        whole = self._random.random() < WHOLE_RATIO
        if whole:
            body = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
        try:
            # A connection of its own: none that a killed process had open is used again.
            async with (
                asyncio.timeout(REQUEST_LIMIT_S),
                httpx.AsyncClient(
                    base_url=self._base_url, timeout=REQUEST_LIMIT_S, trust_env=False
                ) as client,
            ):
                if whole:
                    answer = await client.post(prompt.path, json=body)
                    return end_of_whole(answer)
                return await read_to_end(client, prompt.path, body)
        except (TimeoutError, httpx.TimeoutException) as error:
            return "silent", repr(error)
        except httpx.TransportError as error:
            return "connection", repr(error)


def end_of_whole(answer: httpx.Response) -> tuple[str, str]:
    """The outcome of an answer in one piece, or of an error status."""
    try:
        document: dict[str, Any] = answer.json()
    except ValueError:
        if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR and OWN not in answer.headers:
            return "proxy_status", answer.text[:200]
        return "truncated", f"status {answer.status_code} without JSON: {answer.text[:200]!r}"
    if answer.status_code == httpx.codes.OK:
        choices = document.get("choices") or [{}]
        done = choices[0].get("finish_reason") and document.get("usage")
        return ("complete" if done else "truncated"), answer.text[:200]
    message = (document.get("error") or {}).get("message")
    return ("error_status" if message else "truncated"), answer.text[:200]


async def read_to_end(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> tuple[str, str]:
    """The outcome of a stream."""
    async with client.stream("POST", path, json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            await answer.aread()
            return end_of_whole(answer)
        events = [
            line.removeprefix(DATA) async for line in answer.aiter_lines() if line.startswith(DATA)
        ]
    return end_of_events(events)


def end_of_events(events: Sequence[str]) -> tuple[str, str]:
    """The outcome of a stream that was read to its end."""
    if not events or events[-1] != "[DONE]":
        return "truncated", f"{len(events)} events, the last is {events[-1:]}"
    chunks = [json.loads(event) for event in events[:-1]]
    failed = ["error" in chunk for chunk in chunks]
    if any(failed):
        alone = sum(failed) == 1 and failed[-1]
        return ("error_event" if alone else "truncated"), "an error that is not the last event"
    ended = any(c.get("finish_reason") for chunk in chunks for c in chunk["choices"])
    return ("complete" if ended else "truncated"), "[DONE] without a finish reason"
