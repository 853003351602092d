"""Checks that fail a deployment by name before anything is scheduled.

Serve reserves an engine's placement group before the engine's code runs: on a cluster without the
GPUs it would wait for ever, and the reason would be in no log. `preflight` therefore runs where the
application is built. It is plain arithmetic over `NodeResources`; `cluster.py` asks Ray for them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flare_ray.config import DeploymentConfig, EngineConfig

CONTROLLER_CPUS = 0.5
"""Logical CPUs of an engine replica beside its ranks': the controller uses some 5 % of a core."""

Bundle = dict[str, float]


@dataclass(frozen=True, slots=True)
class NodeResources:
    """One live node: what it has in all, and what no other application holds."""

    node_id: str
    host: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def gpus_per_rank(config: DeploymentConfig) -> float:
    """GPUs that one rank reserves."""
    configured = config.engine_deployment.gpus_per_rank
    if configured is not None:
        return configured
    return 1.0 if config.engine.device == "cuda" else 0.0


def rank_resources(config: DeploymentConfig) -> Bundle:
    """What one rank actor asks for inside its bundle."""
    resources = {"CPU": config.engine_deployment.cpus_per_rank}
    if gpus := gpus_per_rank(config):
        resources["GPU"] = gpus
    return resources


def engine_bundles(config: DeploymentConfig) -> list[Bundle]:
    """The placement group of one engine: one bundle per rank; the replica shares bundle 0."""
    bundles = [rank_resources(config) for _ in range(config.engine.tensor_parallel_size)]
    bundles[0]["CPU"] += CONTROLLER_CPUS
    return bundles


def total_of(bundles: Sequence[Bundle]) -> Bundle:
    """Sum of the bundles, by resource."""
    names = sorted({name for bundle in bundles for name in bundle})
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def placement_problem(config: DeploymentConfig, nodes: Sequence[NodeResources]) -> str:
    """Why the configured engines do not fit the cluster, "" if they do.

    STRICT_PACK: an engine's bundles must fit one node; fractions are compared with a tolerance.
    """
    needed = total_of(engine_bundles(config))
    replicas = config.engine_deployment.replicas
    if _fitting(needed, [node.free for node in nodes]) >= replicas:
        return ""
    engine = f"{replicas} engine(s) of {_text(needed)} each, on one node each"
    has = "; ".join(
        f"{node.host} has {_text({n: node.total.get(n, 0.0) for n in needed})}, of which "
        f"{_text({n: node.free.get(n, 0.0) for n in needed})} free"
        for node in nodes
    )
    if _fitting(needed, [node.total for node in nodes]) >= replicas:
        return f"the cluster is in use: needed are {engine}; {has or 'no node is alive'}"
    return f"the cluster is too small: needed are {engine}; {has or 'no node is alive'}"


def candidate_nodes(
    config: DeploymentConfig, nodes: Sequence[NodeResources]
) -> list[NodeResources]:
    """Nodes that could host an engine; all nodes if none could, so that weights are checked too."""
    needed = total_of(engine_bundles(config))
    return [node for node in nodes if _fitting(needed, [node.free])] or list(nodes)


def checkpoint_problem(config: EngineConfig) -> str:
    """What is missing of the checkpoint folder on this host, "" if nothing obvious is."""
    folder = Path(config.checkpoint)
    if not folder.is_dir():
        return f"engine.checkpoint: {folder.absolute()} is no folder on {os.uname().nodename}"
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        return f"engine.checkpoint: {folder.absolute()} lacks {', '.join(missing)}"
    return ""


def demo_hint(model_name: str) -> str:
    """Which deployment runs here without GPUs or downloads."""
    folder = Path(__file__).resolve().parents[2] / "deployments"
    demos = sorted(path.name for path in folder.glob("*-demo.yaml"))
    # The demo of the same family, when there is one: its file begins like the model's name.
    own = [name for name in demos if model_name.startswith(name.removesuffix("-demo.yaml"))]
    names = own or demos or ["*-demo.yaml (in the repository)"]
    return "to try the server without them, run " + " or ".join(f"deployments/{n}" for n in names)


def _fitting(needed: Bundle, nodes: Sequence[Mapping[str, float]]) -> int:
    """How many engines fit, each on one node."""
    return sum(
        min(int(node.get(name, 0.0) / amount + 1e-6) for name, amount in needed.items() if amount)
        for node in nodes
    )


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
