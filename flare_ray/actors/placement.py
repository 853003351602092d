"""What Ray is asked about places: nodes and their resources, the engine's own placement group.

The arithmetic and the messages are in `preflight.py`, which knows no Ray.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from typing import TypeVar

import ray
from ray._private.state import available_resources_per_node
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group_table,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from flare_ray.actors.checkpoint import check_checkpoint
from flare_ray.actors.preflight import (
    NodeResources,
    candidate_nodes,
    checkpoint_problem,
    demo_hint,
    engine_bundles,
    placement_problem,
)
from flare_ray.config import DeploymentConfig, EngineConfig
from flare_ray.errors import CapacityError, ConfigError

logger = logging.getLogger("ray.serve.flare")

Result = TypeVar("Result")

ENGINE_DEPLOYMENT = "Engine"
"""Name of the Serve deployment of engines; part of the names of its placement groups."""
POLL_S = 0.5
CHECK_LIMIT_S = 20.0
"""Seconds for the look at the checkpoint folder of another node."""
MAX_CHECKED_NODES = 8
REPEAT_S = 30.0
"""Seconds after a wait for nodes in which the same deployment does not wait again. Ray runs a build
that raised three times more, each a few seconds after the last: without it they would add up."""


def preflight(config: DeploymentConfig) -> None:
    """Refuse a deployment that could only wait: too few CPUs or GPUs, or no checkpoint.

    Waits `placement_timeout_s` for nodes that are joining, once for all attempts of one deployment,
    and not at all if the checkpoint is missing or damaged.
    Runs where the application is built, and in the command line before it; needs a connected Ray.

    Raises:
        CapacityError: naming what is needed, what each node has, and the demo to try.
        ConfigError: naming the missing checkpoint files and the demo to try.
        CheckpointError: as `check_checkpoint`.
    """
    limit_s = config.engine_deployment.placement_timeout_s
    wait = _SharedWait(config)
    deadline = time.monotonic() + wait.left_s
    nodes = cluster_nodes()
    missing = _checkpoint_problem(config, nodes)
    problem = placement_problem(config, nodes)
    if not missing:
        _check_checkpoints(config, nodes)
    while problem and not missing and time.monotonic() < deadline:
        time.sleep(POLL_S)
        nodes = cluster_nodes()
        problem = placement_problem(config, nodes)
        if not problem:
            missing = _checkpoint_problem(config, nodes)
            if not missing:
                _check_checkpoints(config, nodes)
    hint = demo_hint(config.model_name)
    if problem:
        waited = "" if missing else f" after {limit_s:g} s (placement_timeout_s)"
        also = f"; also, {missing}" if missing else ""
        raise CapacityError(
            f"{problem}{waited}; lower tensor_parallel_size, replicas or cpus_per_rank, or add "
            f"nodes{also}; {hint}"
        )
    if missing:
        raise ConfigError(f"{missing}; set it to the downloaded checkpoint; {hint}")
    wait.clear()


class _SharedWait:
    """The wait of all attempts to deploy one configuration; its begin lies in the cluster's
    key-value store.

    Attributes:
        left_s: seconds that this attempt may wait.
    """

    def __init__(self, config: DeploymentConfig) -> None:
        limit_s = config.engine_deployment.placement_timeout_s
        digest = hashlib.sha256(config.model_dump_json().encode()).hexdigest()
        self._key = f"flare:placement:{digest}"
        now = time.time()
        found = _internal_kv_get(self._key)
        begun_s = now if found is None else float(found)
        if not 0.0 <= now - begun_s <= limit_s + REPEAT_S:
            begun_s = now
        if begun_s == now:
            _internal_kv_put(self._key, repr(now).encode(), overwrite=True)
        self.left_s = begun_s + limit_s - now

    def clear(self) -> None:
        """Let the next deployment wait for itself."""
        _internal_kv_del(self._key)


def cluster_nodes() -> list[NodeResources]:
    """Live nodes. What engines of a deployment hold counts as free: Serve stops the old replica of
    an updated deployment before it starts the new one."""
    free = {node: dict(has) for node, has in available_resources_per_node().items()}
    for group in placement_group_table().values():
        if f"#{ENGINE_DEPLOYMENT}#" not in group["name"] or group["state"] != "CREATED":
            continue
        for index, node in group["bundles_to_node_id"].items():
            has = free.setdefault(node, {})
            for name, amount in group["bundles"][index].items():
                has[name] = has.get(name, 0.0) + amount
    return [
        NodeResources(
            node["NodeID"],
            node["NodeManagerHostname"],
            node["Resources"],
            free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _checkpoint_problem(config: DeploymentConfig, nodes: list[NodeResources]) -> str:
    """What the first node that could host an engine, but lacks its checkpoint, lacks."""
    for node in candidate_nodes(config, nodes)[:MAX_CHECKED_NODES]:
        if problem := _on_node(node, checkpoint_problem, config.engine):
            return problem
    return ""


def _check_checkpoints(config: DeploymentConfig, nodes: list[NodeResources]) -> None:
    """Check the headers of the checkpoint on each node that could host an engine.

    Raises:
        CheckpointError, ConfigError: as `check_checkpoint` of the first node that raises.
    """
    for node in candidate_nodes(config, nodes)[:MAX_CHECKED_NODES]:
        _on_node(node, check_checkpoint, config.engine)


def _on_node(
    node: NodeResources, look: Callable[[EngineConfig], Result], config: EngineConfig
) -> Result:
    """`look(config)` on a node; its exceptions come back as they are.

    Raises:
        ConfigError: the node did not answer in time.
    """
    if node.node_id == ray.get_runtime_context().get_node_id():
        return look(config)
    return _in_task(node.node_id, look, config)


def check_apart(config: EngineConfig) -> None:
    """`check_checkpoint` on this node in a process of its own, so that this one need not load
    torch; raises as that does, and ConfigError if there is no answer in time."""
    _in_task(ray.get_runtime_context().get_node_id(), check_checkpoint, config)


def _in_task(node_id: str, look: Callable[[EngineConfig], Result], config: EngineConfig) -> Result:
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    reference = ray.remote(look).options(num_cpus=0, scheduling_strategy=there).remote(config)
    try:
        return ray.get(reference, timeout=CHECK_LIMIT_S)
    except ray.exceptions.GetTimeoutError as error:
        ray.cancel(reference, force=True)
        raise ConfigError(
            f"engine.checkpoint: node {node_id} did not look at its folder in {CHECK_LIMIT_S:g} s"
        ) from error
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error


def own_placement_group(config: DeploymentConfig) -> PlacementGroup:
    """The group this process runs in, after a check that it was made for `config`.

    Raises:
        ConfigError: the process runs in no group, or in one of other bundles.
    """
    group = get_current_placement_group()
    if group is None:
        raise ConfigError(
            "an engine must run inside its placement group: deploy it with the bundles of "
            "engine_bundles(config) and STRICT_PACK"
        )
    wanted = engine_bundles(config)
    given = [dict(bundle) for bundle in group.bundle_specs]
    if given != wanted:
        raise ConfigError(
            f"the engine's placement group has the bundles {given}, the configuration needs "
            f"{wanted}; do not override placement_group_bundles"
        )
    return group


def in_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    """Where rank `index` of the group's engine runs."""
    return PlacementGroupSchedulingStrategy(
        placement_group=group,
        placement_group_bundle_index=index,
        placement_group_capture_child_tasks=False,
    )
