"""What the generators draw from: words, functions and texts. Where these come from is the caller's
business: training reads dictionaries and installed packages, the frozen workload its own files.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Gloss:
    """One dictionary entry: part of speech (n, v, a, r), lemma, meaning."""

    part: str
    lemma: str
    meaning: str


@dataclass(slots=True)
class Corpus:
    """Everything a generator may draw from.

    Attributes:
        common: the words with the highest tagged-sense counts, in both splits on purpose so that
            they can be learnt.
        rare: the other words of this split.
        docs: Python documentation sources.
        docstrings: long docstrings of the code files.
        code: whole Python files.
        functions: dedented functions of 3 to 40 lines, ASCII.
        characters: characters of code by top-level package.
        prose: manuals and dictionary examples, in training only.
        long_context: generators write long conversations.
        scramble: part of the edited functions whose names are replaced by invented ones, so that
            only the prompt holds them.
        follow_ups: part of the edits that a second edit of the same function follows.
        copies: part of the edits that are texts to be copied instead.
        renames: part of the edits that are renames whatever is drawn, beside those drawn as such.
        restated: every edit begins with the request once more, not every second one.
    """

    common: list[Gloss]
    rare: list[Gloss]
    docs: list[str]
    docstrings: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    characters: dict[str, int] = field(default_factory=dict)
    prose: list[str] = field(default_factory=list)
    long_context: bool = False
    scramble: float = 0.0
    follow_ups: float = 0.0
    copies: float = 0.0
    renames: float = 0.0
    restated: bool = False
