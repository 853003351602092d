"""The frozen workload: its version, how it is made from seeds, and how its files are verified.

`make_items` is the definition; the files under `frozen/` are its output, committed so that a
measurement names bytes and not a generator. A test makes them again and compares every byte
(contract: B1). A change of generators or texts needs a new version beside the old one.

    items.jsonl       conversations and texts of eight categories
    synthetic.jsonl   the serving corpus; its prompts are token ids, made for one tokeniser (B6)
    tokens-T.jsonl    ids of every item's prompt under tokeniser and template T
    manifest.json     hashes, counts, licences
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from flare_ray.errors import ConfigError
from flare_ray.workload.checks import fenced
from flare_ray.workload.generators.agentic import agentic_session
from flare_ray.workload.generators.base import Conversation, Message
from flare_ray.workload.generators.chat import chat, define
from flare_ray.workload.generators.corpus import Corpus
from flare_ray.workload.generators.edits import edit_code
from flare_ray.workload.generators.recall import excerpt, far_recall
from flare_ray.workload.generators.records import json_records
from flare_ray.workload.generators.story import story
from flare_ray.workload.generators.sums import math
from flare_ray.workload.generators.tools import tool_use
from flare_ray.workload.items import (
    CATEGORIES,
    Expectation,
    Item,
    Settings,
    Source,
    openai_messages,
)
from flare_ray.workload.own_corpus import own_corpus

VERSION = "v1"
FOLDER = Path(__file__).parent / "frozen" / VERSION
LICENCE = "Apache-2.0"
ITEMS, SYNTHETIC_ITEMS, MANIFEST = "items.jsonl", "synthetic.jsonl", "manifest.json"
FIRST_SEED = 40_000
SESSIONS, SESSION_TASKS = 12, (1, 2, 3)
PREFIX_GROUPS, PREFIX_BRANCHES, PREFIX_CHARACTERS = 2, 8, 1500
LONG_CHARACTERS = (4000, 7000)

Generator = Callable[[random.Random, Corpus], Conversation]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the files of one version are.

    Attributes:
        files: SHA-256 by file name.
        counts: items by category.
        tokenizers: SHA-256 over tokenizer.json and template, by the T of tokens-T.jsonl.
        licences: licences of the items.
    """

    version: str
    files: dict[str, str]
    counts: dict[str, int]
    tokenizers: dict[str, str]
    licences: tuple[str, ...]


def make_items() -> list[Item]:
    """All items of this version, in the order of `CATEGORIES`."""
    corpus = own_corpus()
    found = [
        *_agentic(),
        *_single("tool_json", {"tool": tool_use, "json": json_records}, 24, corpus),
        *_single("edit", {"edit": edit_code}, 48, corpus),
        *_single("reasoning", {"sums": math}, 48, corpus),
        *_single("chat", {"talk": chat, "define": define, "story": story}, 16, corpus),
        *_long(corpus),
        *_prefix_tails(corpus),
        *_prefix_repeats(corpus),
    ]
    names = Counter(item.item_id for item in found)
    assert max(names.values()) == 1, names.most_common(1)
    return found


def _agentic() -> Iterator[Item]:
    """Every assistant turn of every session, behind its recorded past."""
    for number in range(SESSIONS):
        key = f"agentic-{number}"
        r = _random(key)
        conversation = agentic_session(r, SESSION_TASKS[number % len(SESSION_TASKS)])
        turns = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        for turn, at in enumerate(turns):
            yield _item(key, "agentic", conversation, at=at, turn=turn)


def _single(
    category: str, generators: Mapping[str, Generator], count: int, corpus: Corpus
) -> Iterator[Item]:
    """`count` items of each generator: the first answer of a conversation of theirs."""
    for name, generate in generators.items():
        for number in range(count):
            key = f"{name}-{number}"
            conversation = generate(_random(key), corpus)
            at = next(i for i, m in enumerate(conversation.messages) if m["role"] == "assistant")
            yield _item(key, category, conversation, at=at)


def _long(corpus: Corpus) -> Iterator[Item]:
    """Recall of a code far back, and raw continuations of long texts."""
    for number in range(12):
        key = f"recall-{number}"
        r = _random(key)
        messages, answer = far_recall(r, corpus, r.randint(*LONG_CHARACTERS))
        conversation = Conversation([*messages, {"role": "assistant", "content": answer}])
        yield _item(key, "long", conversation, at=len(messages))
    for number in range(12):
        key = f"continue-{number}"
        r = _random(key)
        texts = corpus.docs if number % 2 else ["\n\n\n".join(corpus.functions)]
        text = excerpt(r, texts, r.randint(*LONG_CHARACTERS))
        yield Item(
            item_id=key,
            category="long",
            session=key,
            turn=0,
            source=_source("continue", key),
            settings=_settings(key, 64),
            prompt=text,
        )


