"""What the routes need besides an engine: names, limits, the family's chat text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from flare_ray.frontend.tokenizer import TextCodec, TokenizerPool
from flare_ray.recipes.declaration import ChatFormat


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Settings of one HTTP replica.

    Attributes:
        model_name: what clients send as `model`.
        codec: tokeniser, template and token bytes of the served checkpoint.
        chat: the family's tags.
        max_body_bytes: a larger request body is answered 413.
        pool: threads on which the codec runs.
        created_s: what /v1/models gives as `created`.
    """

    model_name: str
    codec: TextCodec
    chat: ChatFormat
    max_body_bytes: int
    pool: TokenizerPool = field(default_factory=TokenizerPool)
    created_s: int = field(default_factory=lambda: int(time.time()))
