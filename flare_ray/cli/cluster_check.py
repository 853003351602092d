"""What `flare-ray check` says of a chart: its Serve configuration, whether it fits, its secrets.

Values are rendered first (chart_check.py); rendered objects are read as they are.

The worker groups of a RayService are taken as nodes, and engines and HTTP replicas are placed on
them as Ray would: all ranks of an engine on one node (STRICT_PACK). Nothing is asked of a cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flare_ray.actors.preflight import Bundle, engine_bundles, total_of
from flare_ray.cli.chart_check import find_chart, may_be_values, paths_of, render_values
from flare_ray.cli.config_check import (
    IMPORT_PATH,
    Checked,
    Document,
    UniqueKeyLoader,
    check_document,
    check_file,
    open_access,
)
from flare_ray.cli.secret_check import Origin, needed_secrets, object_origin, secret_problems
from flare_ray.config import DeploymentConfig
from flare_ray.errors import CapacityError, ConfigError

STANDARD_INPUT = "-"
KIND = "RayService"
GPU_SUFFIX = "gpu"
"""KubeRay counts as GPUs every resource whose name ends so."""
SERVE_FLAGS = "RAY_SERVE_"
SIZING = "flare-ray/sizing"
"""Annotation in which the chart tells the bytes of a rank and what its GPU offers."""
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Group:
    """A worker group: `count` nodes of equal resources."""

    name: str
    count: int
    node: Mapping[str, float]


def check_source(
    source: Path, *, chart: Path | None = None, secrets: frozenset[str] | None = None
) -> str:
    """What a deployment file, values of the chart, or the output of `helm template` deploys.

    Args:
        source: "-" is standard input.
        chart: the chart's folder; says that `source` holds values. Otherwise seen from its keys.
        secrets: names that exist; None = unknown.
    Raises:
        ConfigError: everything that is wrong with it, one line each; of values that the chart
            refuses by a rule, the first.
        CapacityError: engines or HTTP replicas do not fit the worker groups.
    """
    piped = str(source) == STANDARD_INPUT
    if not piped and not source.is_file():
        return check_file(source)
    name = "standard input" if piped else str(source)
    text = sys.stdin.read() if piped else source.read_text(encoding="utf-8", errors="replace")
    try:
        documents = [item for item in yaml.load_all(text, Loader=UniqueKeyLoader) if item]
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML: {error}") from error
    objects = [item for item in documents if isinstance(item, dict)]
    if any(item.get("kind") == KIND for item in objects):
        return _objects_text(objects, name, secrets, origin=object_origin(objects))
    if chart is None and piped:
        raise ConfigError(
            f"{name} holds no {KIND}: pipe the output of `helm template` into it, or name a file"
        )
    if chart is None and not (len(objects) == 1 and may_be_values(objects[0])):
        return check_file(source)
    if len(documents) != len(objects) or len(objects) > 1:
        raise ConfigError(f"{name}: values must be one mapping")
    values = objects[0] if objects else {}
    rendered = render_values(values, chart or find_chart(source), name=name)

    def origin(secret: str) -> str:
        return ", ".join(paths_of(rendered.values, secret)) or object_origin(rendered.objects)(
            secret
        )

    return _objects_text(rendered.objects, name, secrets, origin=origin)


def _objects_text(
    objects: list[Document], name: str, secrets: frozenset[str] | None, *, origin: Origin
) -> str:
    """What rendered objects deploy: their services, then the secrets they need."""
    services = [item for item in objects if item.get("kind") == KIND]
    lines = [_service_text(service, name) for service in services]
    if secrets is not None:
        problems = list(secret_problems(objects, secrets, origin))
        if problems:
            raise ConfigError("\n".join([f"{name}:", *problems]))
    needed = [f"{secret} ({origin(secret)})" for secret in needed_secrets(objects)]
    if needed:
        verb = "must exist" if secrets is None else "exist"
        lines.append(f"secrets that {verb}: {', '.join(needed)}")
    return "\n".join(lines)


def _service_text(service: Mapping[str, Any], name: str) -> str:
    metadata = service.get("metadata") or {}
    where = f"{name}: {KIND} {metadata.get('name', '?')}"
    spec = service.get("spec") or {}
    try:
        document = yaml.load(spec.get("serveConfigV2") or "", Loader=UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: serveConfigV2 is not YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: serveConfigV2 is missing or no mapping")
    checked = check_document(document, name=f"{where}: serveConfigV2")
    cluster = spec.get("rayClusterConfig") or {}
    problems = [*_time_problems(spec, cluster, checked), *_flag_problems(cluster)]
    if problems:
        raise ConfigError("\n".join([f"{where}:", *problems]))
    groups = worker_groups(cluster)
    fitted = fit(checked, groups)
    nodes = ", ".join(f"{group.count} x {_text(group.node)} ({group.name})" for group in groups)
    sizing = (metadata.get("annotations") or {}).get(SIZING)
    lines = [f"{where}: correct", *fitted, f"on {nodes}", *([sizing] if sizing else [])]
    return "\n".join(lines + open_access(checked))


def worker_groups(cluster: Mapping[str, Any]) -> list[Group]:
    """The groups of a Ray cluster's specification, at the most nodes they may have."""
    groups = []
    for group in cluster.get("workerGroupSpecs") or []:
        template = group.get("template") or {}
        [container, *_] = (template.get("spec") or {}).get("containers") or [{}]
        limits = (container.get("resources") or {}).get("limits") or {}
        start = group.get("rayStartParams") or {}
        gpus = sum(_number(n) for name, n in limits.items() if name.endswith(GPU_SUFFIX))
        node = {
            "CPU": _number(start.get("num-cpus", limits.get("cpu", 0))),
            "GPU": _number(start.get("num-gpus", gpus)),
        }
        count = int(group.get("maxReplicas", group.get("replicas", 0)))
        groups.append(Group(str(group.get("groupName")), count, node))
    return groups


