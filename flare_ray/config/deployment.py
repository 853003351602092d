"""Configuration of a whole application: the `args:` of a Serve YAML (contract: A2)."""

from __future__ import annotations

from pydantic import BaseModel, Field, model_validator

from flare_ray.config.engine import EngineConfig


class EngineDeployment(BaseModel, frozen=True, extra="forbid"):
    """Replicas of the engine and how Ray treats them."""

    replicas: int = Field(1, ge=1, description="Engine replicas; each owns its ranks.")
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


class IngressDeployment(BaseModel, frozen=True, extra="forbid"):
    """HTTP replicas: validation, templates, tokenisation, SSE."""

    min_replicas: int = Field(1, ge=1, description="HTTP replicas kept running.")
    max_replicas: int = Field(4, ge=1, description="HTTP replicas under load.")
    target_ongoing_requests: float = Field(
        64, gt=0, description="Open requests per replica that autoscaling aims at."
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
    tracing: bool = Field(
        False,
        description="OpenTelemetry spans of requests, sent where the OTEL_* variables of the HTTP "
        "replicas say; needs the tracing extra.",
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
