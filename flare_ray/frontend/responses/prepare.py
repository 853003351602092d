"""What the route of this API calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flare_ray.frontend.client import EngineInfo
from flare_ray.frontend.openai.prepare import Prepared, check_model, prepare_chat
from flare_ray.frontend.responses.answer import ResponseAnswer
from flare_ray.frontend.responses.requests import RENAMED, chat_request, parse
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.translated import in_words_of


async def prepare_response(
    settings: ApiSettings, info: EngineInfo, body: Mapping[str, Any], *, unique_id: str
) -> tuple[Prepared, ResponseAnswer]:
    """A /v1/responses body.

    Raises:
        InvalidRequest: anything is wrong with it.
    """
    check_model(settings, body)
    parsed = parse(body)
    chat = chat_request(parsed)
    prepared = await in_words_of(RENAMED, prepare_chat(settings, info, chat, unique_id=unique_id))
    prepared = prepared.under(f"resp_{unique_id}")
    return prepared, ResponseAnswer(settings, prepared, parsed, info)
