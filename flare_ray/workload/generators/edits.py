"""Mechanical edits of real functions: the answer is the whole edited function, mostly copied."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import NamedTuple

from flare_ray.workload.generators.base import Conversation, Message, assistant, user
from flare_ray.workload.generators.corpus import Corpus
from flare_ray.workload.generators.recall import excerpt
from flare_ray.workload.generators.records import json_records
from flare_ray.workload.generators.wordlists import invented_name, words

SAFE_NAMES = words(
    """
    item value result data entry total index name key node count text path size obj left right
    first second flag
    """
)
TRIES = 40
COPY_REQUESTS = ("Copy this text.", "Repeat this exactly:", "Write this once more:")


class Edit(NamedTuple):
    """The request, without final stop, and the edited source."""

    request: str
    source: str


def _new_name(r: random.Random) -> str:
    return r.choice(SAFE_NAMES) + r.choice(("", "_a", "_b", "_new", "_x", "2"))


def _head(source: str) -> re.Match[str] | None:
    return re.match(r"def (\w+)\((.*?)\)", source, re.S)


def _rename_variable(r: random.Random, source: str) -> Edit | None:
    new = _new_name(r)
    found = (
        set(re.findall(r"(?<![\w.\"'])([a-z_]\w+)(?=\s*=[^=])", source))
        - set(SAFE_NAMES)
        - {"self"}
    )
    if not found or new in source:
        return None
    old = r.choice(sorted(found))
    return Edit(f"Rename {old} to {new}", re.sub(rf"(?<![\w.]){old}(?!\w)", new, source))


def _rename_function(r: random.Random, source: str) -> Edit | None:
    new, head = _new_name(r), _head(source)
    if head is None:
        return None
    return Edit(f"Rename the function to {new}", re.sub(rf"\b{head.group(1)}\b", new, source))


def _change_number(r: random.Random, source: str) -> Edit | None:
    numbers = sorted(set(re.findall(r"(?<![\w.])\d{1,4}(?![\w.])", source)))
    if not numbers:
        return None
    old, new = r.choice(numbers), str(r.randint(2, 999))
    return Edit(f"Change {old} to {new}", re.sub(rf"(?<![\w.]){old}(?![\w.])", new, source))


def _add_comment(r: random.Random, source: str) -> Edit | None:
    comment = f"# {r.choice(('TODO', 'NOTE', 'FIXME'))}: check {r.choice(SAFE_NAMES)}"
    return Edit(f"Add the comment {comment} above the function", f"{comment}\n{source}")


def _add_parameter(r: random.Random, source: str) -> Edit | None:
    new, head = _new_name(r), _head(source)
    if (
        head is None
        or not head.group(2).strip()
        or head.group(2).strip().endswith(",")
        or "*" in head.group(2)
    ):
        return None
    end = head.end(2)
    return Edit(f"Add the parameter {new}=None", f"{source[:end]}, {new}=None{source[end:]}")


def scrambled(r: random.Random, source: str) -> str:
    """The function with up to four of its names replaced by invented ones, everywhere."""
    head = _head(source)
    names = set(re.findall(r"(?<![\w.\"'])([a-z_]\w{2,})(?=\s*=[^=])", source)) - {"self"}
    names |= {head.group(1)} if head else set()
    for old in r.sample(sorted(names), min(len(names), r.randint(1, 4))):
        new = "_".join(invented_name(r).lower() for _ in range(r.choice((1, 1, 2))))
        if new.isidentifier() and new.isascii() and new not in source:
            source = re.sub(rf"(?<![\w.]){old}(?!\w)", new, source)
    return source


KINDS: tuple[Callable[[random.Random, str], Edit | None], ...] = (
    _rename_variable,
    _rename_variable,
    _rename_function,
    _change_number,
    _add_comment,
    _add_parameter,
)


def _drawn_edit(r: random.Random, corpus: Corpus, source: str) -> Edit | None:
    """One of the edits, where the drawn one fits this function and changes it."""
    rename = corpus.renames and r.random() < corpus.renames
    edit = (_rename_variable if rename else r.choice(KINDS))(r, source)
    return None if edit is None or edit.source == source else edit


def _answer(r: random.Random, corpus: Corpus, edit: Edit) -> Message:
    """The edited function, behind the request once more: always, or every second time."""
    again = edit.request + "."
    reasoning = r.choice((again if corpus.restated else "", again))
    return assistant(f"```python\n{edit.source}\n```", reasoning)


def _turn(r: random.Random, corpus: Corpus) -> list[Message]:
    for _ in range(TRIES):
        source = r.choice(corpus.functions)
        if r.random() < corpus.scramble:
            source = scrambled(r, source)
        edit = _drawn_edit(r, corpus, source)
        if edit is None:
            continue
        question = r.choice(
            (
                f"{edit.request}:\n```python\n{source}\n```",
                f"```python\n{source}\n```\n{edit.request}.",
                f"{edit.request} in this function.\n```python\n{source}\n```",
            )
        )
        return [user(question), _answer(r, corpus, edit), *_follow_up(r, corpus, edit.source)]
    return json_records(
        r, corpus
    ).messages  # no function admits the drawn edits: rare, and still a copying task


def _follow_up(r: random.Random, corpus: Corpus, source: str) -> list[Message]:
    """Another edit of the function that was just written, sometimes."""
    if not corpus.follow_ups or r.random() >= corpus.follow_ups:
        return []
    edit = _drawn_edit(r, corpus, source)
    if edit is None:
        return []
    question = r.choice((f"{edit.request}.", f"{edit.request} too.", f"Now this: {edit.request}."))
    return [user(question), _answer(r, corpus, edit)]


def _copy(r: random.Random, corpus: Corpus) -> list[Message]:
    """A text to be repeated as it is: lines of a document or a source, or invented words, which
    only their own first occurrence predicts.
    """
    if r.random() < 0.5:
        text = excerpt(r, r.choice((corpus.docs, corpus.code)), r.randint(80, 700)).strip()
    else:
        names = [invented_name(r).lower() for _ in range(r.randint(3, 12))]
        text = " ".join(r.choice(names) for _ in range(r.randint(6, 80)))
    return [
        user(f"{r.choice(COPY_REQUESTS)}\n```\n{text}\n```"),
        assistant(f"```\n{text}\n```", r.choice(("", "Copy the text."))),
    ]


def edit_code(r: random.Random, corpus: Corpus) -> Conversation:
    """One edit, or several functions one after the other in a long row; some texts to copy."""
    messages = []
    for _ in range(r.randint(2, 5) if corpus.long_context else 1):
        copied = corpus.copies and r.random() < corpus.copies
        messages += (_copy if copied else _turn)(r, corpus)
    return Conversation(messages)
