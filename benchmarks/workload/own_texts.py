"""Functions and pages of this project for the workload's generators:
`python -m benchmarks.workload.own_texts`.

Run once, when a version of the workload is made: the result is committed beside it, since the tree
that it is taken from changes. Everything is under the project's own licence.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.support.results import ROOT, current_commit
from flare_ray.workload.own_corpus import FOLDER, FUNCTIONS, PAGES

ROOMS = ("contracts", "config", "controller", "metrics", "frontend", "actors", "cli")
NUM_FUNCTIONS = 160
LINES, CHARACTERS = range(4, 33), range(120, 1400)
FAMILY = re.compile(r"glm|deep_?seek|qwen", re.IGNORECASE)
MIN_PAGE_CHARACTERS = 2000


def functions() -> Iterator[tuple[str, str]]:
    """Name and dedented source of every function of fitting size, in the tree's order."""
    for room in ROOMS:
        for path in sorted((ROOT / "flare_ray" / room).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            lines = text.split("\n")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and not node.decorator_list:
                    source = _dedented(lines, node)
                    if source is not None:
                        yield f"{path.relative_to(ROOT)}:{node.name}", source


def _dedented(lines: list[str], node: ast.FunctionDef) -> str | None:
    assert node.end_lineno is not None  # set by ast.parse
    body = lines[node.lineno - 1 : node.end_lineno]
    indent = len(body[0]) - len(body[0].lstrip())
    text = "\n".join(line[indent:] if not line[:indent].strip() else line for line in body)
    fits = len(body) in LINES and len(text) in CHARACTERS and text.isascii()
    if not fits or FAMILY.search(text) or "```" in text:
        return None
    try:
        ast.parse(text)
    except SyntaxError:
        return None  # a string of several lines does not survive the change of indent
    return text


def pages() -> Iterator[tuple[str, str]]:
    """Path and text of the documentation."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = FAMILY.sub("model", path.read_text(encoding="utf-8"))
        if len(text) >= MIN_PAGE_CHARACTERS:
            yield str(path.relative_to(ROOT)), text


def main() -> None:
    """Write both files."""
    commit = current_commit()
    found = list(functions())
    chosen = random.Random(0).sample(found, min(NUM_FUNCTIONS, len(found)))
    for file, rows in ((FUNCTIONS, sorted(chosen)), (PAGES, list(pages()))):
        lines = [{"source": f"{name}@{commit[:12]}", "text": text} for name, text in rows]
        write(FOLDER / file, lines)


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """JSON lines."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    print(f"{path.name}: {len(rows)} texts, {len(text)} characters")


if __name__ == "__main__":
    main()
