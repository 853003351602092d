"""The texts behind the frozen workload: this project's own functions and pages, and a small
dictionary written for it. They are files of this package, so a seed gives the same items anywhere.
"""

from __future__ import annotations

import json
from pathlib import Path

from flare_ray.workload.generators.corpus import Corpus, Gloss

FOLDER = Path(__file__).parent / "texts"
FUNCTIONS, PAGES, GLOSSES = "functions.jsonl", "pages.jsonl", "glosses.tsv"
SCRAMBLE = 0.25
"""Part of the edited functions whose names only the prompt holds."""


def own_corpus() -> Corpus:
    """Everything the generators may draw from."""
    rows = (FOLDER / GLOSSES).read_text(encoding="utf-8").splitlines()
    glosses = [Gloss(*row.split("\t")) for row in rows]
    pages, functions = _texts(PAGES), _texts(FUNCTIONS)
    return Corpus(
        common=glosses,
        rare=glosses,
        docs=pages,
        functions=functions,
        scramble=SCRAMBLE,
    )


def _texts(file: str) -> list[str]:
    lines = (FOLDER / file).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]
