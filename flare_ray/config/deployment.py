"""Configuration of a whole application: the `args:` of a Serve YAML (contract: A2)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator

from flare_ray.config.engine import EngineConfig

RESERVED_HEADERS = frozenset(
    {
        "accept",
        "anthropic-version",
        "authorization",
        "connection",
        "content-length",
        "content-type",
        "cookie",
        "host",
        "traceparent",
        "transfer-encoding",
        "user-agent",
        "x-api-key",
        "x-request-id",
    }
)
"""Headers that mean something else, in lower case."""


TEMPLATE_TAGS = ("{{", "{%", "{#")
"""What only a template holds; a path holds none of them."""


def is_inline_template(chat_template: str) -> bool:
    """Whether the setting is a template itself and not the path of one."""
    return any(tag in chat_template for tag in TEMPLATE_TAGS)


class EngineAutoscaling(BaseModel, frozen=True, extra="forbid"):
    """When engines are added and given up (`controller.fleet.scaling`)."""

    max_replicas: int = Field(
        ge=2, description="Most engines; the fewest are engine_deployment.replicas."
    )
    waiting_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens, prompts and max_tokens, that may wait per engine before one more "
        "starts; None = one whole context.",
    )
    page_usage: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of its pages that requests may hold or be promised on an engine before "
        "one more starts.",
    )
    upscale_delay_s: float = Field(
        30.0, ge=0, description="Seconds that more engines must be wanted before they start."
    )
    downscale_delay_s: float = Field(
        600.0, ge=0, description="Seconds that one less must be wanted before it is given up."
    )
    look_back_s: float = Field(
        30.0, gt=0, description="Seconds over which both measures are averaged."
    )


class EngineDeployment(BaseModel, frozen=True, extra="forbid"):
    """Replicas of the engine and how Ray treats them."""

    replicas: int = Field(
        1, ge=1, description="Engine replicas; with autoscaling, the fewest of them."
    )
    autoscaling: EngineAutoscaling | None = Field(
        None, description="Engines added and given up with the load; None = as many as replicas."
    )
    cpus_per_rank: float = Field(
        1.0, gt=0, description="Logical CPUs reserved per rank in the placement group."
    )
    gpus_per_rank: float | None = Field(
        None, ge=0, description="GPUs reserved per rank; None = 1 on cuda, 0 on cpu."
    )
    graceful_shutdown_s: float = Field(
        120.0, ge=0, description="Seconds that running requests get when the application stops."
    )
    health_period_s: float = Field(1.0, gt=0, description="Seconds between Serve health checks.")
    health_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Seconds without a finished round, while work is pending, that "
        "count as unhealthy.",
    )
    placement_timeout_s: float = Field(
        10.0, gt=0, description="Seconds to wait for CPUs or GPUs before start-up fails by name."
    )

    @property
    def most_replicas(self) -> int:
        """Engines that there may be at once."""
        return self.replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @model_validator(mode="after")
    def _consistent(self) -> EngineDeployment:
        if self.autoscaling is not None and self.autoscaling.max_replicas <= self.replicas:
            raise ValueError(
                f"autoscaling.max_replicas {self.autoscaling.max_replicas} does not exceed "
                f"replicas {self.replicas}: raise it, or leave autoscaling out"
            )
        return self


class RoutingConfig(BaseModel, frozen=True, extra="forbid"):
    """How HTTP replicas choose an engine (`controller.fleet.affinity`)."""

    by: Literal["prefix", "load"] = Field(
        "prefix",
        description="prefix = the engine that served the session or the prompt's beginning before; "
        "load = the less loaded of two.",
    )
    session_header: str = Field(
        "x-session-id",
        pattern="^[a-z0-9]+(-[a-z0-9]+)*$",
        max_length=64,
        description="Request header, in lower case, that names a session; its requests meet one "
        "engine whatever their prompts.",
    )
    home_pages: int = Field(
        4,
        ge=1,
        le=64,
        description="Pages of a new prompt, 64 tokens each, that decide where it goes. More tell "
        "conversations apart that begin alike.",
    )
    load_factor: float = Field(
        1.5,
        ge=1,
        description="Open requests over the mean of all engines at which an engine is passed over.",
    )
    spare_requests: int = Field(
        4, ge=0, description="Open requests up to which no engine is passed over."
    )
    known_prefixes: int = Field(
        16384,
        ge=1,
        le=1_000_000,
        description="Prefixes and sessions whose last engine an HTTP replica remembers.",
    )

    @model_validator(mode="after")
    def _meant(self) -> RoutingConfig:
        useless = sorted(self.model_fields_set - {"by"})
        if self.by == "load" and useless:
            raise ValueError(f"by: load uses no {', '.join(useless)}; leave them out or set prefix")
        if self.session_header in RESERVED_HEADERS:
            raise ValueError(
                f"session_header {self.session_header} has another meaning; take a header of its "
                "own, such as x-session-id"
            )
        return self


class IngressDeployment(BaseModel, frozen=True, extra="forbid"):
    """HTTP replicas: validation, templates, tokenisation, SSE."""

    min_replicas: int = Field(1, ge=1, description="HTTP replicas kept running.")
    max_replicas: int = Field(4, ge=1, description="HTTP replicas under load.")
    target_ongoing_requests: float = Field(
        64, gt=0, description="Open requests per replica that autoscaling aims at."
    )
    upscale_delay_s: float = Field(
        30.0, ge=0, description="Seconds that more HTTP replicas must be wanted before they start."
    )
    downscale_delay_s: float = Field(
        600.0, ge=0, description="Seconds that fewer must be wanted before one is given up."
    )
    routing: RoutingConfig = Field(
        default_factory=RoutingConfig, description="Which engine takes a request."
    )
    max_ongoing_requests: int = Field(
        400, ge=1, description="Open requests per replica before Serve queues."
    )
    cpus: float = Field(0.5, ge=0, description="Logical CPUs reserved per HTTP replica.")
    max_body_bytes: int = Field(
        8 * 1024 * 1024, ge=1024, description="Largest request body; above it 413."
    )
    keys_file: str | None = Field(
        None,
        min_length=1,
        description="YAML or JSON file of API keys and their limits, read again when it changes; "
        "None = whoever reaches the HTTP port may use it.",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="Jinja template instead of the checkpoint's own, for every API and /tokenize: "
        "the path of a file, or, where the value holds Jinja tags, the template itself. None = the "
        "checkpoint's.",
    )
    tracing: bool = Field(
        False,
        description="OpenTelemetry spans of requests, sent where the OTEL_* variables of the HTTP "
        "replicas say; needs the tracing extra.",
    )
    page: bool = Field(
        True, description="Serve a page with chat and status at /ui/; it asks the routes below it."
    )
    heartbeat_timeout_s: float = Field(
        10.0, gt=0, description="Seconds without an engine's heartbeat that end its requests."
    )

    @model_validator(mode="after")
    def _consistent(self) -> IngressDeployment:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} exceeds max_replicas {self.max_replicas}; "
                "change either"
            )
        return self


class DeploymentConfig(BaseModel, frozen=True, extra="forbid"):
    """The typed argument of `flare_ray.frontend.app:build`."""

    model_name: str = Field(description="Name clients send as `model` and /v1/models lists.")
    engine: EngineConfig = Field(description="The engine that every engine replica runs.")
    engine_deployment: EngineDeployment = Field(
        default_factory=EngineDeployment, description="Replicas and placement of engines."
    )
    ingress: IngressDeployment = Field(
        default_factory=IngressDeployment, description="HTTP replicas."
    )
    compat_metrics: bool = Field(
        True, description="Also export the vllm:spec_decode_* names that load tools read."
    )
