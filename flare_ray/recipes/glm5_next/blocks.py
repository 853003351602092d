"""Reads a rank's tensors by published name into the blocks of device/layers.

What is divided, and along which dimension, stands in weights.py; here each request repeats it, and
the loader refuses a disagreement. Everything not divided is whole on every rank, so that routing
and selection see equal inputs.
"""

from __future__ import annotations

import torch

from flare_ray.device.layers.absorbed import AbsorbedOutput, AbsorbedQuery
from flare_ray.device.layers.feed_forward import (
    DenseFeedForward,
    FeedForward,
    MixtureOfExperts,
    Router,
)
from flare_ray.device.layers.indexed_mla import IndexedMlaBlock, IndexedMlaWeights
from flare_ray.device.layers.kda import KdaBlock, KdaWeights
from flare_ray.device.layers.rows import IndexLayout
from flare_ray.device.ops.hyper_connection.api import HyperConnection, SinkhornShape
from flare_ray.device.ops.kda.api import DeltaRule
from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.ops.moe.api import Experts, ExpertWeights, SharedExperts
from flare_ray.device.ops.rmsnorm.api import RmsNorm
from flare_ray.recipes.fields import check_shared
from flare_ray.recipes.glm5_next.geometry import Geometry
from flare_ray.recipes.glm5_next.state import ring_entries
from flare_ray.recipes.glm5_next.weights import HEAD
from flare_ray.recipes.packed import StoredExperts, packed_experts, packed_stack
from flare_ray.recipes.reading import RankReader


class Reader(RankReader[Geometry]):
    """A rank's view of the checkpoint."""

    __slots__ = ()

    def norm(self, name: str) -> RmsNorm:
        """An RMS norm with the model's epsilon."""
        return RmsNorm(self.whole(f"{name}.weight"), eps=self.geometry.norm_eps)

    def heads(self, total: int) -> int:
        """This rank's share of heads."""
        return total // self.comm.size


def check_divisible(geometry: Geometry, world_size: int) -> None:
    """Refuse a TP degree that some divided size does not admit.

    Raises:
        ConfigError: names every such size.
    """
    sizes = {
        "linear_num_heads": geometry.kda.heads,
        "num_attention_heads": geometry.mla.heads,
        "intermediate_size": geometry.dense_width,
        "moe_intermediate_size": geometry.moe.width,
        "vocab_size": geometry.vocab_size,
    }
    check_shared(sizes, world_size)


def vocabulary_head(reader: Reader, name: str) -> Linear:
    """This rank's rows of a vocabulary head; the target's exists once, whoever uses it."""
    if name != HEAD:
        return Linear(reader.rows(f"{name}"))
    return reader.weights.once(f"linear {HEAD}", lambda: Linear(reader.rows(HEAD)))


def hyper_connection(reader: Reader, prefix: str) -> HyperConnection:
    """One site's stream mixing: `prefix` ends in hc_attn or hc_ffn."""
    hyper = reader.geometry.hyper
    fn, base, scale = (
        reader.whole(f"{prefix}_{part}", dtype=torch.float32) for part in ("fn", "base", "scale")
    )
    shape = SinkhornShape(hyper.iterations, hyper.eps, reader.geometry.norm_eps)
    return HyperConnection(fn, base, scale, streams=hyper.streams, shape=shape)


def kda_block(reader: Reader, prefix: str, rule: DeltaRule) -> KdaBlock:
    """A recurrent block: `prefix` ends in self_attn."""
    geometry = reader.geometry
    joint = [reader.rows(f"{prefix}.{part}_proj.weight") for part in "qkvb"]
    joint += [reader.whole(f"{prefix}.{gate}_a_proj.weight") for gate in "fg"]
    taps = [
        reader.rows(f"{prefix}.{part}_conv1d.weight", dtype=torch.float32).squeeze(1)
        for part in "qkv"
    ]
    gates = [reader.rows(f"{prefix}.{gate}_b_proj.weight").t() for gate in "fg"]
    weights = KdaWeights(
        joint=torch.cat(joint),
        taps=torch.cat(taps).t().contiguous(),
        gates=torch.stack(gates),
        dt_bias=reader.rows(f"{prefix}.dt_bias", dtype=torch.float32),
        a_log=reader.rows(f"{prefix}.A_log", dtype=torch.float32),
        norm=reader.whole(f"{prefix}.o_norm.weight", dtype=torch.float32),
        output=reader.columns(f"{prefix}.o_proj.weight"),
    )
    return KdaBlock(weights, rule, lower_bound=geometry.kda.lower_bound, eps=geometry.norm_eps)


def index_layout(geometry: Geometry) -> IndexLayout:
    """Pools and ring of every attention layer."""
    index = geometry.index
    return IndexLayout(pool=index.pool, entries=ring_entries(index.pool), top_k=index.top_k)


