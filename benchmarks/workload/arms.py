"""The arms as engines of this process: the same checkpoint, one setting apart (contract: B2).

Every arm has its own engine, prefix cache, history and policy; idle engines sleep. An arm whose
engine refuses to start by name is kept with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.results import ROOT
from flare_ray.errors import ConfigError
from flare_ray.workload.engine import EngineEndpoint
from flare_ray.workload.records import ArmStart
from flare_ray.workload.runner import Arm
from flare_ray.workload.tokens import Encoder

CHECKPOINT = ROOT / "deployments" / "demo" / "glm"
DRAFTS = 5
OFF, ADAPTIVE, COPIES, HISTORY = "off", "adaptive", "adaptive-copies", "adaptive-history"
FIXED = tuple(f"fixed-{drafts}" for drafts in range(DRAFTS + 1))
ARMS = (OFF, *FIXED, ADAPTIVE, COPIES, HISTORY)
"""Of the frozen workload's run."""
REQUEST, TEXT, ALONE = "adaptive-request", "adaptive-text", "copies-only"
COPYING: dict[str, dict[str, Any]] = {
    HISTORY: {"history_drafts": True},
    REQUEST: {"request_drafts": True},
    TEXT: {"history_drafts": True, "request_drafts": True},
    ALONE: {"history_drafts": True, "request_drafts": True, "learned_drafts": False},
}
"""Arms that copy from shared history, from their own text, from both, and those copies without any
other draft."""
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "concurrency": 4,
    "context_tokens": 4096,
    "prefill_tokens": 512,
    "threads_per_rank": 1,
}
"""As `deployments/glm-demo.yaml` has it."""


def speculation_of(name: str) -> dict[str, Any]:
    """Speculation settings of an arm.

    Raises:
        ConfigError: no arm has this name.
    """
    if name == OFF:
        return {"families": "ordinary"}
    if name in FIXED:
        width = int(name.partition("-")[2]) + 1
        return {"draft_tokens": DRAFTS, "policy": "fixed", "fixed_width": width}
    if name in (ADAPTIVE, COPIES):
        return {"draft_tokens": DRAFTS, "policy": "adaptive"}
    if name in COPYING:
        return {"draft_tokens": DRAFTS, "policy": "adaptive", **COPYING[name]}
    raise ConfigError(f"no arm {name!r}; known: {', '.join(dict.fromkeys((*ARMS, *COPYING)))}")


def engine_settings(name: str, checkpoint: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """Everything that the arm's engine is started with."""
    return {**engine, "checkpoint": str(checkpoint), "speculation": speculation_of(name)}


@dataclass(frozen=True, slots=True)
class Started:
    """Arms that run, and those that refused to."""

    arms: tuple[Arm, ...]
    refused: tuple[ArmStart, ...]


@contextmanager
def started(
    names: Sequence[str], checkpoint: Path, *, engine: dict[str, Any] = ENGINE
) -> Iterator[Started]:
    """Start an engine for each arm; all end with the context."""
    from flare_ray.actors.inprocess import start_inprocess
    from flare_ray.actors.openmp import wait_passively
    from flare_ray.config import EngineConfig

    wait_passively()
    encoder = Encoder(checkpoint)
    arms: list[Arm] = []
    refused: list[ArmStart] = []
    with ExitStack() as engines:
        for name in names:
            settings = engine_settings(name, checkpoint, engine)
            described = f"in process, speculation {settings['speculation']}"
            try:
                core = start_inprocess(EngineConfig.model_validate(settings))
            except ConfigError as error:
                refused.append(ArmStart(arm=name, described=described, refused=str(error)))
                continue
            engines.callback(core.shutdown, 0.0)
            endpoint = EngineEndpoint(core, encoder, name=name)
            arms.append(Arm(name, endpoint, described, predicts=name == COPIES))
        yield Started(tuple(arms), tuple(refused))
