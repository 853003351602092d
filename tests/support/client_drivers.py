"""Client libraries under one interface: what is asked, and what came back.

A driver turns a `Question` into a call of its library as its users write it, and the library's own
objects into a `Reply`. `Http` is the reference: plain requests without a library. Libraries are
imported when a driver is made; one that is absent raises `ImportError`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

WEATHER = {
    "name": "get_weather",
    "description": "Current weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
        "required": ["city"],
    },
}
CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
LONG_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 400}},
    "required": ["numbers"],
    "additionalProperties": False,
}
"""An answer of some thousand tokens."""
RESULT = '{"temperature": 22, "conditions": "sunny"}'
ENDLESS = "Count and never stop."
LIMIT_S = 60.0


@dataclass(frozen=True)
class Call:
    """A tool call; `arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Question:
    """What is asked: one user turn, maybe the calls that answered it, with the same result each."""

    user: str
    model: str
    max_tokens: int = 150
    temperature: float = 0.0
    tools: bool = False
    calls: tuple[Call, ...] = ()
    schema: Mapping[str, Any] | None = None
    scored: bool = False


@dataclass(frozen=True)
class Reply:
    """What a library made of the answer.

    Attributes:
        finish: stop, length or calls.
        scores: log-probability of each token told.
        pieces: chunks or events of a stream.
        tokens: of prompt and answer, as told; None in a stream.
    """

    text: str
    finish: str
    calls: tuple[Call, ...] = ()
    scores: tuple[float, ...] = ()
    pieces: int = 1
    tokens: tuple[int, int] | None = None


class Refused(Exception):
    """The library raised its error for a status. Attributes: status, and the server's words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Driver(Protocol):
    """A client library. Class attribute `lacks`: part of the suite -> why its API has none."""

    lacks: Mapping[str, str]

    def ask(self, question: Question, *, stream: bool) -> Reply:
        """Raises Refused."""

    def leave(self, question: Question, while_open: Callable[[], None]) -> None:
        """Stream, call `while_open` at the first piece, and go."""


def chat_fields(question: Question) -> dict[str, Any]:
    """The question as fields of /v1/chat/completions."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.user}]
    if question.calls:
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in question.calls
        ]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in question.calls
        ]
    fields: dict[str, Any] = {
        "model": question.model,
        "messages": messages,
        "max_tokens": question.max_tokens,
        "temperature": question.temperature,
    }
    if question.tools:
        fields["tools"] = [{"type": "function", "function": WEATHER}]
    if question.schema is not None:
        named = {"name": "answer", "schema": question.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    if question.scored:
        fields |= {"logprobs": True, "top_logprobs": 1}
    return fields


def chat_reply(choice: Mapping[str, Any], **more: Any) -> Reply:
    """A choice of /v1/chat/completions, as JSON."""
    message = choice["message"]
    finish = choice["finish_reason"]
    return Reply(
        text=message.get("content") or "",
        finish="calls" if finish == "tool_calls" else finish,
        calls=tuple(
            Call(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ),
        scores=scores_of(choice.get("logprobs")),
        **more,
    )


def scores_of(logprobs: Mapping[str, Any] | None) -> tuple[float, ...]:
    """Of a chat's log-probabilities, each of which is its own best alternative."""
    return _checked((logprobs or {}).get("content") or ())


def _checked(entries: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    for entry in entries:
        (best,) = entry["top_logprobs"]
        assert best["logprob"] >= entry["logprob"]
    return tuple(entry["logprob"] for entry in entries)


class Http:
    """No library: what the server says."""

    lacks: Mapping[str, str] = {}

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=LIMIT_S)

    def ask(self, question: Question, *, stream: bool = False) -> Reply:
        assert not stream
        found = self._http.post("/v1/chat/completions", json=chat_fields(question))
        if found.status_code != 200:
            raise Refused(found.status_code, found.json()["error"]["message"])
        body = found.json()
        usage = body["usage"]
        tokens = (usage["prompt_tokens"], usage["completion_tokens"])
        return chat_reply(body["choices"][0], tokens=tokens)

    def close(self) -> None:
        self._http.close()


class OpenAiChat:
    """The openai package: chat completions."""

    lacks: Mapping[str, str] = {}

    def __init__(self, url: str) -> None:
        import openai

        self._errors, self._cut = openai.APIStatusError, openai.LengthFinishReasonError
        self._sdk = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
        )

    def ask(self, question: Question, *, stream: bool) -> Reply:
        fields, chat = chat_fields(question), self._sdk.chat.completions
        try:
            if not stream:
                found = chat.create(**fields)
                tokens = (found.usage.prompt_tokens, found.usage.completion_tokens)
                return chat_reply(found.choices[0].model_dump(), tokens=tokens)
            pieces = 0
            with chat.stream(**fields) as events:
                try:
                    for event in events:
                        pieces += event.type == "chunk"
                    final = events.get_final_completion()
                except self._cut as cut:  # the package's word for an answer cut at its limit
                    final = cut.completion
            return chat_reply(final.choices[0].model_dump(), pieces=pieces)
        except self._errors as error:
            raise Refused(error.status_code, error.message) from error

    def leave(self, question: Question, while_open: Callable[[], None]) -> None:
        with self._sdk.chat.completions.create(**chat_fields(question), stream=True) as stream:
            next(iter(stream))
            while_open()

    def close(self) -> None:
        self._sdk.close()


class OpenAiResponses(OpenAiChat):
    """The openai package: responses. Log-probabilities are those of the message alone."""

    def ask(self, question: Question, *, stream: bool) -> Reply:
        fields = self._fields(question)
        try:
            if not stream:
                return self._reply(self._sdk.responses.create(**fields))
            with self._sdk.responses.stream(**fields) as events:
                told = list(events)
            # `get_final_response` knows complete ones alone.
            assert told[-1].type in ("response.completed", "response.incomplete")
            return self._reply(told[-1].response, pieces=len(told))
        except self._errors as error:
            raise Refused(error.status_code, error.message) from error

    def leave(self, question: Question, while_open: Callable[[], None]) -> None:
        with self._sdk.responses.create(**self._fields(question), stream=True) as stream:
            for event in stream:
                if event.type.endswith(".delta"):
                    break
            while_open()

    def _fields(self, question: Question) -> dict[str, Any]:
        items: list[dict[str, Any]] = [{"role": "user", "content": question.user}]
        for call in question.calls:
            told = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
            items.append({"type": "function_call", **told})
        items += [
            {"type": "function_call_output", "call_id": call.id, "output": RESULT}
            for call in question.calls
        ]
        fields: dict[str, Any] = {
            "model": question.model,
            "input": items,
            "max_output_tokens": question.max_tokens,
            "temperature": question.temperature,
        }
        if question.tools:
            fields["tools"] = [{"type": "function", "strict": None, **WEATHER}]
        if question.schema is not None:
            named = {"type": "json_schema", "name": "answer", "schema": question.schema}
            fields["text"] = {"format": named}
        if question.scored:
            fields |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        return fields

    def _reply(self, found: Any, pieces: int = 1) -> Reply:
        calls = [item for item in found.output if item.type == "function_call"]
        parts = [p for item in found.output if item.type == "message" for p in item.content]
        entries = [e.model_dump() for part in parts for e in part.logprobs or ()]
        finish = "length" if found.status == "incomplete" else "calls" if calls else "stop"
        return Reply(
            text=found.output_text,
            finish=finish,
            calls=tuple(Call(call.call_id, call.name, call.arguments) for call in calls),
            scores=_checked(entries),
            pieces=pieces,
            tokens=(found.usage.input_tokens, found.usage.output_tokens) if pieces == 1 else None,
        )


class Anthropic:
    """The anthropic package."""

    lacks: Mapping[str, str] = {"scores": "the Messages API has no log-probabilities"}
    FINISH: Mapping[str, str] = {"end_turn": "stop", "max_tokens": "length", "tool_use": "calls"}

    def __init__(self, url: str) -> None:
        import anthropic

        self._errors = anthropic.APIStatusError
        self._sdk = anthropic.Anthropic(
            base_url=url, api_key="none", max_retries=0, timeout=LIMIT_S
        )

    def ask(self, question: Question, *, stream: bool) -> Reply:
        fields = self._fields(question)
        try:
            if not stream:
                return self._reply(self._sdk.messages.create(**fields))
            with self._sdk.messages.stream(**fields) as events:
                pieces = sum(1 for _ in events)
                return self._reply(events.get_final_message(), pieces=pieces)
        except self._errors as error:
            raise Refused(error.status_code, error.message) from error

    def leave(self, question: Question, while_open: Callable[[], None]) -> None:
        with self._sdk.messages.stream(**self._fields(question)) as stream:
            next(iter(stream.text_stream))
            while_open()

    def close(self) -> None:
        self._sdk.close()

    def _fields(self, question: Question) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": question.user}]
        if question.calls:
            uses = [
                {"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)}
                for c in question.calls
            ]
            results = [
                {"type": "tool_result", "tool_use_id": c.id, "content": RESULT}
                for c in question.calls
            ]
            messages.append({"role": "assistant", "content": uses})
            messages.append({"role": "user", "content": results})
        fields: dict[str, Any] = {
            "model": question.model,
            "messages": messages,
            "max_tokens": question.max_tokens,
            # The package's newest version has no argument for it; the API of this server has.
            "extra_body": {"temperature": question.temperature},
        }
        if question.tools:
            schema = {"input_schema": WEATHER["parameters"]}
            described = {key: WEATHER[key] for key in ("name", "description")}
            fields["tools"] = [described | schema]
        if question.schema is not None:
            named = {"type": "json_schema", "schema": question.schema}
            fields["output_config"] = {"format": named}
        return fields

    def _reply(self, found: Any, pieces: int = 1) -> Reply:
        uses = [block for block in found.content if block.type == "tool_use"]
        text = "".join(block.text for block in found.content if block.type == "text")
        return Reply(
            text=text,
            finish=self.FINISH[found.stop_reason],
            calls=tuple(Call(use.id, use.name, json.dumps(use.input)) for use in uses),
            pieces=pieces,
            tokens=self._tokens(found.usage) if pieces == 1 else None,
        )

    @staticmethod
    def _tokens(usage: Any) -> tuple[int, int]:
        """In this API tokens from the cache are no input."""
        return (usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens)


class LiteLlm:
    """litellm, as an OpenAI-compatible provider."""

    lacks: Mapping[str, str] = {}

    def __init__(self, url: str) -> None:
        import litellm
        import openai

        self._library, self._errors = litellm, openai.APIStatusError
        self._common = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}

    def ask(self, question: Question, *, stream: bool) -> Reply:
        try:
            found = self._complete(question, stream=stream)
            if not stream:
                tokens = (found.usage.prompt_tokens, found.usage.completion_tokens)
                return chat_reply(found.choices[0].model_dump(), tokens=tokens)
            chunks = list(found)
            whole = self._library.stream_chunk_builder(chunks).choices[0].model_dump()
            # The builder drops them.
            told = [chunk.choices[0].model_dump().get("logprobs") for chunk in chunks]
            entries = [entry for some in told for entry in (some or {}).get("content") or ()]
            whole["logprobs"] = {"content": entries}
            return chat_reply(whole, pieces=len(chunks))
        except self._errors as error:
            raise Refused(error.status_code, str(error)) from error

    def leave(self, question: Question, while_open: Callable[[], None]) -> None:
        stream = self._complete(question, stream=True)
        next(iter(stream))
        while_open()
        stream.completion_stream.response.close()

    def close(self) -> None:
        """Nothing is held."""

    def _complete(self, question: Question, *, stream: bool) -> Any:
        fields = chat_fields(question)
        fields["model"] = f"openai/{fields['model']}"
        return self._library.completion(**self._common, **fields, stream=stream, timeout=LIMIT_S)


class LangChain:
    """langchain-openai."""

    lacks: Mapping[str, str] = {}

    def __init__(self, url: str) -> None:
        import langchain_openai
        import openai
        from langchain_core import messages

        self._url, self._chat, self._messages = url, langchain_openai.ChatOpenAI, messages
        self._errors = openai.APIStatusError

    def ask(self, question: Question, *, stream: bool) -> Reply:
        chain, messages = self._chain(question), self._turns(question)
        try:
            if not stream:
                return self._reply(chain.invoke(messages))
            whole, pieces = None, 0
            for chunk in chain.stream(messages):
                whole, pieces = chunk if whole is None else whole + chunk, pieces + 1
            return self._reply(whole, pieces=pieces)
        except self._errors as error:
            raise Refused(error.status_code, error.message) from error

    def leave(self, question: Question, while_open: Callable[[], None]) -> None:
        stream = self._chain(question).stream(self._turns(question))
        next(stream)
        while_open()
        stream.close()

    def close(self) -> None:
        """Nothing is held."""

    def _chain(self, question: Question) -> Any:
        chain = self._chat(
            model=question.model,
            base_url=f"{self._url}/v1",
            api_key="none",
            max_retries=0,
            timeout=LIMIT_S,
            max_tokens=question.max_tokens,
            temperature=question.temperature,
        )
        if question.scored:
            chain = chain.bind(logprobs=True, top_logprobs=1)
        if question.tools:
            return chain.bind_tools([{"type": "function", "function": WEATHER}])
        if question.schema is not None:
            return chain.bind(response_format=chat_fields(question)["response_format"])
        return chain

    def _turns(self, question: Question) -> list[Any]:
        turns = [self._messages.HumanMessage(question.user)]
        if question.calls:
            calls = [
                {"id": c.id, "name": c.name, "args": json.loads(c.arguments)}
                for c in question.calls
            ]
            turns.append(self._messages.AIMessage("", tool_calls=calls))
            turns += [self._messages.ToolMessage(RESULT, tool_call_id=c.id) for c in question.calls]
        return turns

    def _reply(self, found: Any, pieces: int = 1) -> Reply:
        told = found.response_metadata
        usage = found.usage_metadata
        finish = told["finish_reason"]
        return Reply(
            text=found.content,
            finish="calls" if finish == "tool_calls" else finish,
            calls=tuple(
                Call(call["id"], call["name"], json.dumps(call["args"]))
                for call in found.tool_calls
            ),
            scores=scores_of(told.get("logprobs")),
            pieces=pieces,
            tokens=(usage["input_tokens"], usage["output_tokens"]) if pieces == 1 else None,
        )
