"""Prose for training beside the Python documentation: HTML manuals and dictionary examples as plain
text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from flare_ray.workload.generators.wordlists import words

MANUALS = {
    "python-django-doc": "usr/share/doc/python-django-doc/html",
    "postgresql-doc-15": "usr/share/doc/postgresql-doc-15/html",
    "sqlite3-doc": "usr/share/doc/sqlite3",
    "python-sqlalchemy-doc": "usr/share/doc/python-sqlalchemy-doc/html",
}
"""Folder of the pages by Debian package: BSD, PostgreSQL, public domain, MIT."""

SKIPPED = re.compile(r"_modules|_static|genindex|modindex|searchindex|/search\.html|contents|toc")
MAX_PAGE_CHARS = 60_000
MAX_MANUAL_CHARS = 2_500_000
NAVIGATION_LINE = 100
"""The first line at least this long is the first paragraph; what stands more than a title above it
is navigation."""
_PLAIN = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014\u00a0", "''\"\"-- ", "\u00b6")
_BLOCKS = frozenset(words("p div li h1 h2 h3 h4 h5 dt dd pre tr table ul ol dl br section"))
_DROPPED = frozenset(words("script style head nav svg button"))
_PREFORMATTED = "pre"


class _Text(HTMLParser):
    """Collects visible text; blocks end lines, preformatted text keeps its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._dropped = self._preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._dropped += tag in _DROPPED
        self._preformatted += tag == _PREFORMATTED
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._dropped -= tag in _DROPPED and self._dropped > 0
        self._preformatted -= tag == _PREFORMATTED and self._preformatted > 0
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._dropped:
            self.parts.append(data if self._preformatted else re.sub(r"\s+", " ", data))


def page_text(html: str) -> str:
    """Visible text of a page from its first paragraph's title on, with ASCII quotes and dashes and
    at most one empty line between blocks.
    """
    parser = _Text()
    parser.feed(html)
    lines = [line.rstrip() for line in "".join(parser.parts).translate(_PLAIN).split("\n")]
    lines = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).split("\n")
    first = next((i for i, line in enumerate(lines) if len(line) >= NAVIGATION_LINE), len(lines))
    return "\n".join(lines[max(0, first - 2) :]).strip()


def manuals(unpacked: Path) -> Iterator[tuple[str, str]]:
    """(Debian package, text of one page), pages in a hashed order, each manual to a bound."""
    for package, folder in MANUALS.items():
        pages = sorted(p for p in (unpacked / folder).rglob("*.html") if not SKIPPED.search(str(p)))
        pages.sort(key=lambda p: hashlib.sha1(p.name.encode()).digest())
        total, seen = 0, set()
        for path in pages:
            text = page_text(path.read_text("utf-8", errors="ignore"))[:MAX_PAGE_CHARS]
            digest = hashlib.sha1(text.encode()).digest()
            if len(text) < 1500 or digest in seen:
                continue
            seen.add(digest)
            total += len(text)
            yield package, text
            if total > MAX_MANUAL_CHARS:
                break


def examples(wordnet: Path, parts: dict[str, str]) -> Iterator[str]:
    """Pages of dictionary entries with their example sentences, forty entries a page."""
    entries = []
    for name in parts.values():
        for line in (wordnet / f"data.{name}").read_text("latin-1").split("\n"):
            if line and not line.startswith("  ") and '"' in line:
                head, gloss = line.split("|", 1)
                word = head.split()[4].split("(")[0].replace("_", " ")
                entries.append(f"{word}: {gloss.strip()}")
    entries.sort(key=lambda e: hashlib.sha1(e.encode()).digest())
    for i in range(0, len(entries), 40):
        yield "\n".join(entries[i : i + 40])
