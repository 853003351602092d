"""Workloads as they are read: a frozen folder, or a file that the importer wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from flare_ray.errors import ConfigError
from flare_ray.workload import frozen
from flare_ray.workload.items import (
    CATEGORIES,
    Expectation,
    Item,
    Settings,
    Source,
    decode_items,
    encode_items,
)
from flare_ray.workload.tokens import Encoder, encode_tokens, read_tokens, synthetic_items

IMPORT_TOKENS = 128
"""Output budget of an imported prompt."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Items, and where they come from.

    Attributes:
        name: version of a frozen workload, or the file's name.
        digest: SHA-256 of the items' bytes.
        tokens: prompt ids by item, where the workload holds them for the asked tokeniser.
    """

    name: str
    digest: str
    items: tuple[Item, ...]
    tokens: dict[str, tuple[int, ...]]


def load_workload(path: Path | None = None, *, encoder: Encoder | None = None) -> Workload:
    """The frozen workload of this package, or the one at `path`.

    Args:
        path: folder with a manifest, or a file of items; None = the package's own.
        encoder: whose ids are wanted; ids that no file holds are made from it.
    Raises:
        ConfigError: nothing readable is there, or a frozen file was changed.
    """
    where = frozen.FOLDER if path is None else path
    if where.is_dir():
        data = frozen.read_verified(where, frozen.ITEMS)
        manifest = msgspec.json.decode((where / frozen.MANIFEST).read_bytes(), type=frozen.Manifest)
        name, digest = manifest.version, manifest.files[frozen.ITEMS]
    else:
        data = _bytes_of(where)
        name, digest = where.name, frozen.sha256(data)
    try:
        items = tuple(decode_items(data))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: no workload item: {error}; use `workload import`") from error
    tokens: dict[str, tuple[int, ...]] = {}
    if encoder is not None:
        stored = where / f"tokens-{encoder.name}.jsonl"
        held = where.is_dir() and stored.is_file()
        lines = frozen.read_verified(where, stored.name) if held else encode_tokens(encoder, items)
        tokens = dict(read_tokens(lines))
    return Workload(name, digest, items, tokens)


def _bytes_of(path: Path) -> bytes:
    if not path.is_file():
        raise ConfigError(f"no workload at {path}: name a folder with a manifest, or a file")
    return path.read_bytes()


def chosen(items: tuple[Item, ...], categories: tuple[str, ...], sessions: int) -> tuple[Item, ...]:
    """The first `sessions` conversations of each category, whole, in the workload's order.

    Raises:
        ConfigError: a category has no items.
    """
    found: list[Item] = []
    for category in categories:
        rows = [item for item in items if item.category == category]
        if not rows:
            raise ConfigError(f"the workload has no items of {category}; known: {CATEGORIES}")
        kept = list(dict.fromkeys(item.session for item in rows))[:sessions]
        found += [item for item in rows if item.session in kept]
    return tuple(found)


class _Prompts(msgspec.Struct, forbid_unknown_fields=True):
    """A row of an external prompt file."""

    turns: list[str]


def import_prompts(path: Path, *, category: str, licence: str) -> list[Item]:
    """Items of an external prompt file, one JSON object a line: `{"turns": [text, ...]}`.

    Only the first turn is asked: what follows it rests on an answer that nobody recorded. The
    number of turns that were left out is in the item's source.

    Raises:
        ConfigError: the file is missing, or a line has another form.
    """
    decoder = msgspec.json.Decoder(_Prompts)
    items = []
    for number, line in enumerate(_bytes_of(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f'{path}:{number}: expected {{"turns": [text, ...]}}: {error}'
            ) from error
        if not row.turns:
            raise ConfigError(f"{path}:{number}: no turns")
        key = f"{path.stem}-{number}"
        left = f" ({len(row.turns) - 1} later turns left out)" if len(row.turns) > 1 else ""
        items.append(
            Item(
                item_id=key,
                category=category,
                session=key,
                turn=0,
                source=Source(name=path.name, key=f"line {number}{left}", licence=licence),
                settings=Settings(seed=number, max_tokens=IMPORT_TOKENS),
                messages=({"role": "user", "content": row.turns[0]},),
                expected=Expectation(),
            )
        )
    return items


def build_files(checkpoints: tuple[Path, ...]) -> dict[str, bytes]:
    """Every file of the frozen version, for the tokenisers of these checkpoints, from the seeds."""
    items, synthetic = frozen.make_items(), synthetic_items()
    files = {
        frozen.ITEMS: encode_items(items),
        frozen.SYNTHETIC_ITEMS: encode_items(synthetic),
    }
    digests = {}
    for checkpoint in checkpoints:
        encoder = Encoder(checkpoint)
        digests[encoder.name] = encoder.digest
        files[f"tokens-{encoder.name}.jsonl"] = encode_tokens(encoder, [*items, *synthetic])
    manifest = frozen.manifest_of(files, items, digests)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    return {**files, frozen.MANIFEST: text}
