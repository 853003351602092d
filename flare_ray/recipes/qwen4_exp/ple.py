"""Per-layer embedding of n-grams: hashed rows of a large table, gated by each stream, then a
dilated convolution over positions.

    e  = table rows of the bigrams and trigrams that end at the token
    k  = norm(e Wk) per stream;  v = e Wv;  q = norm(R) per stream
    s  = sqrt(max(|k q| / sqrt(H), 1e-6)) with the product's sign
    u  = sigmoid(s) (x) v
    R' = R + u + silu(convolution of norm(u), taps `size` positions apart)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.layers.rows import RecurrentRows, join_window
from flare_ray.device.layers.tables import EmbeddingTable, ShardedTable
from flare_ray.device.ops.ahead.api import shapes_alone
from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.ops.ngram_hash.api import NgramHash
from flare_ray.device.ops.short_conv.api import short_conv
from flare_ray.errors import CheckpointError
from flare_ray.recipes.qwen4_exp.blocks import Reader
from flare_ray.recipes.qwen4_exp.weights import hash_prefix
from flare_ray.recipes.tables import table_rows

MIN_GATE = 1e-6


@dataclass(slots=True)
class GramRows:
    """One pass's tokens [B, T], positions [B, T], and indices of both windows."""

    tokens: Tensor
    positions: Tensor
    history: RecurrentRows
    taps: RecurrentRows


class NgramMemory:
    """The per-layer embedding of one layer.

    Args:
        reader: of this rank.
        layer: number of the target layer, counted from 0.
    Raises:
        CheckpointError: stored hash constants are not those of config.json.
    """

    def __init__(self, reader: Reader, layer: int) -> None:
        geometry, ngram = reader.geometry, reader.geometry.ngram
        prefix = f"{geometry.layer_prefix(layer)}ple"
        streams = geometry.streams
        self._streams, self._size = streams, ngram.size
        self._hash = _checked_hash(reader, layer)
        self._table: EmbeddingTable = _table(reader, layer)
        key = reader.whole(f"{prefix}.key_proj.weight")
        value = reader.whole(f"{prefix}.value_proj.weight")
        self._joint = Linear(torch.cat((key, value)))
        self._flat = key.shape[0]
        self._norm_key = reader.norm(f"{prefix}.norm_key", groups=streams)
        self._norm_query = reader.norm(f"{prefix}.norm_query", groups=streams)
        self._norm_conv = reader.norm(f"{prefix}.norm_conv", groups=streams)
        taps = reader.whole(f"{prefix}.conv1d.weight", dtype=torch.float32)
        self._taps = taps.squeeze(1).t().contiguous()
        self._scale = 1.0 / math.sqrt(geometry.hidden)

    def __call__(self, flat: Tensor, rows: GramRows, tokens: Tensor, grams: Tensor) -> Tensor:
        """Add the embedding of every row.

        Args:
            flat: [B * T, S H] streams.
            rows: tokens and indices.
            tokens: [S + 1, size - 1 + 8] int64 window, written in place.
            grams: [S + 1, keep + 8, S H] window, written in place.
        Returns:
            [B * T, S H].
        """
        history = join_window(rows.tokens.reshape(-1), rows.history, tokens)
        hashed = self._hash.rows(history, rows.positions).flatten(0, 1)
        embedded = self._table.gather(hashed).flatten(1)
        joint = self._joint(embedded)
        key = self._norm_key(joint[:, : self._flat])
        product = (key * self._norm_query(flat)).unflatten(1, (self._streams, -1))
        score = product.sum(2, dtype=torch.float32).mul_(self._scale)
        gate = torch.sigmoid(score.abs().clamp_(min=MIN_GATE).sqrt_().mul_(score.sign()))
        value = joint[:, self._flat :].unsqueeze(1)
        gated = (gate.unsqueeze(2) * value).to(flat.dtype).flatten(1)
        joined = join_window(self._norm_conv(gated), rows.taps, grams)
        mixed = short_conv(joined, self._taps, dilation=self._size).flatten(0, 1)
        return flat + gated + mixed.to(flat.dtype)


def _checked_hash(reader: Reader, layer: int) -> NgramHash:
    ngram = reader.geometry.ngram
    constants, prefix = ngram.hashes[layer], hash_prefix(reader.geometry, layer)
    made = []
    for name, wanted in (
        ("layer_multipliers", constants.multipliers),
        ("ngram_heads_vocab_sizes", constants.primes),
        ("ngram_heads_offsets", constants.offsets),
    ):
        stored = reader.whole(f"{prefix}{name}", dtype=torch.int64)
        if not shapes_alone(stored.device) and stored.tolist() != list(wanted):
            raise CheckpointError(
                f"{prefix}{name} holds {stored.tolist()[:3]} ..., config.json asks for "
                f"{list(wanted)[:3]} ...: seed, vocab_size, ngram_vocab_size_base or "
                "heads_per_ngram are not those of the table; use the checkpoint's own config.json"
            )
        made.append(stored)
    return NgramHash(*made, reset=ngram.reset_id)


def _table(reader: Reader, layer: int) -> ShardedTable:
    ngram, prefix = reader.geometry.ngram, hash_prefix(reader.geometry, layer)
    names = [f"{prefix}ngram_embedding.shard_{n}.weight" for n in range(ngram.shards)]
    shard_rows = ngram.padded_rows[layer] // ngram.shards
    return ShardedTable(table_rows(reader, names), shard_rows=shard_rows, comm=reader.comm)
