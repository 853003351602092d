"""An engine on Ray without Serve: for GPU hosts that serve one client, and for tests of actors.

The same `EngineHost` as in the Serve deployment, in a placement group made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from flare_ray.actors.engine import EngineHost
from flare_ray.actors.placement import in_bundle, preflight
from flare_ray.actors.preflight import CONTROLLER_CPUS, engine_bundles
from flare_ray.actors.rank import PrepareRank, prepare_on_device
from flare_ray.config import DeploymentConfig
from flare_ray.errors import CapacityError

CLOSE_LIMIT_S = 30.0


@dataclass(slots=True)
class LaunchedEngine:
    """A running engine actor and its placement group.

    Attributes:
        actor: handle of the `EngineHost`; `actor.submit.remote(request_bytes)` and so on.
        info: msgpack `EngineRecord`.
    """

    actor: Any
    group: PlacementGroup
    info: bytes

    def close(self, drain_s: float = 0.0) -> None:
        """Stop the engine and free its places; idempotent."""
        try:
            ray.get(self.actor.close.remote(drain_s), timeout=drain_s + CLOSE_LIMIT_S)
        except ray.exceptions.RayActorError:
            pass  # it is gone already, and its ranks with it
        finally:
            ray.kill(self.actor, no_restart=True)
            remove_placement_group(self.group)


def launch_engine(
    config: DeploymentConfig,
    *,
    application: str,
    prepare: PrepareRank = prepare_on_device,
) -> LaunchedEngine:
    """Check, place and start one engine; ready when this returns. Needs a connected Ray.

    Raises:
        ConfigError: as `preflight`, or of the configuration.
        CapacityError: as `preflight`, or the places were taken meanwhile.
        FlareError: what kept the engine from starting.
    """
    preflight(config)
    bundles = engine_bundles(config)
    group = placement_group(bundles, strategy="STRICT_PACK")
    limit_s = config.engine_deployment.placement_timeout_s
    actor: Any = None
    try:
        if not group.wait(limit_s):
            raise CapacityError(
                f"no node could reserve {bundles} within {limit_s:g} s (placement_timeout_s), "
                "though resources seemed free; another application may have taken them"
            )
        remote: Any = ray.remote(EngineHost)
        actor = remote.options(
            num_cpus=CONTROLLER_CPUS, max_restarts=0, scheduling_strategy=in_bundle(group, 0)
        ).remote(config, application, prepare=prepare)
        info: bytes = ray.get(actor.start.remote())
    except BaseException as error:
        if actor is not None:
            ray.kill(actor, no_restart=True)
        remove_placement_group(group)
        if isinstance(error, ray.exceptions.RayTaskError):
            # The engine's own exception: its type and message, without Ray's wrapper.
            raise error.cause from error
        raise
    return LaunchedEngine(actor, group, info)
