"""Mixed traffic for ``soak``, in which every request sent has exactly one known end.

    finished    the whole answer came
    refused     an error status, with the code the server gave
    cancelled   this client went away on purpose
    lost        anything else: a broken stream, no answer in time, an error inside a stream

An end that the request did not call for (a wrong request that was answered, a right one refused) is
`unexpected` as well.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from benchmarks.serving.client import StreamReader
from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.workload import CHAT_PATH, TEXT_PATH, Prompt

End = Literal["finished", "refused", "cancelled", "lost"]
REQUEST_LIMIT_S = 180.0
MAX_NOTED = 20
# A service that is gone refuses connections at once; it need not be asked a thousand times.
LOST_PAUSE_S = 0.5
OUTPUT_TOKENS = (4, 64)
# Of the context: several prefill chunks, and room for the answer.
LONG_PROMPT_RATIO = (0.3, 0.75)
ABANDONED_RATIO = 0.125
LONG_OUTPUT_TOKENS = 16
STOPS = ("the", ".", " a", "e", "\n")
DISCONNECT_CHUNKS = 6
DISCONNECT_WAIT_S = (0.02, 0.6)
LEVELS = (1, 2, 4, 8, 4, 2)
LEVEL_S = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended; `reason` says more: a finish reason, a code, or what went wrong."""

    end: End
    reason: str
    expected: bool = True


@dataclass(slots=True)
class Ledger:
    """Every request of the run, by what it was and how it ended."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    sent: int = 0
    unexpected: int = 0
    noted: list[str] = field(default_factory=list)

    def enter(self, name: str, outcome: Outcome) -> None:
        """Account for one request."""
        self.counts[name, outcome.end, outcome.reason] += 1
        if outcome.expected and outcome.end != "lost":
            return
        self.unexpected += not outcome.expected
        if len(self.noted) < MAX_NOTED:
            self.noted.append(f"{name}: {outcome.end}, {outcome.reason}")

    def total(self, end: End) -> int:
        """Requests with this end."""
        return sum(count for (_, what, _), count in self.counts.items() if what == end)

    @property
    def unaccounted(self) -> int:
        """Requests sent that have no end at all."""
        return self.sent - sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that must be refused."""

    name: str
    path: str
    body: bytes
    status: int


