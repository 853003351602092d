"""The target: streams mixed around recurrent or attention blocks and feed-forwards (contract: R1).

    s = embedding, once per stream
    each layer:  x = mix_in(s);  s = mix_out(block(norm(x)), s)     attention, then feed-forward
    h = norm(mean over streams);  logits = head(h)

h is also the drafter's input and the head's input kept for snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.layers.feed_forward import FeedForward
from flare_ray.device.layers.indexed_mla import IndexedMlaBlock, IndexedState
from flare_ray.device.layers.kda import KdaBlock
from flare_ray.device.layers.rows import (
    PagedRows,
    RecurrentRows,
    Span,
    paged_rows,
    prefill_rows,
    round_rows,
)
from flare_ray.device.ops.hyper_connection.api import HyperConnection, mean_stream, mix_out
from flare_ray.device.ops.kda.api import DeltaRule
from flare_ray.device.ops.rmsnorm.api import RmsNorm
from flare_ray.device.weights.loader import RankWeights
from flare_ray.recipes.declaration import BuildOptions, Communicator, Rows, TargetOutput
from flare_ray.recipes.glm5_next.blocks import (
    Reader,
    check_divisible,
    feed_forward,
    hyper_connection,
    index_layout,
    indexed_mla_block,
    kda_block,
    vocabulary_head,
)
from flare_ray.recipes.glm5_next.geometry import PREFIX, Geometry
from flare_ray.recipes.glm5_next.state import group_name
from flare_ray.recipes.glm5_next.weights import EMBEDDING, HEAD


@dataclass(slots=True)
class _Pass:
    """One pass's indices, and the state store's groups. `paged` is None without attention."""

    recurrent: RecurrentRows
    paged: PagedRows | None
    state: Mapping[str, Tensor]


@dataclass(slots=True)
class _Layer:
    """Exactly one of `kda` and `mla` exists."""

    number: int
    mix_attention: HyperConnection
    attention_norm: RmsNorm
    kda: KdaBlock | None
    mla: IndexedMlaBlock | None
    mix_feed_forward: HyperConnection
    feed_forward_norm: RmsNorm
    feed_forward: FeedForward


def build_target(
    geometry: Geometry, weights: RankWeights, comm: Communicator, options: BuildOptions
) -> GlmTarget:
    """Builder named by the recipe.

    Raises:
        ConfigError: the TP degree does not divide a size.
        CheckpointError, ContractViolation: as `RankWeights.tensor`.
    """
    check_divisible(geometry, comm.size)
    return GlmTarget(Reader(geometry, weights, comm), options)


class GlmTarget:
    """See `flare_ray.recipes.declaration.Target`."""

    def __init__(self, reader: Reader, options: BuildOptions) -> None:
        geometry = self._geometry = reader.geometry
        self._comm = reader.comm
        rule = DeltaRule(max_width=options.max_width, lower_bound=geometry.kda.lower_bound)
        self._embedding = reader.weights.shared(EMBEDDING)
        self._layers = [_layer(reader, number, rule) for number in range(geometry.num_layers)]
        self._norm = reader.norm(f"{PREFIX}norm")
        self._head = vocabulary_head(reader, HEAD)
        self._layout = index_layout(geometry)
        indexed = [n for n, recurrent in enumerate(geometry.recurrent) if not recurrent]
        self._ring = group_name(indexed[0], "tail") if indexed else None

    def forward(self, rows: Rows, state: Mapping[str, Tensor]) -> TargetOutput:
        """Run rows through all layers; see the declaration for what is written."""
        batch, width = rows.tokens.shape
        work = self._open(rows, state)
        embedded = self._embedding.index_select(0, rows.tokens.reshape(-1))
        streams = embedded.unsqueeze(1).expand(-1, self._geometry.hyper.streams, -1).contiguous()
        for layer in self._layers:
            streams = self._run_layer(layer, streams, work)
        hidden = self._norm(mean_stream(streams))
        chosen = hidden
        if rows.last_only:
            last = (rows.lengths - 1).clamp_(min=0)
            last += torch.arange(batch, device=last.device) * width
            chosen = hidden.index_select(0, last)
        logits = self.head(chosen)
        hidden = hidden.view(batch, width, -1)
        return TargetOutput(logits.view(batch, -1, logits.shape[-1]), hidden, hidden)

    def head(self, sampling: Tensor) -> Tensor:
        """[R, H] after the final norm -> [R, V]."""
        return self._comm.all_gather(self._head(sampling)).to(torch.float32)

    def commit(self, rows: Rows, emitted: Tensor, state: Mapping[str, Tensor]) -> None:
        """Nothing: columns and windows are selected by the count that the next round starts with,
        and pages, pools and rings past the accepted rows are out of reach until rewritten."""

    def _open(self, rows: Rows, state: Mapping[str, Tensor]) -> _Pass:
        keep, width = self._geometry.kda.keep, rows.tokens.shape[1]
        if rows.prefill:
            recurrent = prefill_rows(
                rows.slots, rows.column, valid=rows.valid, lengths=rows.lengths, keep=keep
            )
        else:
            recurrent = round_rows(rows.slots, rows.column, width=width, keep=keep)
        paged = None
        if self._ring is not None:
            span = Span(rows.positions, rows.valid, rows.slots, rows.page_table)
            null_slot = state[self._ring].shape[0] - 1
            paged = paged_rows(span, self._layout, null_slot=null_slot, dtype=self._embedding.dtype)
        return _Pass(recurrent, paged, state)

    def _run_layer(self, layer: _Layer, streams: Tensor, work: _Pass) -> Tensor:
        x, site = layer.mix_attention.mix_in(streams)
        x = self._attend(layer, layer.attention_norm(x), work)
        streams = mix_out(self._comm.all_reduce(x), streams, site)
        x, site = layer.mix_feed_forward.mix_in(streams)
        x = layer.feed_forward(layer.feed_forward_norm(x))
        return mix_out(self._comm.all_reduce(x), streams, site)

    def _attend(self, layer: _Layer, x: Tensor, work: _Pass) -> Tensor:
        def group(purpose: str) -> Tensor:
            return work.state[group_name(layer.number, purpose)]

        if layer.kda is not None:
            return layer.kda(x, work.recurrent, group("recurrent"), group("window"))
        assert layer.mla is not None and work.paged is not None
        indexed = IndexedState.of(group("latent"), group("pooled"), group("tail"))
        return layer.mla(x, work.paged, indexed)


def _layer(reader: Reader, number: int, rule: DeltaRule) -> _Layer:
    geometry = reader.geometry
    prefix = geometry.layer_prefix(number)
    attention = f"{prefix}self_attn"
    recurrent = geometry.recurrent[number]
    return _Layer(
        number=number,
        mix_attention=hyper_connection(reader, f"{prefix}hc_attn"),
        attention_norm=reader.norm(f"{prefix}input_layernorm"),
        kda=kda_block(reader, attention, rule) if recurrent else None,
        mla=None if recurrent else indexed_mla_block(reader, attention),
        mix_feed_forward=hyper_connection(reader, f"{prefix}hc_ffn"),
        feed_forward_norm=reader.norm(f"{prefix}post_attention_layernorm"),
        feed_forward=feed_forward(reader, f"{prefix}mlp", sparse=geometry.sparse[number]),
    )
