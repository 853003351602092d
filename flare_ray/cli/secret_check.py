"""Secrets that rendered objects name: which come along, and which must exist before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flare_ray.cli.config_check import Document

NAMING = {"secretKeyRef": "name", "secretRef": "name", "secret": "name"}
"""Fields of Kubernetes that hold a reference, and the key of the secret's name in it. A volume's
`secret` has `secretName` instead, as have Ingress and RayService."""
SECRET_NAME = "secretName"
PULL_SECRETS = "imagePullSecrets"

Origin = Callable[[str], str]
"""Where a secret's name was given, for messages."""


def parse_names(text: str) -> frozenset[str]:
    """Names between commas or white space, as `kubectl get secrets -o name` prints them."""
    return frozenset(name.removeprefix("secret/") for name in text.replace(",", " ").split())


def needed_secrets(objects: list[Document]) -> list[str]:
    """Secrets that the objects name and do not bring along, sorted."""
    brought = {item["metadata"]["name"] for item in objects if item.get("kind") == "Secret"}
    return sorted({name for item in objects for name in _names(item)} - brought)


def secret_problems(
    objects: list[Document], existing: frozenset[str], origin: Origin
) -> Iterator[str]:
    """One line for each secret that is named, not brought along, and does not exist."""
    for name in needed_secrets(objects):
        if name not in existing:
            yield f"secret {name} ({origin(name)}) does not exist: create it or name another"


def object_origin(objects: list[Document]) -> Origin:
    """Origins in rendered objects alone: the objects that name a secret."""

    def origin(name: str) -> str:
        return ", ".join(
            f"{item.get('kind')} {item['metadata']['name']}"
            for item in objects
            if name in _names(item)
        )

    return origin


def _names(node: Any) -> Iterator[str]:
    """Names of secrets below a node; optional ones are not needed."""
    if isinstance(node, list):
        for item in node:
            yield from _names(item)
    if not isinstance(node, Mapping):
        return
    for key, value in node.items():
        if key == SECRET_NAME and not node.get("optional"):
            yield str(value)
        elif key == PULL_SECRETS and isinstance(value, list):
            yield from (str(item["name"]) for item in value)
        elif key in NAMING and isinstance(value, Mapping) and NAMING[key] in value:
            if not value.get("optional"):
                yield str(value[NAMING[key]])
        else:
            yield from _names(value)
