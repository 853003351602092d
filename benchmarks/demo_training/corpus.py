"""Texts behind the generators: dictionary glosses, documentation, Python sources and functions,
split by hash.

The packed texts come from :mod:`benchmarks.demo_training.prepare`; Python sources are read from the
standard library and the permissively licensed packages installed on the host. Two per cent of all
documents, files and rare words are held out.
"""

from __future__ import annotations

import ast
import hashlib
import json
import lzma
import random
import re
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

from flare_ray.workload.generators.corpus import Corpus, Gloss
from flare_ray.workload.generators.wordlists import words

Split = Literal["train", "eval"]

PACKAGES = words(
    """
    numpy scipy sympy networkx pandas sklearn matplotlib jinja2 click aiohttp attr jax flax
    optax torch requests urllib3 rich werkzeug packaging coverage fsspec
    """
)
"""Import names of BSD, MIT, Apache-2.0 and PSF-like packages. Not listed on purpose: hypothesis and
tqdm (MPL), transformers (its model files would be recited), anything GPL."""

FOREIGN_LICENCE = re.compile(
    r"GNU (?:Lesser |Affero |Library )*General Public|\b[AL]?GPL(?:v[23]|-[23])?\b"
    r"|Mozilla Public|\bMPL[- ]?[12]|CC[- ]BY|Creative Commons"
    r"|stackoverflow\.com|stackexchange\.com",
    re.I,
)
"""A text that names one of these is left out whole, whoever's licence is meant."""

NUM_COMMON_WORDS = 3000
MAX_FILE_CHARS = 200_000


def is_held_out(key: str) -> bool:
    """Two per cent of keys, by hash: equal on every host."""
    return hashlib.sha1(key.encode()).digest()[0] < 5


def load_corpus(pack: Path, split: Split, *, max_files: int, seed: int = 0) -> Corpus:
    """Read the packed texts and ``max_files`` Python files in an order drawn from ``seed``."""

    def keep(key: str) -> bool:
        return is_held_out(key) == (split == "eval")

    with lzma.open(pack / "wordnet.tsv.xz", "rt", encoding="utf-8") as f:
        rows = [line.rstrip("\n").split("\t") for line in f]
    glosses = [Gloss(part, lemma, meaning) for _, part, lemma, meaning in rows]
    documents, prose = (_packed(pack / name) for name in ("docs.jsonl.xz", "prose.jsonl.xz"))
    corpus = Corpus(
        common=glosses[:NUM_COMMON_WORDS],
        rare=[g for g in glosses[NUM_COMMON_WORDS:] if keep(g.lemma)],
        docs=[d["text"] for d in documents if keep(d["key"])],
        prose=[d["text"] for d in prose if split == "train" and keep(d["key"])],
    )
    files = list(source_files())
    random.Random(seed).shuffle(files)
    for path, key in files[:max_files]:
        if keep(key):
            _add_file(corpus, path, key)
    return corpus


def _packed(path: Path) -> list[dict[str, str]]:
    """Key and text of every packed document that names no foreign licence."""
    with lzma.open(path, "rt", encoding="utf-8") as f:
        documents = [json.loads(line) for line in f]
    return [d for d in documents if not FOREIGN_LICENCE.search(d["text"])]


def source_files() -> Iterator[tuple[Path, str]]:
    """Candidate files with their split keys, sorted; test files are excluded."""
    stdlib, site = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    found = [
        (p, str(p.relative_to(stdlib))) for p in stdlib.rglob("*.py") if "-packages" not in str(p)
    ]
    for package in PACKAGES:
        root = site / package
        found += [(p, "site-packages/" + str(p.relative_to(site))) for p in root.rglob("*.py")]
    yield from sorted((p, key) for p, key in found if "test" not in key and "lib2to3" not in key)


def _add_file(corpus: Corpus, path: Path, key: str) -> None:
    try:
        text = path.read_text("utf-8")
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return  # templates with a .py name and old encodings: not text for this corpus
    if not 300 < len(text) < MAX_FILE_CHARS or FOREIGN_LICENCE.search(text):
        return
    corpus.code.append(text)
    lines = text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            function = _dedented(lines, node)
            if function is not None:
                corpus.functions.append(function)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            doc = ast.get_docstring(node)
            if doc and len(doc) >= 400:
                corpus.docstrings.append(doc)
    owner = key.split("/")[1] if key.startswith("site-packages/") else "stdlib"
    corpus.characters[owner] = corpus.characters.get(owner, 0) + len(text)


def _dedented(lines: list[str], node: ast.FunctionDef) -> str | None:
    assert node.end_lineno is not None  # set by ast.parse
    if not 2 <= node.end_lineno - node.lineno <= 39:
        return None
    body = lines[node.lineno - 1 : node.end_lineno]
    indent = len(body[0]) - len(body[0].lstrip())
    text = "\n".join(b[indent:] if not b[:indent].strip() else b for b in body)
    return text if 60 <= len(text) <= 1600 and text.isascii() else None


def package_licences() -> list[dict[str, str]]:
    """Import name, distribution, version and licence of every installed package of ``PACKAGES``,
    from its own metadata.
    """
    owners = metadata.packages_distributions()
    rows = []
    for package in PACKAGES:
        for name in sorted(set(owners.get(package, ()))):
            dist = metadata.distribution(name)
            row = {"package": package, "distribution": name, "version": dist.version}
            rows.append(row | {"licence": _licence(dist)})
    return rows


def _licence(dist: metadata.Distribution) -> str:
    declared = dist.metadata.get_all("License-Expression") or [
        c.split(" :: ")[-1]
        for c in dist.metadata.get_all("Classifier") or []
        if c.startswith("License ::")
    ]
    return "; ".join(declared or dist.metadata.get_all("License") or ["not declared"])
