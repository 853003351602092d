"""Reads a rank's tensors by published name into the blocks of target and drafter.

What is divided, and along which dimension, stands in weights.py; here each request repeats it, and
the loader refuses a disagreement.

A product whose weights are stored in FP8 or FP4 rounds its inputs as the published model does; the
grouped output projection is the exception (contract: R5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.layers.feed_forward import FeedForward, MixtureOfExperts, Router
from flare_ray.device.layers.tables import ColumnTable, EmbeddingTable
from flare_ray.device.ops.engram.api import NgramRows
from flare_ray.device.ops.hyper_connection.api import HyperConnection, SinkhornShape, mix_out
from flare_ray.device.ops.key_rounding.api import round_fp4, round_fp4_e4m3, round_fp8
from flare_ray.device.ops.linear.api import Linear, Parts
from flare_ray.device.ops.moe.api import Experts, ExpertWeights, SharedExperts
from flare_ray.device.ops.rmsnorm.api import RmsNorm
from flare_ray.device.weights.budget import shard_bounds
from flare_ray.errors import CheckpointError, ConfigError
from flare_ray.recipes.declaration import Communicator
from flare_ray.recipes.deepseek_v41.attention import (
    Attention,
    AttentionWeights,
    Compressor,
    Multiply,
    Rounding,
    Selector,
)
from flare_ray.recipes.deepseek_v41.engram import Engram, EngramLayer
from flare_ray.recipes.deepseek_v41.geometry import QUANTISED_GROUP, Geometry, Mode, MoeShape
from flare_ray.recipes.deepseek_v41.weights import HEAD, layer_prefix, tables
from flare_ray.recipes.fields import check_shared
from flare_ray.recipes.packed import StoredExperts, packed_experts, packed_stack
from flare_ray.recipes.reading import RankReader
from flare_ray.recipes.tables import table_rows

_PARTS = ("w1", "w3", "w2")
"""Gate, up and down."""


class Reader(RankReader[Geometry]):
    """A rank's view of the checkpoint."""

    __slots__ = ()

    def norm(self, name: str) -> RmsNorm:
        """An RMS norm with the model's epsilon."""
        return RmsNorm(self.whole(f"{name}.weight"), eps=self.geometry.norm_eps)

    def product(self, name: str, weight: Tensor) -> Multiply:
        """Multiplication by a read weight, inputs rounded where it is stored quantised."""
        linear = Linear(weight)
        if not self.weights.is_quantised(name):
            return linear
        if weight.shape[1] % QUANTISED_GROUP:
            raise ConfigError(
                f"{name}: {weight.shape[1]} inputs per rank are not whole groups of "
                f"{QUANTISED_GROUP}, which its rounded inputs need; choose another "
                "tensor_parallel_size"
            )
        return _Rounded(linear)


class _Rounded:
    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(round_fp8(x))


class _Wide:
    """A float32 product, whatever the rows are."""

    def __init__(self, weight: Tensor) -> None:
        self._linear = Linear(weight)

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x.to(torch.float32))


class _SideBySide:
    def __init__(self, *products: Multiply) -> None:
        self._products = products

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([product(x) for product in self._products], dim=1)


def check_divisible(geometry: Geometry, world_size: int) -> None:
    """Refuse a TP degree that some divided size does not admit.

    Raises:
        ConfigError: names every such size.
    """
    sizes = {
        "num_attention_heads": geometry.attention.heads,
        "o_groups": geometry.attention.groups,
        "moe_intermediate_size": geometry.moe.width,
        "vocab_size": geometry.vocab_size,
    }
    if geometry.engram.layers:
        sizes["Engram columns"] = geometry.engram.columns
    check_shared(sizes, world_size)


def vocabulary_head(reader: Reader) -> Multiply:
    """This rank's rows of the vocabulary head, float32; it exists once."""
    return reader.weights.once(
        f"linear {HEAD}", lambda: _Wide(reader.rows(HEAD, dtype=torch.float32))
    )


def wide_rows(reader: Reader, name: str) -> Multiply:
    """A float32 product by this rank's rows."""
    return _Wide(reader.rows(name, dtype=torch.float32))


def rounding(geometry: Geometry) -> Rounding:
    """The roundings of cached values that the model was trained with."""
    if not geometry.rounds_keys:
        return Rounding(_as_it_is, _as_it_is, _as_it_is)
    return Rounding(key=round_fp8, entry=round_fp4_e4m3, index=round_fp4)


