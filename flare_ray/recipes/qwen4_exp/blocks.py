"""Reads a rank's tensors by published name into the blocks of device/layers.

What is divided, and along which dimension, stands in weights.py; here each request repeats it, and
the loader refuses a disagreement. Everything not divided is whole on every rank, so that routing
and selection see equal inputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flare_ray.device.layers.feed_forward import GatedMixture
from flare_ray.device.layers.gated_delta import GatedDeltaBlock, GatedDeltaWeights
from flare_ray.device.layers.rows import IndexLayout
from flare_ray.device.layers.sparse_attention import (
    RowLayout,
    SparseAttentionBlock,
    SparseAttentionWeights,
)
from flare_ray.device.ops.gated_delta.api import GatedDeltaRule, HeadShape
from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.ops.moe.api import Experts, ExpertWeights, PackedExperts, SharedExperts
from flare_ray.device.ops.rmsnorm.centred import CentredRmsNorm
from flare_ray.device.ops.rotary.api import Rotary
from flare_ray.device.ops.stream_mixer.api import StreamMixer
from flare_ray.device.weights.loader import Split
from flare_ray.recipes.declaration import ROWS
from flare_ray.recipes.packed import StoredExperts, packed_experts, packed_stack
from flare_ray.recipes.qwen4_exp.geometry import Geometry
from flare_ray.recipes.qwen4_exp.state import kv_parts, ring_entries
from flare_ray.recipes.qwen4_exp.weights import FUSED_DOWN, FUSED_GATE_UP, HEAD
from flare_ray.recipes.reading import RankReader

NO_LIMIT = float("inf")
"""The activation's inputs are not bounded here."""


