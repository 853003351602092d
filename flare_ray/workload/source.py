"""Workloads as they are read: a frozen folder, or a file that the importer wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from flare_ray.errors import ConfigError
from flare_ray.workload import frozen
from flare_ray.workload.items import (
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
        manifest = frozen.read_manifest(where)
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
        stored = where / tokens_file(encoder.name)
        held = where.is_dir() and stored.is_file()
        lines = frozen.read_verified(where, stored.name) if held else encode_tokens(encoder, items)
        tokens = dict(read_tokens(lines))
    return Workload(name, digest, items, tokens)


def _bytes_of(path: Path) -> bytes:
    if not path.is_file():
        raise ConfigError(f"no workload at {path}: name a folder with a manifest, or a file")
    return path.read_bytes()


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


def build_files(checkpoints: tuple[Path, ...], *, kept: Path | None = None) -> dict[str, bytes]:
    """Every file of the frozen version: items from the seeds, ids for these checkpoints.

    Args:
        kept: folder of the version as it is, whose ids for other tokenisers stay.
    Raises:
        ConfigError: a file that would be kept was changed.
    """
    items, synthetic = frozen.make_items(), synthetic_items()
    files = {
        frozen.ITEMS: encode_items(items),
        frozen.SYNTHETIC_ITEMS: encode_items(synthetic),
    }
    digests: dict[str, str] = {}
    if kept is not None and (kept / frozen.MANIFEST).is_file():
        digests |= frozen.read_manifest(kept).tokenizers
        files |= {(n := tokens_file(name)): frozen.read_verified(kept, n) for name in digests}
    for checkpoint in checkpoints:
        encoder = Encoder(checkpoint)
        digests[encoder.name] = encoder.digest
        files[tokens_file(encoder.name)] = encode_tokens(encoder, [*items, *synthetic])
    manifest = frozen.manifest_of(files, items, digests)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    return {**files, frozen.MANIFEST: text}


def tokens_file(name: str) -> str:
    """File of the ids for the tokeniser of this name (`Encoder.name`)."""
    return f"tokens-{name}.jsonl"
