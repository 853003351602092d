"""The bytes of every token id, from `tokenizer.json` (contract: K2).

Text decoded token by token is not the decoded text: a character may span tokens. Stops, grammars
and incremental detokenisation therefore work on bytes, which do concatenate.

Two vocabularies are understood: byte-level BPE, which spells byte b as one printable character,
and byte-fallback BPE, which spells a space as U+2581 and single bytes as `<0xHH>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from flare_ray.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
_SPACE_MARK = "\u2581"


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes of a vocabulary.

    Attributes:
        table: bytes by token id; b"" for special tokens and for ids without an entry.
        special_ids: ids that carry no text of their own.
    """

    table: tuple[bytes, ...]
    special_ids: frozenset[int]


def load_token_bytes(tokenizer_json: str | Path, *, vocab_size: int = 0) -> TokenBytes:
    """Bytes of every token of a `tokenizer.json`.

    Args:
        vocab_size: length of the table where the model's vocabulary is padded beyond the
            tokenizer's; 0 = the tokenizer's own.
    Raises:
        CheckpointError: the file is missing or malformed, its decoder is neither byte-level nor
            byte-fallback, or it has more ids than `vocab_size`.
    """
    path = Path(tokenizer_json)
    try:
        document = msgspec.json.decode(path.read_bytes())
        model, added = document["model"], document["added_tokens"] or []
        vocabulary: dict[str, int] = model["vocab"]
        decode = _decoder(document["decoder"], path)
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a readable tokenizer file: {error!r}") from error
    if not isinstance(vocabulary, dict):
        raise CheckpointError(
            f"{path}: model {model.get('type')!r} lists no token-to-id vocabulary; BPE is expected"
        )
    texts = {token: decode(text) for text, token in vocabulary.items()}
    special = set()
    for entry in added:
        texts[entry["id"]] = b"" if entry["special"] else entry["content"].encode()
        if entry["special"]:
            special.add(entry["id"])
    return _table(texts, special, vocab_size, path)


def token_bytes(tokenizer_json: str | Path, *, vocab_size: int = 0) -> list[bytes]:
    """The table alone, as `Controller` takes it; raises as `load_token_bytes`."""
    return list(load_token_bytes(tokenizer_json, vocab_size=vocab_size).table)


def _table(texts: dict[int, bytes], special: set[int], vocab_size: int, path: Path) -> TokenBytes:
    needed = max(texts, default=-1) + 1
    if 0 < vocab_size < needed:
        raise CheckpointError(
            f"{path} has token id {needed - 1}, the model's vocabulary ends at {vocab_size - 1}"
        )
    size = vocab_size or needed
    table = tuple(texts.get(token, b"") for token in range(size))
    return TokenBytes(table=table, special_ids=frozenset(special))


def _decoder(declared: Any, path: Path) -> Callable[[str], bytes]:
    """The inverse of how the vocabulary spells bytes, read from the file's decoder."""
    steps = declared["decoders"] if declared["type"] == "Sequence" else [declared]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level
    if "ByteFallback" in kinds and kinds <= {"ByteFallback", "Replace", "Fuse", "Strip"}:
        return _byte_fallback
    raise CheckpointError(
        f"{path}: decoder {sorted(kinds)} is neither byte-level nor byte-fallback; "
        "the bytes of its tokens are unknown"
    )


def _byte_alphabet() -> dict[str, int]:
    """Character to byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes
    take the characters from U+0100 on, in order (GPT-2's published table)."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(itself)]
    alphabet = {chr(byte): byte for byte in itself}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def _byte_level(text: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in text)
    except KeyError:
        # An entry outside the alphabet (an added word kept in the vocabulary) is written as it is.
        return text.encode()


def _byte_fallback(text: str) -> bytes:
    byte = _BYTE_TOKEN.match(text)
    if byte:
        return bytes([int(byte.group(1), 16)])
    return text.replace(_SPACE_MARK, " ").encode()
