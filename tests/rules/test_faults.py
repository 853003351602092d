"""Every fault that users of such servers report has a test named after it.

An id is found in a test's name (`h07`, `vllm_22987`, `probe09`) or in a docstring of its file
(H-07). The table says which area a fault belongs to; an area that is listed as covered lacks none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.rules.sources import ROOT

COVERED_AREAS = ("sampling", "logprobs", "stops", "streaming", "grammar")

FAULTS = {
    "H-01": "streaming",
    "H-02": "stops",
    "H-03": "stops",
    "H-04": "stops",
    "H-05": "streaming",
    "H-06": "stops",
    "H-07": "stops",
    "H-08": "sampling",
    "H-09": "sampling",
    "H-10": "logprobs",
    "H-11": "logprobs",
    "H-12": "logprobs",
    "H-13": "grammar",
    "H-14": "grammar",
    "H-15": "streaming",
    "H-17": "sampling",
    "H-18": "streaming",
    "H-19": "sampling",
    "sglang_954": "streaming",
    "sglang_28180": "sampling",
    "sglang_21258": "sampling",
    "sglang_28798": "logprobs",
    "28794": "logprobs",
    "tpu_inference_3572": "logprobs",
    "vllm_42744": "sampling",
    "42802": "sampling",
    "trtllm_18401": "logprobs",
    "vllm_46118": "sampling",
    "vllm_57052": "stops",
    "tgi_440": "sampling",
    "vllm_13196": "sampling",
    "vllm_22987": "sampling",
    "koboldcpp_1276": "stops",
    "colibri_1589": "sampling",
    "ray_52745": "streaming",
    "vllm_52620": "grammar",
    "vllm_44006": "grammar",
    "xgrammar_286": "grammar",
    "xgrammar_122": "grammar",
    "imp_1563": "grammar",
    "lattice_931": "grammar",
    "vllm_25054": "grammar",
    "probe01": "stops",
    "probe07": "sampling",
    "probe08": "sampling",
    "probe09": "sampling",
    "probe10": "sampling",
    "probe11": "sampling",
}
"""Fault -> area."""


def named_faults() -> set[str]:
    """Ids that tests carry."""
    found: set[str] = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path.name != "test_faults.py" or path.parent.name != "rules":
            found.update(_ids(ast.parse(path.read_text(encoding="utf-8"))))
    return found


def _ids(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for number in re.findall(r"(?:^|_)h(\d\d)(?=_)", node.name):
                yield f"H-{number}"
            yield from (name for name in FAULTS if f"_{name}_" in f"{node.name}_")
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            yield from re.findall(r"H-\d\d", ast.get_docstring(node) or "")


def test_every_fault_of_a_covered_area_is_a_test():
    named = named_faults()
    missing = [
        f"{fault} ({area})"
        for fault, area in FAULTS.items()
        if area in COVERED_AREAS and fault not in named
    ]
    assert not missing, "no test carries: " + ", ".join(missing)


def test_a_fault_without_a_test_is_noticed():
    tree = ast.parse('def test_h02_x(): "About H-03."\ndef test_vllm_42744_and_42802_y(): pass')
    assert set(_ids(tree)) == {"H-02", "H-03", "vllm_42744", "42802"}
