"""Request bodies of OpenAI's endpoints as closed models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from flare_ray.contracts.grammar import GrammarSpec
from flare_ray.contracts.plan import MAX_TOP_LOGPROBS
from flare_ray.contracts.request import SamplingParams
from flare_ray.errors import InvalidRequest
from flare_ray.frontend.closed import Closed, Described, validated
from flare_ray.frontend.openai.messages import Messages, Tools
from flare_ray.frontend.openai.parameters import drop_neutral
from flare_ray.frontend.openai.structured import ResponseFormat, StructuredOutputs, ToolChoice

MAX_CHOICES = 64
"""Generations that one request may ask for: prompts times `n`."""


class StreamOptions(Closed):
    """Only what is asked for by the value true has an effect (known fault H-05)."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class _GenerationBody(Closed):
    """Parameters that both endpoints share; null means the same as absence."""

    model: str
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[int] | None = None
    stop_token_sequences: list[list[int]] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    reproducible: bool | None = None
    prompt_logprobs: int | None = None
    return_token_sources: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=512)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [value]
        if value is not None and not isinstance(value, list):
            raise PydanticCustomError("stop_type", "Input should be a string or a list of strings")
        return value

    @model_validator(mode="after")
    def _prompt_logprobs_come_whole(self) -> _GenerationBody:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs and stream: true exclude each other, since chunks have no place "
                "for them; drop either",
                param="prompt_logprobs",
            )
        return self

    @model_validator(mode="after")
    def _options_belong_to_streams(self) -> _GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only allowed together with stream: true", param="stream_options"
            )
        return self

    def choices(self, prompts: int = 1) -> int:
        """Choices per prompt.

        Raises:
            InvalidRequest: less than one, or too many for `prompts` prompts.
        """
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_CHOICES // prompts:
            raise InvalidRequest(
                f"n must lie between 1 and {MAX_CHOICES // prompts} for {prompts} prompt(s), got "
                f"{n}",
                param="n",
            )
        return n

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_params(
        self,
        max_tokens: int | None,
        bad_words: tuple[tuple[int, ...], ...] = (),
        grammar: GrammarSpec | None = None,
    ) -> SamplingParams:
        """The sampling part, as written.

        Args:
            bad_words: the words of the same name as token sequences.
            grammar: what the fields of structured output come to.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            repetition_penalty=_given(self.repetition_penalty, 1.0),
            presence_penalty=_given(self.presence_penalty, 0.0),
            frequency_penalty=_given(self.frequency_penalty, 0.0),
            logit_bias=_bias(self.logit_bias or {}),
            min_tokens=self.min_tokens or 0,
            bad_words=bad_words,
            reproducible=self.reproducible,
            stop_token_sequences=tuple(map(tuple, self.stop_token_sequences or ())),
            prompt_logprobs=self.prompt_logprobs,
            grammar=grammar,
        )


class _PredictedPart(Closed):
    type: Literal["text"]
    text: str


class Prediction(Closed):
    """A predicted output: most of the answer is expected to repeat it."""

    type: Literal["content"]
    content: str | list[_PredictedPart]

    @property
    def text(self) -> str:
        """The whole of it."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(_GenerationBody):
    """POST /v1/chat/completions. Messages and tools are checked in `messages.py`."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def alternatives(self) -> int:
        """Alternatives reported with each token's log-probability; -1 = neither is.

        Raises:
            InvalidRequest: out of range, or asked for without `logprobs`.
        """
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequest(
                    "top_logprobs is only allowed together with logprobs: true",
                    param="top_logprobs",
                )
            return -1
        return _alternatives("top_logprobs", self.top_logprobs or 0)

    def output_budget(self) -> int | None:
        """`max_completion_tokens`, or its older spelling `max_tokens`.

        Raises:
            InvalidRequest: both are given and differ.
        """
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidRequest(
                f"max_tokens {old} and max_completion_tokens {new} differ; send one of them",
                param="max_completion_tokens",
            )
        return new if new is not None else old


_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Several = Annotated[list[_Text | _Ids], Field(min_length=1, max_length=MAX_CHOICES)]


class CompletionBody(_GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[Any, Described(_Text | _Ids | _Several)]
    logprobs: int | None = None
    echo: bool | None = None

    def alternatives(self) -> int:
        """As `ChatBody.alternatives`; here `logprobs` is their number.

        Raises:
            InvalidRequest: out of range.
        """
        return -1 if self.logprobs is None else _alternatives("logprobs", self.logprobs)

    def prompts(self) -> list[str | list[int]]:
        """One entry per choice: text, or token ids.

        Raises:
            InvalidRequest: the prompt is empty, or none of the four forms OpenAI defines.
        """
        prompt = self.prompt
        if isinstance(prompt, str) or _is_ids(prompt):
            prompts: list[Any] = [prompt]
        elif isinstance(prompt, list) and all(isinstance(p, str) or _is_ids(p) for p in prompt):
            prompts = list(prompt)
        else:
            raise InvalidRequest(
                "prompt: Input should be a string, a list of token ids, or a list of either",
                param="prompt",
            )
        if len(prompts) > MAX_CHOICES:
            raise InvalidRequest(
                f"prompt: at most {MAX_CHOICES} prompts in one request, got {len(prompts)}",
                param="prompt",
            )
        if not prompts or any(not p for p in prompts):
            raise InvalidRequest("prompt: must not be empty", param="prompt")
        return prompts


def _alternatives(param: str, value: int) -> int:
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"{param} must lie between 0 and {MAX_TOP_LOGPROBS}, got {value}", param=param
        )
    return value


def _given(value: float | None, neutral: float) -> float:
    return neutral if value is None else value


def _bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Token ids are the keys of a JSON object, hence strings."""
    pairs = {}
    for key, addend in bias.items():
        if not re.fullmatch(r"[0-9]{1,18}", key):
            raise InvalidRequest(
                f"logit_bias: keys are token ids, got {key[:60]!r}", param="logit_bias"
            )
        if int(key) in pairs:
            raise InvalidRequest(f"logit_bias: token {int(key)} twice", param="logit_bias")
        pairs[int(key)] = addend
    return tuple(pairs.items())


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )


Body = TypeVar("Body", bound=Closed)


def decode_json(data: bytes) -> dict[str, Any]:
    """A request body as an object. Strict JSON: no NaN, no lone surrogate, valid UTF-8.

    Raises:
        InvalidRequest: it is not.
    """
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"the request body is not valid JSON: {error}", code="invalid_json"
        ) from error
    except RecursionError as error:
        raise InvalidRequest(
            "the request body is nested too deeply", code="invalid_json"
        ) from error
    if not isinstance(body, dict):
        raise InvalidRequest(
            f"the request body must be a JSON object, got {type(body).__name__}",
            code="invalid_json",
        )
    return body


def parse_body(model: type[Body], body: Mapping[str, Any]) -> Body:
    """`body` as `model`.

    Raises:
        InvalidRequest: names each offending field by its path, the first one in `param`.
    """
    return validated(model, drop_neutral(body, model.model_fields))
