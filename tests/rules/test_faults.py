"""Every fault that users of such servers report has a test named after it, and the page that lists
which test shows what (`docs/sampling-tests.md`) names tests that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.rules.sources import ROOT

PAGE = ROOT / "docs" / "sampling-tests.md"
ROW = re.compile(r"^\| (\S+) \| (.+?) \| `(tests/\S+?)::(test_\w+)` \|$", re.MULTILINE)
REQUIREMENTS = {*(f"S{n}" for n in range(1, 10)), *(f"K{n}" for n in range(1, 5))}

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
    "probe04": "streaming",
    "litellm_37792": "streaming",
    "H-16": "messages",
    "H-20": "readiness",
    "vllm_53912": "prefixes",
    "43559": "prefixes",
    "vllm_54360": "prefixes",
    "52244": "prefixes",
    "tpu_inference_3358": "prefixes",
    "3412": "prefixes",
    "sglang_36552": "prefixes",
    "dynamo_7489": "prefixes",
    "vllm_46289": "prefixes",
    "vllm_25001": "messages",
    "freetoken_537": "readiness",
    "gpustack_6203": "readiness",
    "worker_vllm_57": "refusals",
    "gpustack_6030": "readiness",
    "ray_39703": "ends",
    "ray_47219": "readiness",
    "52746": "streaming",
    "ray_59064": "placement",
    "probe02": "refusals",
    "probe03": "refusals",
    "probe05": "readiness",
    "probe06": "readiness",
    "probe12": "refusals",
    "probe13": "refusals",
    "probe14": "ends",
    "probe15": "metrics",
}
"""Fault -> area, all of them: reports H-01 to H-20, the reserve, probes 1 to 15. A number alone
shares a test with the fault in front of it."""


@dataclass(frozen=True)
class Row:
    """A line of the page: a requirement's sentence or a fault's area, and a test."""

    subject: str
    about: str
    path: str
    test: str


def rows(text: str) -> list[Row]:
    return [Row(*found) for found in ROW.findall(text)]


def problems(row: Row) -> Iterator[str]:
    """What is wrong with a line."""
    path = ROOT / row.path
    names = functions(path.read_text(encoding="utf-8")) if path.is_file() else set()
    if row.test not in names:
        yield f"{row.subject}: {row.path} has no {row.test}"
    if row.subject in FAULTS and not re.search(spelling(row.subject), row.test + "_"):
        yield f"{row.test} does not carry the name of {row.subject}"
    if row.subject in FAULTS and row.about != FAULTS[row.subject]:
        yield f"{row.subject} belongs to {FAULTS[row.subject]}"


def functions(source: str) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)}


def spelling(fault: str) -> str:
    """How a fault stands in a test's name."""
    if fault.startswith("H-"):
        return f"_h_?{fault[2:]}_"
    if fault.startswith("probe"):
        return f"_probe_?0?{int(fault[5:])}_"
    return f"_{fault}_"


def test_the_page_names_tests_that_exist_and_carry_their_faults():
    listed = rows(PAGE.read_text(encoding="utf-8"))
    found = [problem for row in listed for problem in problems(row)]
    assert not found, "\n".join(found)


def test_every_fault_and_every_requirement_has_a_line():
    subjects = {row.subject for row in rows(PAGE.read_text(encoding="utf-8"))}
    assert subjects == set(FAULTS) | REQUIREMENTS


def test_a_line_of_a_test_that_is_missing_or_misnamed_is_noticed():
    path = "tests/rules/test_faults.py"
    misnamed = f"test_{'a_line_of_a_test_that_is_missing_or_misnamed_is_noticed'}"
    page = f"| H-02 | stops | `{path}::{misnamed}` |\n| S1 | x | `{path}::test_none` |\n"
    found = [problem for row in rows(page) for problem in problems(row)]
    assert len(found) == 2
    assert "does not carry" in found[0] and "has no test_none" in found[1]
