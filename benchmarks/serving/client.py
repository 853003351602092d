"""Streaming clients: one keeps one request open at all times, and times what it sees.

Tokens are the service's own usage count; a stream that breaks, ends without it, or whose prompt
was not the expected one fails the run.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.workload import Prompt
from flare_ray.workload import http as streams
from flare_ray.workload.endpoints import EndpointError

REQUEST_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Observation:
    """One finished stream.

    Attributes:
        first_s: request to the first chunk with output.
        total_s: request to the last byte.
        chunks: chunks with output.
    """

    prompt: Prompt
    completion_tokens: int
    finish_reason: str
    first_s: float
    total_s: float
    chunks: int


@dataclass(frozen=True, slots=True)
class Pass:
    """The workload once through.

    Attributes:
        lanes: streams kept open.
        wall_s: first request to last byte.
    """

    lanes: int
    observations: tuple[Observation, ...]
    wall_s: float

    @property
    def tokens(self) -> int:
        """Completion tokens of all streams."""
        return sum(one.completion_tokens for one in self.observations)


class StreamReader(streams.StreamReader):
    """Collects one stream's chunks; what breaks it fails the run."""

    def take(self, line: str) -> bool:
        """Read one line of the stream; whether it carried output.

        Raises:
            BenchmarkFailure: it carried an error.
        """
        try:
            return super().take(line)
        except EndpointError as error:
            raise BenchmarkFailure(str(error)) from error


def stream(client: httpx.Client, prompt: Prompt, *, path: str, body: dict[str, Any]) -> Observation:
    """Send one streaming request and read it to its end.

    Raises:
        BenchmarkFailure: anything but a whole stream over the expected prompt.
    """
    reader, first_s = StreamReader(), 0.0
    started_s = time.perf_counter()
    with client.stream("POST", path, json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            text = answer.read().decode(errors="replace")
            raise BenchmarkFailure(f"{path} answered {answer.status_code}: {text[:300]}")
        for line in answer.iter_lines():
            if reader.take(line) and not first_s:
                first_s = time.perf_counter() - started_s
    total_s = time.perf_counter() - started_s
    if not reader.done or reader.usage is None:
        raise BenchmarkFailure(f"a stream of {prompt.category} ended without usage or [DONE]")
    if reader.usage["prompt_tokens"] != len(prompt.ids):
        raise BenchmarkFailure(
            f"prompt {prompt.place} of {prompt.category} has {len(prompt.ids)} tokens, the service "
            f"made {reader.usage['prompt_tokens']} of it: template and prompt file disagree"
        )
    return Observation(
        prompt=prompt,
        completion_tokens=reader.usage["completion_tokens"],
        finish_reason=reader.finish_reason,
        first_s=first_s or total_s,  # an answer without visible output: its end is what comes first
        total_s=total_s,
        chunks=reader.chunks,
    )


def open_client(base_url: str) -> httpx.Client:
    """A client that keeps its connection, as an SDK does, and ignores proxies of the shell."""
    return httpx.Client(base_url=base_url, timeout=REQUEST_LIMIT_S, trust_env=False)


def run_pass(
    base_url: str,
    prompts: Sequence[Prompt],
    *,
    lanes: int,
    body_of: Callable[[Prompt], dict[str, Any]],
    on_drained: Callable[[], None] | None = None,
) -> Pass:
    """All prompts once, `lanes` of them at any time; the next begins where one has ended.

    Args:
        body_of: request of a prompt.
        on_drained: called once, by the first client that finds no prompt left; until then every
            client was busy.
    """
    waiting: queue.SimpleQueue[Prompt] = queue.SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)
    drained = threading.Lock()

    def work() -> list[Observation]:
        done: list[Observation] = []
        with open_client(base_url) as client:
            while True:
                try:
                    prompt = waiting.get_nowait()
                except queue.Empty:
                    if on_drained is not None and drained.acquire(blocking=False):
                        on_drained()
                    return done
                done.append(stream(client, prompt, path=prompt.path, body=body_of(prompt)))

    started_s = time.perf_counter()
    with ThreadPoolExecutor(lanes) as pool:
        futures = [pool.submit(work) for _ in range(lanes)]
        try:
            observations = [one for future in futures for one in future.result()]
        except BaseException:
            _empty(waiting)  # the other lanes end with the request they have
            raise
    return Pass(lanes, tuple(observations), time.perf_counter() - started_s)


def _empty(waiting: queue.SimpleQueue[Prompt]) -> None:
    while True:
        try:
            waiting.get_nowait()
        except queue.Empty:
            return
