"""Fields of a custom resource, read from its CRD: names, types and choices, for closed checks.

`python -m tests.helm.schemas.fields CRD.yaml VERSION NAME@RELEASE` writes `KIND.json` beside this
file. Descriptions, defaults and expressions stay out: what remains is what a typo is caught by. Pod
templates are left to Kubernetes' own schema, which knows them better than a CRD does.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
POD_TEMPLATE = "PodTemplateSpec"
FACTS = ("type", "enum", "required")


def fields(node: dict[str, Any], path: str = "") -> dict[str, Any]:
    """A closed JSON schema of a CRD's node."""
    if path.endswith(".template"):
        return {"$kubernetes": POD_TEMPLATE}
    if path == ".metadata":
        return {"type": "object"}
    found: dict[str, Any] = {key: node[key] for key in FACTS if key in node}
    if node.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
    if "properties" in node:
        found["properties"] = {
            key: fields(value, f"{path}.{key}")
            for key, value in node["properties"].items()
            if (path, key) != ("", "status")
        }
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    elif isinstance(node.get("additionalProperties"), dict):
        found["additionalProperties"] = fields(node["additionalProperties"], f"{path}{{}}")
    if "items" in node:
        found["items"] = fields(node["items"], f"{path}[]")
    return found


def main(crd: str, version: str, source: str) -> None:
    """Write the fields of one version of a CRD."""
    text = Path(crd).read_bytes()
    document = yaml.safe_load(text)
    [served] = [v for v in document["spec"]["versions"] if v["name"] == version]
    kind = document["spec"]["names"]["kind"]
    result = {
        "apiVersion": f"{document['spec']['group']}/{version}",
        "kind": kind,
        "source": source,
        "sha256": hashlib.sha256(text).hexdigest(),
        "fields": fields(served["schema"]["openAPIV3Schema"]),
    }
    (HERE / f"{kind}.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