def indexed_mla_block(reader: Reader, prefix: str) -> IndexedMlaBlock:
    """An attention block: `prefix` ends in self_attn."""
    geometry, mla = reader.geometry, reader.geometry.mla
    heads = reader.heads(mla.heads)
    indexer = f"{prefix}.indexer"
    pooling = f"{indexer}.index_kpool_compress"
    joint = [
        reader.whole(f"{prefix}.q_a_proj.weight"),
        reader.whole(f"{prefix}.kv_a_proj_with_mqa.weight"),
        reader.whole(f"{indexer}.wk.weight"),
        reader.whole(f"{pooling}_gate"),
        reader.whole(f"{indexer}.weights_proj.weight"),
    ]
    query = reader.rows(f"{prefix}.q_b_proj.weight").view(heads, mla.nope_dim, mla.q_rank)
    key_value = reader.rows(f"{prefix}.kv_b_proj.weight").view(heads, -1, mla.kv_rank)
    key, value = key_value.split([mla.nope_dim, mla.value_dim], dim=1)
    output = reader.columns(f"{prefix}.o_proj.weight").view(-1, heads, mla.value_dim)
    weights = IndexedMlaWeights(
        joint=torch.cat(joint),
        query_norm=reader.norm(f"{prefix}.q_a_layernorm"),
        latent_norm=reader.norm(f"{prefix}.kv_a_layernorm"),
        key_norm=(
            reader.whole(f"{indexer}.k_norm.weight"),
            reader.whole(f"{indexer}.k_norm.bias"),
        ),
        ape=reader.whole(f"{pooling}_ape", dtype=torch.float32),
        index_query=reader.whole(f"{indexer}.wq_b.weight"),
        query=AbsorbedQuery(query, key),
        output=AbsorbedOutput(value, output),
        scale=mla.nope_dim**-0.5,
    )
    return IndexedMlaBlock(weights, index_layout(geometry))


def feed_forward(reader: Reader, prefix: str, *, sparse: bool) -> FeedForward:
    """A feed-forward block: `prefix` ends in mlp."""
    limit = reader.geometry.swiglu_limit
    if sparse:
        return _mixture(reader, prefix)
    gate_up = [reader.rows(f"{prefix}.{part}_proj.weight") for part in ("gate", "up")]
    down = reader.columns(f"{prefix}.down_proj.weight")
    return DenseFeedForward(torch.cat(gate_up), down, limit=limit)


def _mixture(reader: Reader, prefix: str) -> MixtureOfExperts:
    geometry, moe = reader.geometry, reader.geometry.moe
    router = Router(
        weight=reader.whole(f"{prefix}.gate.weight", dtype=torch.float32),
        bias=reader.whole(f"{prefix}.gate.e_score_correction_bias", dtype=torch.float32),
        top_k=moe.top_k,
        scale=moe.scale,
    )
    names = [f"{prefix}.experts.{expert}" for expert in range(moe.experts)]
    width = moe.width // reader.comm.size
    limit = geometry.swiglu_limit
    stack = packed_stack(reader, StoredExperts(names, width, geometry.hidden))
    if stack is not None:
        shared = SharedExperts(_expert_weights(reader, [], prefix)) if moe.shared else None
        packed = packed_experts(reader, stack, shared, top_k=moe.top_k, limit=limit)
        return MixtureOfExperts(router, packed)
    weights = _expert_weights(reader, names, prefix)
    experts = Experts(weights, shared=moe.shared, top_k=moe.top_k, limit=limit)
    return MixtureOfExperts(router, experts)


def _expert_weights(reader: Reader, names: list[str], prefix: str) -> ExpertWeights:
    """The named routed experts and, behind them, the shared ones, plain."""
    moe, hidden, weights = reader.geometry.moe, reader.geometry.hidden, reader.weights
    width = moe.width // reader.comm.size
    total = len(names) + moe.shared
    gate_up = torch.empty((total, 2 * width, hidden), dtype=weights.dtype, device=weights.device)
    down = torch.empty((total, width, hidden), dtype=weights.dtype, device=weights.device)
    for expert, name in enumerate(names):
        gate_up[expert, :width] = reader.rows(f"{name}.gate_proj.weight")
        gate_up[expert, width:] = reader.rows(f"{name}.up_proj.weight")
        down[expert] = reader.columns(f"{name}.down_proj.weight").t()
    if moe.shared:
        # One shared feed-forward of several experts' width is that many experts of weight one.
        name, last = f"{prefix}.shared_experts", slice(len(names), total)
        for first, part in ((0, "gate"), (width, "up")):
            rows = reader.rows(f"{name}.{part}_proj.weight").view(moe.shared, width, hidden)
            gate_up[last, first : first + width] = rows
        columns = reader.columns(f"{name}.down_proj.weight").t()
        down[last] = columns.reshape(moe.shared, width, hidden)
    return ExpertWeights(gate_up, down)
