"""Engram: hashed n-grams of the latest token ids read table rows that are added to the streams.

Tokens are hashed by compressed ids, under which tokens that normalise alike are one. The map
follows from the checkpoint's tokenizer; its size enters every multiplier, so another is refused.
Row numbers need token ids alone: they are computed for a whole pass before its first layer.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from flare_ray.device.layers.tables import EmbeddingTable
from flare_ray.device.ops.ahead.api import shapes_alone
from flare_ray.device.ops.engram.api import NgramRows, gated_write
from flare_ray.errors import CheckpointError
from flare_ray.recipes.deepseek_v41.attention import Multiply
from flare_ray.recipes.deepseek_v41.geometry import EngramShape
from flare_ray.recipes.deepseek_v41.rows import Ring

TOKENIZER_FILE = "tokenizer.json"
LONE_SPACE = "\ue000"
"""Stands for a token that is one space while the others lose theirs."""
UNDECODED = "\ufffd"


@functools.lru_cache(maxsize=4)
def token_map(folder: Path, vocab_size: int) -> tuple[tuple[int, ...], int]:
    """Compressed id of every token id, numbered in order of first appearance, and their count.

    A token that is part of a character keeps its own spelling as key. Ids that the tokenizer does
    not have, which no text gives, count as token 0.

    Raises:
        CheckpointError: the folder has no usable tokenizer.json.
    """
    from tokenizers import Regex, Tokenizer, normalizers

    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist; the Engram tables are hashed by its tokens: copy it from the "
            "published checkpoint"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{path} cannot be read: {error}; download it again") from error
    steps = [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(LONE_SPACE, " "),
    ]
    normalise = normalizers.Sequence(steps).normalize_str
    numbers: dict[str, int] = {}
    result = []
    known = tokenizer.get_vocab_size(with_added_tokens=True)
    for token in range(known):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if UNDECODED in text else normalise(text) or text
        result.append(numbers.setdefault(key or "", len(numbers)))
    result += [result[0]] * (vocab_size - known)
    return tuple(result[:vocab_size]), len(numbers)


class Engram:
    """Row numbers of a pass, and the additions of its layers.

    Args:
        shape: of the tables.
        rows: all tables' columns.
        folder: of the checkpoint.
        vocab_size: ids to map.
        device: of the ids.
    Raises:
        CheckpointError: the tokenizer is missing or another than the tables were made for.
    """

    def __init__(
        self,
        shape: EngramShape,
        rows: NgramRows,
        *,
        folder: Path,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.history = shape.max_ngram - 1
        self._rows = rows
        if shapes_alone(device):
            self._map, self._pad = torch.empty(vocab_size, dtype=torch.int64, device=device), 0
            return
        mapped, count = token_map(folder, vocab_size)
        if count != shape.compressed_ids:
            raise CheckpointError(
                f"{folder / TOKENIZER_FILE} gives {count} compressed ids, the Engram tables were "
                f"made for engram_compressed_vocab_size {shape.compressed_ids}; use the tokenizer "
                "of this checkpoint"
            )
        self._map = torch.tensor(mapped, device=device)
        self._pad = int(mapped[shape.pad_id])

    def numbers(self, tokens: Tensor, ring: Ring, ids: Tensor) -> Tensor:
        """Table rows [tables, R, columns] of tokens [R].

        Args:
            ids: [S + 1, entries] int64 state, written.
        """
        buffer = ring.store(ids, self._map.index_select(0, tokens))
        index = ring.index
        taken = buffer.index_select(0, index.clamp(min=0).view(-1)).view_as(index)
        return self._rows(taken.masked_fill_(index < 0, self._pad))


class EngramLayer:
    """One layer's table and gate.

    Args:
        table: rows by number.
        project: rows side by side -> a key per stream, then the value.
        factor: [n, H] float32.
        eps: of the norms.
    """

    def __init__(
        self, table: EmbeddingTable, project: Multiply, factor: Tensor, *, eps: float
    ) -> None:
        self._table = table
        self._project = project
        self._factor = factor
        self._eps = eps

    def __call__(self, streams: Tensor, numbers: Tensor) -> Tensor:
        """Streams [R, n, H] with what rows `numbers` [R, columns] add."""
        joint = self._project(self._table.gather(numbers).flatten(1))
        return gated_write(streams, joint, self._factor, eps=self._eps)
