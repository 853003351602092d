"""/tokenize and /detokenize, in the shapes that other servers of this field use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flare_ray.errors import InvalidRequest
from flare_ray.frontend.client import EngineInfo
from flare_ray.frontend.closed import Closed, validated
from flare_ray.frontend.openai.messages import Messages, Tools
from flare_ray.frontend.openai.prepare import check_served, prepare_chat
from flare_ray.frontend.openai.responses import encode
from flare_ray.frontend.openai.structured import ToolChoice
from flare_ray.frontend.settings import ApiSettings

UNBOUNDED_TOKENS = 2**40
"""Context with which a conversation is rendered only to be counted."""
CHAT_FIELDS = ("messages", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs")


class TokenizeBody(Closed):
    """POST /tokenize: `prompt`, or the fields of a chat request that reach its template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Closed):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of a prompt. `max_model_len` as other servers name the context length."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Text of the ids."""

    prompt: str


async def tokenize(settings: ApiSettings, info: EngineInfo, body: Mapping[str, Any]) -> bytes:
    """The answer to POST /tokenize.

    Raises:
        InvalidRequest: anything is wrong with the body.
    """
    parsed = _parse(TokenizeBody, settings, body)
    chat = {name: body[name] for name in CHAT_FIELDS if body.get(name) is not None}
    if (parsed.prompt is None) == (parsed.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    codec = settings.codec
    if parsed.prompt is not None:
        if chat:
            name = next(iter(chat))
            raise InvalidRequest(f"{name} belongs to messages, not to a prompt", param=name)
        text, special = parsed.prompt, parsed.add_special_tokens is not False
        tokens = await settings.pool.run(lambda: codec.encode_prompt(text, special=special))
    else:
        if parsed.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens: the chat template writes every special token itself; leave "
                "it out with messages",
                param="add_special_tokens",
                code="unsupported_parameter",
            )
        tokens = list(await chat_tokens(settings, info, chat))
    strings = codec.spellings(tokens) if parsed.return_token_strs else None
    return encode(
        TokenizeAnswer(
            count=len(tokens),
            max_model_len=info.context_tokens,
            tokens=tokens,
            token_strs=strings,
        )
    )


async def chat_tokens(
    settings: ApiSettings, info: EngineInfo, chat: Mapping[str, Any]
) -> tuple[int, ...]:
    """Prompt of a chat request, of whatever length.

    Args:
        chat: body of /v1/chat/completions without `model`.
    Raises:
        InvalidRequest: the conversation cannot be rendered.
    """
    roomy = msgspec.structs.replace(
        info, context_tokens=UNBOUNDED_TOKENS, max_prompt_tokens=UNBOUNDED_TOKENS
    )
    body = {**chat, "model": settings.model_name, "max_tokens": 1}
    prepared = await prepare_chat(settings, roomy, body, unique_id="count")
    return prepared.requests[0].prompt_tokens


async def detokenize(settings: ApiSettings, info: EngineInfo, body: Mapping[str, Any]) -> bytes:
    """The answer to POST /detokenize; special tokens are spelled out.

    Raises:
        InvalidRequest: anything is wrong with the body.
    """
    tokens = _parse(DetokenizeBody, settings, body).tokens
    for i, token in enumerate(tokens):
        if not 0 <= token < info.vocab_size:
            raise InvalidRequest(
                f"tokens[{i}]: token ids must lie in 0..{info.vocab_size - 1}, got {token}",
                param=f"tokens[{i}]",
            )
    text = await settings.pool.run(lambda: settings.codec.decode(tokens))
    return encode(DetokenizeAnswer(prompt=text))


def _parse(model: type[Any], settings: ApiSettings, body: Mapping[str, Any]) -> Any:
    parsed = validated(model, body)
    if parsed.model is not None:
        check_served(settings, parsed.model)
    return parsed
