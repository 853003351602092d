"""What the routes need besides an engine: names, limits, the family's chat text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from flare_ray.config import DeploymentConfig, EngineConfig, RoutingConfig
from flare_ray.errors import CheckpointError
from flare_ray.frontend.access import Access, Ledger
from flare_ray.frontend.access.keys import KeyRing
from flare_ray.frontend.tokenizer import TextCodec, TokenizerPool
from flare_ray.frontend.tracing import Tracing, open_tracing
from flare_ray.recipes.declaration import ChatFormat
from flare_ray.recipes.registry import find_recipe


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Settings of one HTTP replica.

    Attributes:
        model_name: what clients send as `model`.
        codec: tokeniser, template and token bytes of the served checkpoint.
        chat: the family's tags.
        max_body_bytes: a larger request body is answered 413.
        pool: threads on which the codec runs.
        access: who may ask.
        session_header: names a session; "" = none does.
        created_s: what /v1/models gives as `created`.
        tracing: makes spans of requests, or none.
        page: the browser page is served too.
    """

    model_name: str
    codec: TextCodec
    chat: ChatFormat
    max_body_bytes: int
    pool: TokenizerPool = field(default_factory=TokenizerPool)
    access: Access = field(default_factory=Access)
    session_header: str = RoutingConfig().session_header
    created_s: int = field(default_factory=lambda: int(time.time()))
    tracing: Tracing = field(default_factory=Tracing)
    page: bool = True


def load_settings(config: DeploymentConfig, *, ledger: Ledger | None = None) -> ApiSettings:
    """Settings of the routes; reads the checkpoint's tokeniser and template, and the API keys.

    Args:
        ledger: where rate limits are booked; None = in this process.
    Raises:
        ConfigError: the key file or the chat template of the settings cannot be used, or tracing
            lacks its packages.
        CheckpointError: they are missing or broken.
    """
    chat = chat_format(config.engine)
    path, routing = config.ingress.keys_file, config.ingress.routing
    keys = None if path is None else KeyRing(Path(path))
    return ApiSettings(
        model_name=config.model_name,
        codec=TextCodec(
            Path(config.engine.checkpoint), chat, chat_template=config.ingress.chat_template
        ),
        chat=chat,
        max_body_bytes=config.ingress.max_body_bytes,
        access=Access(keys, ledger=ledger),
        session_header=routing.session_header if routing.by == "prefix" else "",
        tracing=open_tracing(config.model_name) if config.ingress.tracing else Tracing(),
        page=config.ingress.page,
    )


def chat_format(config: EngineConfig) -> ChatFormat:
    """The chat format of the recipe that serves the checkpoint.

    Raises:
        CheckpointError: config.json is missing or no JSON.
        ConfigError: no recipe serves it.
    """
    file = Path(config.checkpoint) / "config.json"
    try:
        document = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{file} is not a readable config.json: {error}") from error
    return find_recipe(document, name=config.recipe).chat
