"""Reads a rank's tensors by published name into the blocks of device/layers.

A degree that does not divide the key heads gets heads of zeros: their keys, values and queries are
zero, and so is the output's part that reads them, so that they add exactly nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.layers.dense_attention import (
    DenseAttentionBlock,
    DenseAttentionWeights,
    DenseState,
    TurnedRows,
)
from flare_ray.device.layers.feed_forward import DenseFeedForward, FeedForward
from flare_ray.device.layers.rows import Span, dense_rows
from flare_ray.device.ops.ahead.api import shapes_alone
from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.ops.rmsnorm.api import RmsNorm
from flare_ray.device.ops.rotary.api import Rotary
from flare_ray.device.weights.loader import Split
from flare_ray.errors import CheckpointError
from flare_ray.recipes.declaration import COLUMNS, ROWS, Communicator
from flare_ray.recipes.llama.geometry import Geometry
from flare_ray.recipes.llama.state import rank_kv_heads
from flare_ray.recipes.llama.weights import DRAFT_TOKENS, EMBEDDING, HEAD
from flare_ray.recipes.reading import RankReader

NO_LIMIT = float("inf")
"""The activation's inputs are not bounded here."""
NEVER = -1e5
"""Logit of what is not drafted: nothing is left of it at any temperature, and it stays a number."""


class Reader(RankReader[Geometry]):
    """A rank's view of the checkpoint."""

    __slots__ = ()

    def norm(self, name: str) -> RmsNorm:
        """An RMS norm with the model's epsilon."""
        return RmsNorm(self.whole(f"{name}.weight"), eps=self.geometry.norm_eps)

    def by_head(self, name: str, dim: int) -> Tensor:
        """This rank's key heads' parts along a dimension, zeros where it has fewer than others."""
        heads = self.geometry.attention.kv_heads
        own = rank_kv_heads(self.geometry, self.comm.size)
        first = self.comm.rank * own
        parts = [
            self.weights.tensor(name, split=Split(dim, head, heads))
            for head in range(first, min(first + own, heads))
        ]
        if not parts:  # a rank of zeros alone still says that the tensor is in use
            parts = [torch.zeros_like(self.weights.tensor(name, split=Split(dim, 0, heads)))]
        parts += [torch.zeros_like(parts[0])] * (own - len(parts))
        return torch.cat(parts, dim=dim)


def vocabulary_head(reader: Reader) -> Linear:
    """This rank's rows of the vocabulary head; target and drafter share it."""

    def rows() -> Linear:
        if not reader.geometry.tied:
            return Linear(reader.rows(HEAD))
        embedding = reader.weights.shared(EMBEDDING)
        return Linear(embedding.chunk(reader.comm.size)[reader.comm.rank])

    return reader.weights.once(f"linear {HEAD}", rows)


class DraftHead:
    """The target's head over the tokens that the drafter may propose.

    Reading the whole head for every draft is most of a small drafter's work, while few tokens make
    up most of a text. A token outside is never drafted, which is lawful: its q is zero.

    Args:
        reader: of the checkpoint.
        prefix: of the drafter's layer, ends in a dot.
    Raises:
        CheckpointError: the tokens are not ascending ids of the vocabulary.
    """

    def __init__(self, reader: Reader, prefix: str) -> None:
        self._comm, self._size = reader.comm, reader.geometry.vocab_size
        self._tokens: Tensor | None = None
        if not reader.geometry.draft_vocab_size:
            self._rows = vocabulary_head(reader)
            return
        self._tokens = tokens = reader.whole(f"{prefix}{DRAFT_TOKENS}", dtype=torch.int64)
        if not shapes_alone(tokens.device):
            ids = tokens.tolist()
            if ids[0] < 0 or ids[-1] >= self._size or ids != sorted(set(ids)):
                raise CheckpointError(
                    f"{prefix}{DRAFT_TOKENS} must hold ascending ids below {self._size}"
                )
        own = tokens.chunk(reader.comm.size)[reader.comm.rank]
        tied = reader.geometry.tied
        head = reader.weights.shared(EMBEDDING) if tied else reader.whole(HEAD)
        self._rows = Linear(head.index_select(0, own))

    def __call__(self, hidden: Tensor) -> Tensor:
        """States [B, H] to logits [B, V] float32."""
        logits = self._comm.all_gather(self._rows(hidden)).to(torch.float32)
        if self._tokens is None:
            return logits
        everything = logits.new_full((logits.shape[0], self._size), NEVER)
        return everything.index_copy_(1, self._tokens, logits)


@dataclass(slots=True)
class Layer:
    """Attention and feed-forward, each on normalised rows, each added to the residual stream.

    keys, values: names of the layer's groups in the state store.
    """

    comm: Communicator
    attention_norm: RmsNorm
    attention: DenseAttentionBlock
    feed_forward_norm: RmsNorm
    feed_forward: FeedForward

    def __call__(self, x: Tensor, rows: TurnedRows, state: DenseState) -> Tensor:
        """Rows [R, H] to rows [R, H]; keys and values are written."""
        attended = self.attention(self.attention_norm(x), rows, state)
        x = x + self.comm.all_reduce(attended)
        fed = self.feed_forward(self.feed_forward_norm(x))
        return x + self.comm.all_reduce(fed)


def layer(reader: Reader, prefix: str) -> Layer:
    """One layer: `prefix` ends in a dot."""
    attention, dim = f"{prefix}self_attn.", reader.geometry.attention.head_dim
    joint = [reader.by_head(f"{attention}{part}_proj.weight", ROWS) for part in "qkv"]
    weights = DenseAttentionWeights(
        joint=torch.cat(joint),
        output=reader.by_head(f"{attention}o_proj.weight", COLUMNS),
        key_heads=joint[1].shape[0] // dim,
        head_dim=dim,
    )
    gate_up = [reader.rows(f"{prefix}mlp.{part}_proj.weight") for part in ("gate", "up")]
    down = reader.columns(f"{prefix}mlp.down_proj.weight")
    return Layer(
        comm=reader.comm,
        attention_norm=reader.norm(f"{prefix}input_layernorm"),
        attention=DenseAttentionBlock(weights),
        feed_forward_norm=reader.norm(f"{prefix}post_attention_layernorm"),
        feed_forward=DenseFeedForward(torch.cat(gate_up), down, limit=NO_LIMIT),
    )


def rotary(reader: Reader) -> Rotary:
    """Rotation of every layer's queries and keys."""
    frequencies = reader.geometry.attention.frequencies()
    return Rotary(torch.tensor(frequencies, dtype=torch.float32, device=reader.weights.device))


def placed(turning: Rotary, span: Span, dtype: torch.dtype, *, attends: bool = True) -> TurnedRows:
    """Indices and turns of a pass; `dtype` of the bias."""
    rows = dense_rows(span, dtype=dtype, attends=attends)
    return TurnedRows(rows, turning.turns(span.positions.reshape(-1)))