def fit(checked: Checked, groups: list[Group]) -> list[str]:
    """One line per application that fits.

    Raises:
        CapacityError: naming what does not, what it needs and what is left.
    """
    free = [dict(group.node) for group in groups for _ in range(group.count)]
    lines = []
    for application, config in checked.configs.items():
        engines = engine_replicas(checked.document, application, config)
        needed = total_of(engine_bundles(config))
        placed = _place(needed, engines, free)
        if placed < engines:
            raise CapacityError(
                f"application {application}: {placed} of {engines} engines fit; each needs "
                f"{_text(needed)} on one node (STRICT_PACK), left are {_left(free)}; add nodes, or "
                "change replicas, tensor_parallel_size or cpus_per_rank"
            )
        ingress = config.ingress
        each: Bundle = {"CPU": ingress.cpus}
        http = _place(each, ingress.max_replicas, free)
        if http < ingress.max_replicas:
            raise CapacityError(
                f"application {application}: {http} of {ingress.max_replicas} HTTP replicas of "
                f"{ingress.cpus:g} CPU fit beside the engines, left are {_left(free)}; add CPUs or "
                "lower ingress.max_replicas"
            )
        lines.append(
            f"application {application}: {engines} engine(s) of {_text(needed)} and up to "
            f"{ingress.max_replicas} HTTP replica(s) fit"
        )
    return lines


def engine_replicas(document: Document, application: str, config: DeploymentConfig) -> int:
    """Engines that an application asks for: the entry under `deployments:` wins."""
    from flare_ray.frontend.app import DEPLOYMENTS

    for entry in document["applications"]:
        if entry.get("import_path") == IMPORT_PATH and entry.get("name", "default") == application:
            for override in entry.get("deployments") or []:
                if override.get("name") == DEPLOYMENTS[0] and "num_replicas" in override:
                    return int(override["num_replicas"])
    return config.engine_deployment.most_replicas


def _place(needed: Bundle, count: int, free: list[dict[str, float]]) -> int:
    """Place up to `count` times, first fit; returns how many. `free` is reduced."""
    for placed in range(count):
        for node in free:
            if all(node.get(name, 0.0) + TOLERANCE >= amount for name, amount in needed.items()):
                for name, amount in needed.items():
                    node[name] = node.get(name, 0.0) - amount
                break
        else:
            return placed
    return count


def _time_problems(
    spec: Mapping[str, Any], cluster: Mapping[str, Any], checked: Checked
) -> Iterator[str]:
    """Pods and clusters that end before their answers may."""
    drain_s = max(
        (c.engine_deployment.graceful_shutdown_s for c in checked.configs.values()), default=0
    )
    delay_s = spec.get("rayClusterDeletionDelaySeconds", 60)
    if delay_s < drain_s:
        yield (
            f"rayClusterDeletionDelaySeconds: {delay_s} is below graceful_shutdown_s {drain_s:g}: "
            "an upgrade would end answers"
        )
    for group in cluster.get("workerGroupSpecs") or []:
        pod = (group.get("template") or {}).get("spec") or {}
        grace_s = pod.get("terminationGracePeriodSeconds", 30)
        if grace_s < drain_s:
            yield (
                f"worker group {group.get('groupName')}: terminationGracePeriodSeconds {grace_s} "
                f"is below graceful_shutdown_s {drain_s:g}"
            )


def _flag_problems(cluster: Mapping[str, Any]) -> Iterator[str]:
    """Serve's flags are read by every process: nodes that differ do not understand each other."""
    head = cluster.get("headGroupSpec") or {}
    start = head.get("rayStartParams") or {}
    if str(start.get("num-cpus")) != "0":
        yield 'headGroupSpec: set rayStartParams num-cpus to "0", or replicas run on the head'
    wanted = _serve_flags(head)
    for group in cluster.get("workerGroupSpecs") or []:
        found = _serve_flags(group)
        if found != wanted:
            differing = sorted(dict(found.items() ^ wanted.items()))
            yield (
                f"worker group {group.get('groupName')}: {', '.join(differing)} must be the same "
                "as on the head"
            )


def _serve_flags(group: Mapping[str, Any]) -> dict[str, str]:
    pod = (group.get("template") or {}).get("spec") or {}
    [container, *_] = pod.get("containers") or [{}]
    return {
        entry["name"]: str(entry.get("value"))
        for entry in container.get("env") or []
        if entry["name"].startswith(SERVE_FLAGS)
    }


def _number(quantity: object) -> float:
    """A count or a quantity of CPUs such as 500m."""
    text = str(quantity)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def _left(free: list[dict[str, float]]) -> str:
    return "; ".join(_text(node) for node in free) or "no nodes"


def _text(resources: Mapping[str, float]) -> str:
    return (
        ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount > 0)
        or "nothing"
    )
