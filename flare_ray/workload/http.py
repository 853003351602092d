"""Any OpenAI-compatible server as an endpoint: streaming requests, connections kept open.

Tokens are the server's own usage count. Fields that only this project's server knows are sent where
they were asked for, so that strict peers are not met with them.
"""

from __future__ import annotations

import time
from typing import Any

import httpx
import msgspec

from flare_ray.metrics.exposition import Exposition
from flare_ray.workload.endpoints import EndpointError, Reply, Request
from flare_ray.workload.items import Answer, Call

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
TIMEOUT_S = 600.0
_DATA = "data: "
_DONE = "[DONE]"


class StreamReader:
    """Collects one stream's chunks.

    Attributes:
        usage: the server's token counts; None before they came.
        chunks: chunks with output so far.
        done: the stream's end was announced.
    """

    def __init__(self) -> None:
        self.usage: dict[str, Any] | None = None
        self.finish_reason = ""
        self.chunks = 0
        self.done = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[str]] = {}

    def take(self, line: str) -> bool:
        """Read one line of the stream; whether it carried output.

        Raises:
            EndpointError: it carried an error, or is no JSON.
        """
        if not line.startswith(_DATA):
            return False
        data = line.removeprefix(_DATA)
        if data == _DONE:
            self.done = True
            return False
        try:
            chunk = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise EndpointError(f"a stream's line is no JSON: {data[:100]!r}") from error
        if "error" in chunk:
            raise EndpointError(f"error inside a stream: {chunk['error']}")
        self.usage = chunk.get("usage") or self.usage
        has_output = False
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            has_output = self._add(choice) or has_output
        self.chunks += has_output
        return has_output

    def _add(self, choice: dict[str, Any]) -> bool:
        delta = choice.get("delta")
        if delta is None:
            self._content.append(choice.get("text") or "")
            return bool(choice.get("text"))
        content = delta.get("content")
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        self._content.append(content or "")
        self._reasoning.append(reasoning or "")
        calls = delta.get("tool_calls") or ()
        for call in calls:
            parts = self._calls.setdefault(call.get("index") or 0, ["", ""])
            function = call.get("function") or {}
            parts[0] += function.get("name") or ""
            parts[1] += function.get("arguments") or ""
        return bool(content or reasoning or calls)

    @property
    def answer(self) -> Answer:
        """Everything so far."""
        calls = [self._calls[index] for index in sorted(self._calls)]
        return Answer(
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            calls=tuple(Call(name, decoded(arguments)) for name, arguments in calls),
        )


def decoded(arguments: str) -> Any:
    """Arguments of a call as an object, or their text where they are none."""
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments


class HttpEndpoint:
    """A server at a base address.

    Args:
        base_url: with or without `/v1`.
        model: name to ask for; None = the first that the server lists.
        api_key: sent as a bearer token where given.
        settle_s: pause before counters are read: an engine behind several HTTP replicas reports
            them periodically.
    """

    in_process = False

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str = "",
        settle_s: float = 0.0,
    ) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        # One for all threads: making a client takes tens of milliseconds, which are not the
        # server's. It keeps connections as an SDK does, and never makes a request wait for one.
        self._client = httpx.Client(
            base_url=self._base_url,
            timeout=TIMEOUT_S,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=False,
        )
        self._settle_s = settle_s
        self._model = model or self._first_model()

    def ask(self, request: Request) -> Reply:
        """See `Endpoint.ask`."""
        reader, reply = StreamReader(), Reply()
        path = CHAT_PATH if request.item.messages else TEXT_PATH
        try:
            with self._client.stream("POST", path, json=self.body(request)) as answer:
                if answer.status_code != httpx.codes.OK:
                    text = answer.read().decode(errors="replace")
                    raise EndpointError(f"{path} answered {answer.status_code}: {text[:300]}")
                for line in answer.iter_lines():
                    if reader.take(line):
                        reply.chunk_s.append(time.perf_counter())
        except httpx.HTTPError as error:
            raise EndpointError(f"{path}: {type(error).__name__}: {error}") from error
        reply.ended_s = time.perf_counter()
        if not reader.done or reader.usage is None:
            raise EndpointError("a stream ended without usage or [DONE]")
        _note(reply, reader)
        return reply

    def body(self, request: Request) -> dict[str, Any]:
        """The JSON of a request."""
        item, settings = request.item, request.item.settings
        temperature = settings.temperature if request.temperature is None else request.temperature
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "seed": settings.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        given = {
            "temperature": temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "stop": list(settings.stop) or None,
            "reproducible": request.reproducible,
            "ignore_eos": request.ignore_eos or None,
            "cache_salt": request.cache_salt or None,
            "tools": list(item.tools) or None,
        }
        body |= {name: value for name, value in given.items() if value is not None}
        if item.messages:
            body["messages"] = list(item.messages)
            if request.predict and item.prediction:
                body["prediction"] = {"type": "content", "content": item.prediction}
        else:
            body["prompt"] = item.prompt or list(request.ids)
        return body

    def counters(self) -> Exposition | None:
        """See `Endpoint.counters`; None where /metrics is missing or no Prometheus text."""
        time.sleep(self._settle_s)
        answer = self._client.get("/metrics")
        if answer.status_code != httpx.codes.OK:
            return None
        try:
            return Exposition.parse(answer.text)
        except ValueError:
            return None

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def _first_model(self) -> str:
        try:
            listed = self._client.get("/v1/models").raise_for_status().json()["data"]
            return str(listed[0]["id"])
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise EndpointError(
                f"{self._base_url}/v1/models named no model ({error}): give one"
            ) from error


def _note(reply: Reply, reader: StreamReader) -> None:
    usage = reader.usage or {}
    prompt = usage.get("prompt_tokens_details") or {}
    completion = usage.get("completion_tokens_details") or {}
    reply.answer, reply.finish_reason = reader.answer, reader.finish_reason
    reply.prompt_tokens = usage.get("prompt_tokens", 0)
    reply.completion_tokens = usage.get("completion_tokens", 0)
    reply.cached_tokens = prompt.get("cached_tokens") or 0
    accepted = completion.get("accepted_prediction_tokens")
    if accepted is not None:
        reply.accepted = accepted
        reply.offered = accepted + (completion.get("rejected_prediction_tokens") or 0)