def _prefix_tails(corpus: Corpus) -> Iterator[Item]:
    """One long prefix, eight questions about it."""
    for group in range(PREFIX_GROUPS):
        key = f"tails-{group}"
        head = _prefix(key, corpus)
        for branch in range(PREFIX_BRANCHES):
            name = f"{key}-{branch}"
            conversation = math(_random(name), corpus)
            messages = [*head, *conversation.messages[:2]]
            yield _item(name, "prefix_tails", Conversation(messages), at=len(messages) - 1)


def _prefix_repeats(corpus: Corpus) -> Iterator[Item]:
    """One prompt, eight times: only the sampling seed differs."""
    for group in range(PREFIX_GROUPS):
        key = f"repeats-{group}"
        conversation = math(_random(key), corpus)
        messages = [*_prefix(key, corpus), *conversation.messages[:2]]
        first = _item(key, "prefix_repeats", Conversation(messages), at=len(messages) - 1)
        for branch in range(PREFIX_BRANCHES):
            name = f"{key}-{branch}"
            settings = _settings(name, first.settings.max_tokens)
            yield msgspec.structs.replace(first, item_id=name, session=name, settings=settings)


def _prefix(key: str, corpus: Corpus) -> list[Message]:
    text = excerpt(_random(key + "-prefix"), corpus.docs, PREFIX_CHARACTERS)
    return [{"role": "system", "content": f"You answer questions. Keep this in mind:\n{text}"}]


def _item(key: str, category: str, conversation: Conversation, *, at: int, turn: int = 0) -> Item:
    """The item whose answer is message `at` of a conversation."""
    answer = conversation.messages[at]
    budget = {"edit": 256, "chat": 96, "agentic": 96}.get(category, 112)
    return Item(
        item_id=key if category != "agentic" else f"{key}-{turn}",
        category=category,
        session=key,
        turn=turn,
        source=_source(key.rpartition("-")[0], key),
        settings=_settings(f"{key}-{turn}", budget),
        messages=openai_messages(conversation.messages[:at]),
        tools=tuple(conversation.tools or ()),
        expected=_expectation(key, answer),
        prediction=_copiable(conversation.messages[at - 1]) if category == "edit" else "",
    )


def _copiable(question: Message) -> str:
    """What a client that asks for an edit predicts: the code as it stands."""
    return f"```python\n{fenced(question['content'])}```"


def _expectation(key: str, answer: Message) -> Expectation:
    calls, content = answer.get("tool_calls"), str(answer.get("content") or "")
    if calls:
        return Expectation(check="calls", value=list(calls))
    if key.startswith("json-"):
        return Expectation(check="json", value=msgspec.json.decode(content))
    if content.startswith("```python\n"):
        return Expectation(check="code", value=content[len("```python\n") :].removesuffix("\n```"))
    if key.startswith(("talk-", "define-", "story-")):
        return Expectation()
    return Expectation(check="exact", value=content)


def _source(generator: str, key: str) -> Source:
    return Source(name=generator, key=str(_seed(key)), licence=LICENCE)


def _settings(key: str, max_tokens: int) -> Settings:
    return Settings(seed=_seed("sampling " + key) % (1 << 31), max_tokens=max_tokens)


def _seed(key: str) -> int:
    digest = hashlib.sha256(f"{VERSION} {FIRST_SEED} {key}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _random(key: str) -> random.Random:
    return random.Random(_seed(key))


def manifest_of(
    files: Mapping[str, bytes], items: Sequence[Item], digests: Mapping[str, str]
) -> Manifest:
    """The manifest of these files.

    Args:
        digests: of tokenisers, by name.
    """
    counts = Counter(item.category for item in items)
    return Manifest(
        version=VERSION,
        files={name: sha256(data) for name, data in sorted(files.items())},
        counts={category: counts[category] for category in CATEGORIES},
        tokenizers=dict(sorted(digests.items())),
        licences=tuple(sorted({item.source.licence for item in items})),
    )


def sha256(data: bytes) -> str:
    """Hexadecimal digest."""
    return hashlib.sha256(data).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Manifest of a frozen workload.

    Raises:
        ConfigError: the folder has none.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(f"{folder} has no {MANIFEST}: name the folder of a workload")
    return msgspec.json.decode(path.read_bytes(), type=Manifest)


def read_verified(folder: Path, name: str) -> bytes:
    """A file of a frozen workload, its hash compared with the manifest.

    Raises:
        ConfigError: the file is missing, unknown to the manifest, or changed.
    """
    manifest = read_manifest(folder)
    if name not in manifest.files or not (folder / name).is_file():
        raise ConfigError(f"workload {manifest.version} has {sorted(manifest.files)}, not {name}")
    data = (folder / name).read_bytes()
    found = sha256(data)
    if found != manifest.files[name]:
        raise ConfigError(
            f"{folder / name} has SHA-256 {found[:12]}..., the manifest {manifest.files[name][:12]}"
            "...: a frozen workload is never edited, make a new version"
        )
    return data
