"""Text that the model wrote, in files, and rows of it for training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

FILE_BYTES = 12 * 2**20
"""Bytes of tokens in one file, so that each passes where files of 14 MiB do."""


@dataclass(slots=True)
class Texts:
    """Conversations: a prompt and what the model wrote behind it.

    Attributes:
        ids: token ids of every conversation, uint16.
        given: prompt tokens of each.
    """

    ids: list[np.ndarray] = field(default_factory=list)
    given: list[int] = field(default_factory=list)

    def written(self) -> int:
        """Tokens that the model wrote."""
        return sum(map(len, self.ids)) - sum(self.given)


class Writer:
    """Appends conversations to `sampled-N.npz`; whatever was added is on disk when it returns.

    Args:
        folder: of the files; those of an earlier run are continued behind the last one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._texts = folder, Texts()
        self._number = len(files(folder))

    def add(self, ids: Sequence[Sequence[int]], given: Sequence[int]) -> None:
        """Write more conversations."""
        self._texts.ids += [np.array(row, dtype=np.uint16) for row in ids]
        self._texts.given += given
        path = self._folder / f"sampled-{self._number}.npz"
        partial = self._folder / "writing-sampled.npz"
        np.savez(
            partial,
            ids=np.concatenate(self._texts.ids),
            lengths=np.array([len(row) for row in self._texts.ids], dtype=np.int32),
            given=np.array(self._texts.given, dtype=np.int32),
        )
        partial.rename(path)
        if path.stat().st_size > FILE_BYTES:
            self._texts, self._number = Texts(), self._number + 1


def files(folder: Path) -> list[Path]:
    """What a sampling run left, in its order."""
    found = folder.glob("sampled-*.npz")
    return sorted(found, key=lambda path: int(path.stem.split("-")[1]))


def read_texts(folder: Path) -> Texts:
    """Every conversation of a folder.

    Raises:
        FileNotFoundError: there is none.
    """
    texts = Texts()
    for path in files(folder):
        with np.load(path) as stored:
            ends = stored["lengths"].cumsum()[:-1]
            texts.ids += np.split(stored["ids"], ends)
            texts.given += stored["given"].tolist()
    if not texts.ids:
        raise FileNotFoundError(f"{folder} holds no sampled-*.npz: run `sample` into it first")
    return texts


def packed(
    texts: Texts, order: Sequence[int], count: int, length: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows of conversations one behind the other; a row begins with a whole one, and the last one
    of a row is cut off.

    Args:
        texts: to choose from.
        order: conversations in the order of their use, used up circularly.
        count: rows.
        length: tokens of a row.
    Returns:
        Ids [count, length] int64; whether the model wrote the token [count, length]; how many
        conversations were used.
    """
    ids = np.empty((count, length), dtype=np.int64)
    own = np.zeros((count, length), dtype=bool)
    used = 0
    for row in range(count):
        at = 0
        while at < length:
            number = order[used % len(order)]
            part = texts.ids[number][: length - at]
            ids[row, at : at + len(part)] = part
            own[row, at + texts.given[number] : at + len(part)] = True
            at, used = at + len(part), used + 1
    return ids, own, used
