"""Serve's hook for the number of engines; the decision is `controller.fleet.scaling`.

Serve calls the policy ten times a second in its controller, with what every running engine's
`record_autoscaling_stats` said, averaged over `look_back_s`; it applies delays and bounds itself.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from flare_ray.config import DeploymentConfig
from flare_ray.controller.fleet.scaling import FleetLoad, ScalingTargets, wanted_engines
from flare_ray.controller.loop import ControllerStats

WAITING_TOKENS = "waiting_tokens"
PAGE_USAGE = "page_usage"
RUNNING = "running_requests"


def engine_stats(stats: ControllerStats) -> dict[str, float]:
    """What one engine reports to the policy."""
    used = stats.total_pages - stats.free_pages
    return {
        WAITING_TOKENS: float(stats.waiting_tokens),
        PAGE_USAGE: used / max(stats.total_pages, 1),
        RUNNING: float(stats.running),
    }


class EngineScaling:
    """The policy; arguments are those of `ScalingTargets`, since Serve carries them as JSON."""

    def __init__(self, *, waiting_tokens: float, page_usage: float, slots: int) -> None:
        self._targets = ScalingTargets(waiting_tokens, page_usage, slots)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Engines wanted, and no state: while some start or stop, or have not reported yet, those
        there are to be."""
        target = int(context.target_num_replicas)
        stats = context.aggregated_metrics or {}
        told = [stats.get(name, {}) for name in (WAITING_TOKENS, PAGE_USAGE, RUNNING)]
        if context.current_num_replicas != target or any(len(one) != target for one in told):
            return target, {}
        waiting, pages, running = (sum(one.values()) for one in told)
        return wanted_engines(FleetLoad(target, waiting, pages, running), self._targets), {}


def autoscaling_options(config: DeploymentConfig) -> dict[str, Any] | None:
    """Serve's `autoscaling_config` of the engines, None where their number is fixed."""
    scaling, engine = config.engine_deployment.autoscaling, config.engine
    if scaling is None:
        return None
    targets = {
        "waiting_tokens": scaling.waiting_tokens or engine.context_tokens,
        "page_usage": scaling.page_usage,
        "slots": engine.concurrency,
    }
    return {
        "min_replicas": config.engine_deployment.replicas,
        "max_replicas": scaling.max_replicas,
        "upscale_delay_s": scaling.upscale_delay_s,
        "downscale_delay_s": scaling.downscale_delay_s,
        "look_back_period_s": scaling.look_back_s,
        "policy": {
            "policy_function": f"{__name__}:{EngineScaling.__name__}",
            "policy_kwargs": targets,
        },
    }