def _as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass(slots=True)
class Block:
    """What target layers and drafter stages share: two sites, attention and experts."""

    mix_attention: HyperConnection
    attention_norm: RmsNorm
    attention: Attention
    mix_feed_forward: HyperConnection
    feed_forward_norm: RmsNorm
    feed_forward: FeedForward

    def run(
        self, streams: Tensor, before: Tensor, attend: Multiply, comm: Communicator
    ) -> tuple[Tensor, Tensor]:
        """Streams [R, n, H] and the coefficients [R, n] that the next block's input takes.

        Args:
            attend: normed rows -> this rank's partial sum of the attention.
        """
        x, handed, site = self.mix_attention.mix_late(streams, before)
        streams = mix_out(comm.all_reduce(attend(self.attention_norm(x))), streams, site)
        x, after, site = self.mix_feed_forward.mix_late(streams, handed)
        fed = self.feed_forward(self.feed_forward_norm(x))
        return mix_out(comm.all_reduce(fed), streams, site), after


def first_coefficients(rows: int, streams: int, device: torch.device) -> Tensor:
    """[R, n] float32: the first block takes the first stream."""
    result = torch.zeros((rows, streams), device=device)
    result[:, 0] = 1.0
    return result


def block(reader: Reader, prefix: str, moe: MoeShape, layer: int | None = None) -> Block:
    """A target layer, or a drafter stage (`layer` None)."""
    return Block(
        mix_attention=_hyper_connection(reader, f"{prefix}hc_attn"),
        attention_norm=reader.norm(f"{prefix}attn_norm"),
        attention=_attention(reader, f"{prefix}attn.", layer),
        mix_feed_forward=_hyper_connection(reader, f"{prefix}hc_ffn"),
        feed_forward_norm=reader.norm(f"{prefix}ffn_norm"),
        feed_forward=_mixture(reader, f"{prefix}ffn.", moe),
    )


def _hyper_connection(reader: Reader, prefix: str) -> HyperConnection:
    hyper = reader.geometry.hyper
    fn, base, scale = (
        reader.whole(f"{prefix}_{part}", dtype=torch.float32) for part in ("fn", "base", "scale")
    )
    shape = SinkhornShape(hyper.iterations, hyper.eps, reader.geometry.norm_eps)
    return HyperConnection(fn, base, scale, streams=hyper.streams, shape=shape)


def _attention(reader: Reader, prefix: str, layer: int | None) -> Attention:
    geometry, shape = reader.geometry, reader.geometry.attention
    groups = shape.groups // reader.comm.size
    first, key = f"{prefix}wq_a.weight", f"{prefix}wkv.weight"
    if reader.weights.is_quantised(first) == reader.weights.is_quantised(key):
        both = torch.cat((reader.whole(first), reader.whole(key)))
        joint: Multiply = reader.product(first, both)
    else:
        products = [reader.product(name, reader.whole(name)) for name in (first, key)]
        joint = _SideBySide(*products)
    query, output = f"{prefix}wq_b.weight", f"{prefix}wo_b.weight"
    group = reader.rows(f"{prefix}wo_a.weight").view(groups, shape.group_rank, -1)
    weights = AttentionWeights(
        joint=joint,
        query=reader.product(query, reader.rows(query)),
        query_norm=reader.norm(f"{prefix}q_norm"),
        key_norm=reader.norm(f"{prefix}kv_norm"),
        sink=reader.rows(f"{prefix}attn_sink", dtype=torch.float32),
        group=Parts(group),
        output=reader.product(output, reader.columns(output)),
    )
    mode = Mode.WINDOW if layer is None else geometry.mode(layer)
    return Attention(
        weights,
        rounding(geometry),
        compressor=_compressor(reader, prefix, geometry.ratios[layer])
        if mode is Mode.FULL and layer is not None
        else None,
        selector=_selector(reader, prefix, layer)
        if mode in (Mode.FULL, Mode.REINDEX) and layer is not None
        else None,
    )


def _compressor(reader: Reader, prefix: str, ratio: int) -> Compressor:
    name = f"{prefix}compressor."
    project: Multiply
    if ratio > 1:
        parts = [
            reader.whole(f"{name}{part}.weight", dtype=torch.float32) for part in ("wkv", "wgate")
        ]
        project = _Wide(torch.cat(parts))
    else:
        project = Linear(reader.whole(f"{name}wkv.weight"))
    return Compressor(
        project=project,
        norm=reader.norm(f"{name}norm"),
        key=Linear(reader.whole(f"{prefix}indexer.wk.weight")),
        key_norm=reader.norm(f"{prefix}indexer.k_norm"),
        rounding=rounding(reader.geometry),
    )


