"""What the routes of this API call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from flare_ray.errors import InvalidRequest
from flare_ray.frontend.anthropic.answer import MessageAnswer
from flare_ray.frontend.anthropic.errors import VERSION_HEADER
from flare_ray.frontend.anthropic.records import TokensCount
from flare_ray.frontend.anthropic.requests import (
    RENAMED,
    CountBody,
    MessagesBody,
    chat_prompt,
    chat_request,
    parse,
)
from flare_ray.frontend.client import EngineInfo
from flare_ray.frontend.openai.prepare import Prepared, check_model, prepare_chat
from flare_ray.frontend.openai.responses import encode
from flare_ray.frontend.openai.tokens import chat_tokens
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.translated import in_words_of

VERSIONS = ("2023-06-01", "2026-10-21")
"""They differ in what they refuse. The later one knows no sampling parameters; here they work in
both."""


def check_version(request: Request) -> None:
    """Refuse a version of the API that is unknown here; no header is no objection.

    Raises:
        InvalidRequest: another version.
    """
    given = request.headers.get(VERSION_HEADER)
    if given is not None and given not in VERSIONS:
        raise InvalidRequest(
            f"{VERSION_HEADER}: this server speaks {' and '.join(VERSIONS)}, got {given[:60]!r}",
            param=VERSION_HEADER,
        )


async def prepare_message(
    settings: ApiSettings, info: EngineInfo, body: Mapping[str, Any], *, unique_id: str
) -> tuple[Prepared, MessageAnswer]:
    """A /v1/messages body.

    Raises:
        InvalidRequest: anything is wrong with it.
    """
    check_model(settings, body)
    parsed = parse(MessagesBody, body)
    chat = chat_request(settings, parsed)
    prepared = await in_words_of(RENAMED, prepare_chat(settings, info, chat, unique_id=unique_id))
    prepared = prepared.under(f"msg_{unique_id}")
    return prepared, MessageAnswer(settings, prepared, show_thinking=parsed.shows_thinking)


async def count_tokens(settings: ApiSettings, info: EngineInfo, body: Mapping[str, Any]) -> bytes:
    """The answer to /v1/messages/count_tokens.

    Raises:
        InvalidRequest: anything is wrong with the body.
    """
    check_model(settings, body)
    chat = chat_prompt(settings, parse(CountBody, body))
    tokens = await in_words_of(RENAMED, chat_tokens(settings, info, chat))
    return encode(TokensCount(len(tokens)))
