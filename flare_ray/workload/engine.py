"""An engine of this process as an endpoint: `submit()`, no HTTP and no Ray in the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.messages import Delta, Failed, Finished, StreamItem
from flare_ray.contracts.request import GenerationRequest, SamplingParams
from flare_ray.controller.sampling import resolve
from flare_ray.errors import FlareError
from flare_ray.frontend.detokenize import IncrementalDetokenizer
from flare_ray.frontend.parsers import ChatParser
from flare_ray.frontend.parsers.events import ContentText, ReasoningText, ToolCall
from flare_ray.metrics.export import render
from flare_ray.metrics.exposition import Exposition
from flare_ray.metrics.recorder import Snapshot
from flare_ray.workload.endpoints import EndpointError, Reply, Request
from flare_ray.workload.http import decoded
from flare_ray.workload.items import Answer, Call
from flare_ray.workload.tokens import Encoder

TIMEOUT_S = 600.0


class Engine(Protocol):
    """The part of `actors.core.EngineCore` that is used here."""

    @property
    def manifest(self) -> PreparedManifest:
        """What was prepared."""

    def submit(self, request: GenerationRequest, on_item: Callable[[StreamItem], None]) -> None:
        """Hand over a request whose items go to `on_item`, called by another thread."""

    def snapshot(self) -> Snapshot:
        """Its counters."""


class _Stream:
    """Items of one request with the time of each."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.trim_bytes = 0
        self.chunk_s: list[float] = []
        self.ended_s = 0.0
        self.end: Finished | Failed | None = None
        self.over = threading.Event()

    def note(self, item: StreamItem) -> None:
        """Runs on the engine's thread."""
        if isinstance(item, Delta):
            self.chunk_s.append(time.perf_counter())
            self.tokens += item.tokens
            self.trim_bytes = item.trim_bytes
        elif isinstance(item, Finished | Failed):
            self.ended_s = time.perf_counter()
            self.end = item
            self.over.set()


class EngineEndpoint:
    """An engine, and the tokeniser of its checkpoint.

    Args:
        name: distinguishes its request ids in logs.
    """

    in_process = True

    def __init__(self, engine: Engine, encoder: Encoder, *, name: str) -> None:
        self._engine, self._encoder, self._name = engine, encoder, name
        self._lock = threading.Lock()
        self._asked = 0

    def ask(self, request: Request) -> Reply:
        """See `Endpoint.ask`."""
        stream = _Stream()
        try:
            self._engine.submit(self._request(request), stream.note)
        except FlareError as error:
            raise EndpointError(f"refused: {error}") from error
        if not stream.over.wait(TIMEOUT_S):
            raise EndpointError(f"no end within {TIMEOUT_S:g} s")
        if not isinstance(stream.end, Finished):
            raise EndpointError(f"failed: {stream.end}")
        end = stream.end
        return Reply(
            answer=self._answer(request, stream),
            chunk_s=stream.chunk_s,
            ended_s=stream.ended_s,
            finish_reason=end.reason,
            prompt_tokens=end.prompt_tokens,
            completion_tokens=end.completion_tokens,
            cached_tokens=end.cached_tokens,
            offered=end.drafts_offered,
            accepted=end.drafts_accepted,
            copied=end.copies_offered,
            copied_accepted=end.copies_accepted,
            rounds=end.rounds,
        )

    def counters(self) -> Exposition | None:
        """See `Endpoint.counters`."""
        text = render([self._engine.snapshot()], model_name=self._name, compat=False)
        return Exposition.parse(text.decode())

    def _request(self, request: Request) -> GenerationRequest:
        item, manifest = request.item, self._engine.manifest
        settings = item.settings
        ids = request.ids or self._encoder.ids(item)
        temperature = settings.temperature if request.temperature is None else request.temperature
        resolved = resolve(
            SamplingParams(
                temperature=temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                seed=settings.seed,
                max_tokens=request.max_tokens,
                stop=settings.stop,
                ignore_eos=request.ignore_eos,
                reproducible=request.reproducible,
            ),
            manifest.sampling_defaults,
            vocab_size=manifest.vocab_size,
            prompt_tokens=len(ids),
            context_tokens=manifest.context_tokens,
        )
        predicted: tuple[int, ...] = ()
        if request.predict and item.prediction:
            predicted = tuple(self._encoder.codec.encode_plain(item.prediction))
        with self._lock:
            self._asked += 1
            number = self._asked
        return GenerationRequest(
            request_id=f"{self._name}-{number}-{item.item_id}",
            prompt_tokens=ids,
            sampling=resolved.sampling,
            max_tokens=resolved.max_tokens,
            stop=resolved.stop,
            ignore_eos=resolved.ignore_eos,
            cache_salt=request.cache_salt,
            prediction=predicted,
        )

    def _answer(self, request: Request, stream: _Stream) -> Answer:
        detokenizer = IncrementalDetokenizer(self._encoder.codec.token_bytes)
        text = detokenizer.push(tuple(stream.tokens), trim_bytes=stream.trim_bytes)
        text += detokenizer.finish()
        if not request.item.messages:
            return Answer(content=text)
        return parse_answer(self._encoder, text, request.item.tools)


def parse_answer(encoder: Encoder, text: str, tools: tuple[dict[str, Any], ...]) -> Answer:
    """Reasoning, content and calls of a generated text, as the server splits them."""
    schemas: Mapping[str, Any] | None = {
        tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
    } or None
    parser = ChatParser(
        encoder.chat, tools=schemas, inside_reasoning=encoder.chat.prompt_opens_reasoning
    )
    events = [*parser.feed(text), *parser.finish()]
    return Answer(
        content="".join(e.text for e in events if isinstance(e, ContentText)),
        reasoning="".join(e.text for e in events if isinstance(e, ReasoningText)),
        calls=tuple(Call(e.name, decoded(e.arguments)) for e in events if isinstance(e, ToolCall)),
    )