class Reader(RankReader[Geometry]):
    """A rank's view of the checkpoint."""

    __slots__ = ()

    def run(self, name: str, dim: int, bounds: tuple[int, int, int]) -> Tensor:
        """Entries along `dim`, of a tensor that holds several parts one after the other.

        Args:
            bounds: (start, length, size of the dimension); both are multiples of a common part,
                the largest of which is read at a time.
        """
        start, length, size = bounds
        part = math.gcd(start, length, size)
        pieces = [
            self.weights.tensor(name, split=Split(dim, at // part, size // part))
            for at in range(start, start + length, part)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)

    def norm(self, name: str, *, groups: int = 1) -> CentredRmsNorm:
        """An RMS norm with the model's epsilon; stored weights are distances from one."""
        weight = self.whole(f"{name}.weight", dtype=torch.float32)
        return CentredRmsNorm(weight, eps=self.geometry.norm_eps, groups=groups)


def vocabulary_head(reader: Reader) -> Linear:
    """This rank's rows of the vocabulary head; target and drafter share it."""
    return reader.weights.once(f"linear {HEAD}", lambda: Linear(reader.rows(HEAD)))


def mixer(reader: Reader, prefix: str, *, injects: bool = True) -> StreamMixer:
    """One site's stream mixing: `prefix` ends in hyper_connection or hyper_connection_mixer."""
    streams = reader.geometry.streams
    return StreamMixer(
        reader.norm(f"{prefix}.hc_norm", groups=streams),
        reader.whole(f"{prefix}.input_mix_weight_down.weight"),
        reader.whole(f"{prefix}.input_mix_weight_up.weight"),
        reader.whole(f"{prefix}.block_inject_weight.weight") if injects else None,
        streams=streams,
    )


def delta_rule(reader: Reader) -> GatedDeltaRule:
    """The rule for this rank's heads."""
    gdn, size = reader.geometry.gdn, reader.comm.size
    heads = HeadShape(gdn.key_heads // size, gdn.value_heads // size, gdn.key_dim, gdn.value_dim)
    return GatedDeltaRule(heads)


def gated_delta_block(reader: Reader, prefix: str, rule: GatedDeltaRule) -> GatedDeltaBlock:
    """A recurrent block: `prefix` ends in linear_attn."""
    gdn = reader.geometry.gdn
    joint = [_mixed_rows(reader, f"{prefix}.in_proj_qkv.weight")]
    joint += [reader.rows(f"{prefix}.in_proj_{part}.weight") for part in "zba"]
    taps = _mixed_rows(reader, f"{prefix}.conv1d.weight").to(torch.float32).squeeze(1)
    weights = GatedDeltaWeights(
        joint=torch.cat(joint),
        taps=taps.t().contiguous(),
        dt_bias=reader.rows(f"{prefix}.dt_bias", dtype=torch.float32),
        a_log=reader.rows(f"{prefix}.A_log", dtype=torch.float32),
        norm=reader.whole(f"{prefix}.norm.weight", dtype=torch.float32),
        output=reader.columns(f"{prefix}.out_proj.weight"),
    )
    return GatedDeltaBlock(weights, rule, gate=gdn.gate, eps=reader.geometry.norm_eps)


def _mixed_rows(reader: Reader, name: str) -> Tensor:
    """This rank's heads of a tensor whose rows are q, then k, then v."""
    gdn, size, rank = reader.geometry.gdn, reader.comm.size, reader.comm.rank
    total = 2 * gdn.key_width + gdn.value_width
    parts, start = [], 0
    for width in (gdn.key_width, gdn.key_width, gdn.value_width):
        share = width // size
        parts.append(reader.run(name, ROWS, (start + rank * share, share, total)))
        start += width
    return torch.cat(parts)


def row_layout(reader: Reader) -> RowLayout:
    """Groups, ring and rotation of every attention layer."""
    index, attention = reader.geometry.index, reader.geometry.attention
    weights = reader.weights
    return RowLayout(
        IndexLayout(pool=index.group, entries=ring_entries(index.group), top_k=index.budget),
        Rotary.of_base(attention.rotary, attention.theta, device=weights.device),
        weights.dtype,
    )


def attention_block(reader: Reader, prefix: str, layout: RowLayout) -> SparseAttentionBlock:
    """An attention block: `prefix` ends in self_attn."""
    geometry, rank, size = reader.geometry, reader.comm.rank, reader.comm.size
    attention, indexer = geometry.attention, f"{prefix}.indexer"
    parts = kv_parts(geometry, size)
    own = Split(ROWS, rank * parts // size, parts)
    # every head's query rows are followed by its gate rows
    both = reader.rows(f"{prefix}.q_proj.weight").view(-1, 2, attention.head_dim, geometry.hidden)
    joint = [
        both[:, 0].flatten(0, 1),
        both[:, 1].flatten(0, 1),
        reader.weights.tensor(f"{prefix}.k_proj.weight", split=own),
        reader.weights.tensor(f"{prefix}.v_proj.weight", split=own),
        reader.whole(f"{indexer}.index_qk_proj.weight"),
    ]
    weights = SparseAttentionWeights(
        joint=torch.cat(joint),
        query_norm=reader.norm(f"{prefix}.q_norm"),
        key_norm=reader.norm(f"{prefix}.k_norm"),
        index_query_norm=reader.norm(f"{indexer}.q_layernorm"),
        index_key_norm=reader.norm(f"{indexer}.k_layernorm"),
        output=reader.columns(f"{prefix}.o_proj.weight"),
        key_heads=attention.kv_heads // parts,
    )
    return SparseAttentionBlock(weights, layout.index)


def mixture(reader: Reader, prefix: str) -> GatedMixture:
    """Routed and shared experts: `prefix` ends in mlp."""
    geometry, moe = reader.geometry, reader.geometry.moe
    width, hidden = moe.width // reader.comm.size, geometry.hidden
    parts = moe.shared_width // moe.width
    router = [reader.whole(f"{prefix}.{name}.weight") for name in ("gate", "shared_expert_gate")]
    names = [f"{prefix}.experts.{expert}" for expert in range(moe.experts)]
    stack = packed_stack(reader, StoredExperts(names, width, hidden))
    experts: Experts | PackedExperts
    if stack is None:
        weights = _expert_weights(reader, prefix, moe.experts)
        experts = Experts(weights, shared=0, top_k=moe.top_k + parts, limit=NO_LIMIT)
    else:
        shared = SharedExperts(_expert_weights(reader, prefix, 0), weighted=True)
        experts = packed_experts(reader, stack, shared, top_k=moe.top_k, limit=NO_LIMIT)
    return GatedMixture(torch.cat(router).to(torch.float32), experts, top_k=moe.top_k, parts=parts)


def _expert_weights(reader: Reader, prefix: str, routed: int) -> ExpertWeights:
    """All routed experts, or none, and behind them the shared one in parts of their width."""
    moe, hidden, weights = reader.geometry.moe, reader.geometry.hidden, reader.weights
    width, parts = moe.width // reader.comm.size, moe.shared_width // moe.width
    total = routed + parts
    gate_up = torch.empty((total, 2 * width, hidden), dtype=weights.dtype, device=weights.device)
    down = torch.empty((total, width, hidden), dtype=weights.dtype, device=weights.device)
    if routed:
        _read_gate_up(reader, f"{prefix}.experts", gate_up[:routed], width)
        _read_down(reader, f"{prefix}.experts", down[:routed])
    # One shared feed-forward of several experts' width is that many experts of equal weight.
    shared = f"{prefix}.shared_expert"
    for first, part in ((0, "gate"), (width, "up")):
        rows = reader.rows(f"{shared}.{part}_proj.weight").view(parts, width, hidden)
        gate_up[routed:, first : first + width] = rows
    columns = reader.columns(f"{shared}.down_proj.weight").t()
    down[routed:] = columns.reshape(parts, width, hidden)
    return ExpertWeights(gate_up, down)


def _read_gate_up(reader: Reader, prefix: str, gate_up: Tensor, width: int) -> None:
    """Fill [E, 2 width, H] from one tensor or from two an expert."""
    fused, rank, size = f"{prefix}.gate_up_proj", reader.comm.rank, reader.comm.size
    for half, (first, part) in enumerate(((0, "gate"), (width, "up"))):
        place = gate_up[:, first : first + width]
        if reader.weights.has(fused):
            split = Split(FUSED_GATE_UP, half * size + rank, 2 * size)
            place.copy_(reader.weights.tensor(fused, split=split))
            continue
        for expert in range(gate_up.shape[0]):
            place[expert] = reader.rows(f"{prefix}.{expert}.{part}_proj.weight")


def _read_down(reader: Reader, prefix: str, down: Tensor) -> None:
    """Fill [E, width, H] from one tensor or from one an expert."""
    fused = f"{prefix}.down_proj"
    if reader.weights.has(fused):
        columns = reader.weights.tensor(fused, split=reader.split(FUSED_DOWN))
        down.copy_(columns.transpose(1, 2))
        return
    for expert in range(down.shape[0]):
        down[expert] = reader.columns(f"{prefix}.{expert}.down_proj.weight").t()
