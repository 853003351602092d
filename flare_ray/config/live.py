"""Settings of an engine that change while it serves: `user_config` of the deployment Engine."""

from __future__ import annotations

from pydantic import BaseModel, Field

from flare_ray.contracts.shapes import MAX_WIDTH


class LiveSettings(BaseModel, frozen=True, extra="forbid"):
    """What is in force until the next change; what is left out is as the engine's own settings say.

    Nothing is prepared anew and no request is interrupted, so these can only take back what was
    prepared, never add to it.
    """

    max_draft_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_WIDTH - 1,
        description="Most drafts that a round may offer; 0 = rounds of width one. At most what the "
        "engine serves; None = that.",
    )
    max_waiting: int | None = Field(
        None,
        ge=0,
        description="Requests that may wait for a slot; at most engine.admission.max_waiting, "
        "which also decides how many calls Serve hands over; None = that.",
    )
    max_waiting_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens, prompts and max_tokens, that may wait for a slot; None = "
        "engine.admission.max_waiting_tokens.",
    )