def _selector(reader: Reader, prefix: str, layer: int) -> Selector:
    index = reader.geometry.index
    query = f"{prefix}indexer.wq_b.weight"
    return Selector(
        query=reader.product(query, reader.whole(query)),
        weigh=Linear(reader.whole(f"{prefix}indexer.weights_proj.weight")),
        rounding=rounding(reader.geometry),
        heads=index.heads,
        top_k=index.top_k,
        bounds=layer == index.candidate_layer,
        blocks=index.candidate_blocks,
        size=index.candidate_size,
    )


def _mixture(reader: Reader, prefix: str, moe: MoeShape) -> MixtureOfExperts:
    geometry, weights = reader.geometry, reader.weights
    router = Router(
        weight=reader.whole(f"{prefix}gate.weight", dtype=torch.float32),
        bias=reader.whole(f"{prefix}gate.bias", dtype=torch.float32),
        top_k=moe.top_k,
        scale=moe.scale,
        scoring="sqrt_softplus",
    )
    names = [f"{prefix}experts.{expert}" for expert in range(moe.experts)]
    shared = f"{prefix}shared_experts"
    kinds = {
        weights.is_quantised(f"{name}.{part}.weight")
        for name in (*names, shared)
        for part in _PARTS
    }
    if len(kinds) > 1:
        raise CheckpointError(
            f"{prefix}experts and shared_experts are stored quantised in part; use a checkpoint "
            "that stores all of a layer's experts alike"
        )
    rounded = round_fp8 if True in kinds else None
    width, limit = moe.width // reader.comm.size, geometry.swiglu_limit
    stack = packed_stack(reader, StoredExperts(names, width, geometry.hidden, _PARTS))
    if stack is not None:
        plain = SharedExperts(_expert_weights(reader, [shared], width))
        packed = packed_experts(
            reader, stack, plain, top_k=moe.top_k, limit=limit, rounding=rounded
        )
        return MixtureOfExperts(router, packed)
    experts = Experts(
        _expert_weights(reader, [*names, shared], width),
        shared=1,
        top_k=moe.top_k,
        limit=limit,
        rounding=rounded,
    )
    return MixtureOfExperts(router, experts)


def _expert_weights(reader: Reader, names: list[str], width: int) -> ExpertWeights:
    """The named experts' matrices, plain."""
    hidden, weights = reader.geometry.hidden, reader.weights
    dtype, device = weights.dtype, weights.device
    gate_up = torch.empty((len(names), 2 * width, hidden), dtype=dtype, device=device)
    down = torch.empty((len(names), width, hidden), dtype=dtype, device=device)
    gate, up, last = _PARTS
    for place, name in enumerate(names):
        gate_up[place, :width] = reader.rows(f"{name}.{gate}.weight")
        gate_up[place, width:] = reader.rows(f"{name}.{up}.weight")
        down[place] = reader.columns(f"{name}.{last}.weight").t()
    return ExpertWeights(gate_up, down)


def engram(reader: Reader) -> Engram | None:
    """Row numbers of all tables; None where the model has none."""
    geometry, weights = reader.geometry, reader.weights
    if not geometry.engram.layers:
        return None
    return Engram(
        geometry.engram,
        NgramRows(tables(geometry), device=weights.device),
        folder=weights.folder,
        vocab_size=geometry.vocab_size,
        device=weights.device,
    )


def engram_layer(reader: Reader, layer: int) -> EngramLayer:
    """One layer's table and gate."""
    geometry = reader.geometry
    prefix = f"{layer_prefix(layer)}engram."
    joint = f"{prefix}wkv.weight"
    query, key = (reader.whole(f"{prefix}{s}_weight", dtype=torch.float32) for s in "qk")
    return EngramLayer(
        _table(reader, f"{prefix}embed.weight"),
        reader.product(joint, reader.whole(joint)),
        query * key,
        eps=geometry.norm_eps,
    )


def _table(reader: Reader, name: str) -> EmbeddingTable:
    comm = reader.comm
    first, _stop = shard_bounds(reader.weights.spec(name), comm.size)[comm.rank]
    columns = reader.geometry.engram.columns
    return ColumnTable(table_rows(reader, [name]), first_row=first, columns=columns, comm=comm)