class Traffic:
    """Makes and sends requests; `run` returns when the time is over and every request has ended.

    Args:
        prompts: the held-out prompts by category.
        context_tokens: longest prompt plus output of the service.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        prompts: Mapping[str, Sequence[Prompt]],
        *,
        context_tokens: int,
        seed: int = 1,
    ) -> None:
        self.ledger = Ledger()
        self._base_url = base_url
        self._model = model
        self._context_tokens = context_tokens
        self._prompts = [prompt for rows in prompts.values() for prompt in rows]
        self._pool = [token for prompt in self._prompts for token in prompt.ids]
        self._random = random.Random(seed)
        self._refusals = refusals(model, context_tokens)
        kinds: list[tuple[str, int, Callable[[httpx.AsyncClient], Awaitable[Outcome]]]] = [
            ("stream", 30, self._stream),
            ("whole", 20, self._whole),
            ("stop", 12, self._stop),
            ("disconnect", 15, self._disconnect),
            ("disconnect_whole", 6, self._disconnect_whole),
            ("long_prompt", 4, self._long_prompt),
            ("several", 3, self._several),
            ("refused", 10, self._refused),
        ]
        self._names = [name for name, _, _ in kinds]
        self._weights = [weight for _, weight, _ in kinds]
        self._senders = {name: send for name, _, send in kinds}

    async def run(self, duration_s: float) -> None:
        """Send until the time is over; the number of open requests changes every `LEVEL_S`."""
        ends_s = time.monotonic() + duration_s
        started_s = time.monotonic()
        limits = httpx.Limits(max_connections=2 * max(LEVELS))
        async with httpx.AsyncClient(
            base_url=self._base_url, timeout=REQUEST_LIMIT_S, limits=limits, trust_env=False
        ) as client:

            async def work(place: int) -> None:
                while time.monotonic() < ends_s:
                    level = LEVELS[int((time.monotonic() - started_s) / LEVEL_S) % len(LEVELS)]
                    if place < level:
                        await self._one(client)
                    else:
                        await asyncio.sleep(0.2)

            await asyncio.gather(*(work(place) for place in range(max(LEVELS))))

    async def _one(self, client: httpx.AsyncClient) -> None:
        [name] = self._random.choices(self._names, self._weights)
        self.ledger.sent += 1
        try:
            outcome = await asyncio.wait_for(self._senders[name](client), REQUEST_LIMIT_S)
        except TimeoutError:
            outcome = Outcome("lost", f"no end within {REQUEST_LIMIT_S:.0f} s")
        except (httpx.HTTPError, BenchmarkFailure, KeyError, ValueError) as error:
            outcome = Outcome("lost", f"{type(error).__name__}: {str(error)[:200]}")
        self.ledger.enter(name, outcome)
        if outcome.end == "lost":
            await asyncio.sleep(LOST_PAUSE_S)

    def _request(self) -> tuple[str, dict[str, Any]]:
        prompt = self._random.choice(self._prompts)
        body = prompt.body(self._model, self._random.randint(*OUTPUT_TOKENS))
        return prompt.path, body | {"seed": self._random.getrandbits(32)}

    async def _stream(self, client: httpx.AsyncClient) -> Outcome:
        path, body = self._request()
        return await read_stream(client, path, body)

    async def _whole(self, client: httpx.AsyncClient) -> Outcome:
        path, body = self._request()
        return await read_whole(client, path, without_stream(body))

    async def _stop(self, client: httpx.AsyncClient) -> Outcome:
        """Raw text, so that what is visible is what the stop was matched on."""
        prompt = self._random.choice([p for p in self._prompts if p.messages is None])
        stops = self._random.sample(STOPS, 2)
        body = prompt.body(self._model, OUTPUT_TOKENS[1]) | {"stop": stops}
        answer = await client.post(prompt.path, json=without_stream(body))
        if answer.status_code != httpx.codes.OK:
            return refusal_of(answer)
        [choice] = answer.json()["choices"]
        shown = [stop for stop in stops if stop in choice["text"]]
        if shown:
            return Outcome("finished", "stop string shown", expected=False)
        return Outcome("finished", choice["finish_reason"])

    async def _disconnect(self, client: httpx.AsyncClient) -> Outcome:
        path, body = self._request()
        after = self._random.randint(0, DISCONNECT_CHUNKS)
        return await read_stream(client, path, body | {"ignore_eos": True}, leave_after=after)

    async def _disconnect_whole(self, client: httpx.AsyncClient) -> Outcome:
        path, body = self._request()
        body |= {"max_tokens": int(self._context_tokens * ABANDONED_RATIO), "ignore_eos": True}
        wait_s = self._random.uniform(*DISCONNECT_WAIT_S)
        try:
            async with asyncio.timeout(wait_s):
                return await read_whole(client, path, without_stream(body))
        except TimeoutError:
            return Outcome("cancelled", "left before the answer")

    async def _long_prompt(self, client: httpx.AsyncClient) -> Outcome:
        count = int(self._context_tokens * self._random.uniform(*LONG_PROMPT_RATIO))
        start = self._random.randrange(len(self._pool))
        ids = [self._pool[(start + i) % len(self._pool)] for i in range(count)]
        body = {"model": self._model, "prompt": ids, "max_tokens": LONG_OUTPUT_TOKENS}
        streaming = body | {"stream": True, "stream_options": {"include_usage": True}}
        return await read_stream(client, TEXT_PATH, streaming)

    async def _several(self, client: httpx.AsyncClient) -> Outcome:
        chosen = self._random.sample(self._prompts, 3)
        body = {"model": self._model, "prompt": [p.text for p in chosen], "max_tokens": 16}
        return await read_whole(client, TEXT_PATH, body, choices=len(chosen))

    async def _refused(self, client: httpx.AsyncClient) -> Outcome:
        wrong = self._random.choice(self._refusals)
        headers = {"content-type": "application/json"}
        answer = await client.post(wrong.path, content=wrong.body, headers=headers)
        outcome = refusal_of(answer)
        matches = answer.status_code == wrong.status
        return Outcome(outcome.end, f"{wrong.name}: {outcome.reason}", expected=matches)


async def read_stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], *, leave_after: int | None = None
) -> Outcome:
    """Read a stream to its end, or leave it after that many chunks with output."""
    reader = StreamReader()
    async with client.stream("POST", path, json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            await answer.aread()
            return refusal_of(answer)
        if leave_after == 0:
            return Outcome("cancelled", "left before the first chunk")
        async for line in answer.aiter_lines():
            reader.take(line)
            if leave_after is not None and reader.chunks >= leave_after:
                return Outcome("cancelled", "left within the stream")
    if not reader.done or reader.usage is None or not reader.finish_reason:
        return Outcome("lost", "the stream ended without usage, finish reason or [DONE]")
    return Outcome("finished", reader.finish_reason)


async def read_whole(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], *, choices: int = 1
) -> Outcome:
    """Read an answer in one piece."""
    answer = await client.post(path, json=body)
    if answer.status_code != httpx.codes.OK:
        return refusal_of(answer)
    document = answer.json()
    if len(document["choices"]) != choices or not document["usage"]["completion_tokens"]:
        return Outcome("lost", f"{len(document['choices'])} choices of {choices}")
    return Outcome("finished", document["choices"][0]["finish_reason"])


def refusal_of(answer: httpx.Response) -> Outcome:
    """An error answer; one that is not in the OpenAI shape is lost, not refused."""
    try:
        code = answer.json()["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return Outcome("lost", f"status {answer.status_code}: {answer.text[:200]!r}")
    return Outcome("refused", f"{answer.status_code} {code}", expected=False)


def without_stream(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request for an answer in one piece."""
    return {k: v for k, v in body.items() if k not in ("stream", "stream_options")}


def refusals(model: str, context_tokens: int) -> tuple[Refusal, ...]:
    """Wrong requests, each with the status it must get."""
    chat = {"model": model, "messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 4}

    def text(name: str, change: Mapping[str, Any], status: int = 400) -> Refusal:
        return Refusal(name, CHAT_PATH, json.dumps(chat | dict(change)).encode(), status)

    too_long = {"model": model, "prompt": [20] * (context_tokens + 1), "max_tokens": 4}
    return (
        text("negative temperature", {"temperature": -1}),
        text("top_p of nothing", {"top_p": 0}),
        text("temperature as text", {"temperature": "hot"}),
        text("empty stop", {"stop": [""]}),
        text("no messages", {"messages": []}),
        text("unknown role", {"messages": [{"role": "king", "content": "Hi!"}]}),
        text("unknown parameter", {"colour": "blue"}),
        text("unknown model", {"model": "another"}, 404),
        Refusal("malformed JSON", CHAT_PATH, b'{"model": ', 400),
        Refusal("prompt beyond the context", TEXT_PATH, json.dumps(too_long).encode(), 400),
    )
