"""The target: gated streams around recurrent or attention blocks and experts (contract: R1, R4).

    R = embedding, once per stream
    some layers:  R = R + n-gram embedding
    each layer:   x = mix_in(R);  R = mix_out(block(x), R)      attention, then experts
    h = R;  v = mix_in(R) of the final mixer;  logits = head(v)

h, all streams before the final mixer, is the drafter's input; v is the head's input kept for
snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from flare_ray.device.layers.feed_forward import FeedForward
from flare_ray.device.layers.gated_delta import GatedDeltaBlock, GatedDeltaState
from flare_ray.device.layers.rows import RecurrentRows, Span, prefill_rows, round_rows
from flare_ray.device.layers.sparse_attention import (
    RotatedRows,
    RowLayout,
    SparseAttentionBlock,
    SparseState,
)
from flare_ray.device.ops.gated_delta.api import GatedDeltaRule, Records
from flare_ray.device.ops.stream_mixer.api import StreamMixer, mix_out
from flare_ray.device.weights.loader import RankWeights
from flare_ray.recipes.declaration import BuildOptions, Communicator, Rows, TargetOutput
from flare_ray.recipes.qwen4_exp.blocks import (
    Reader,
    attention_block,
    delta_rule,
    gated_delta_block,
    mixer,
    mixture,
    row_layout,
    vocabulary_head,
)
from flare_ray.recipes.qwen4_exp.geometry import Geometry
from flare_ray.recipes.qwen4_exp.ple import GramRows, NgramMemory
from flare_ray.recipes.qwen4_exp.state import RECORDS, check_divisible, group_name
from flare_ray.recipes.qwen4_exp.weights import EMBEDDING, FINAL_MIXER

ATTENTION_STATE = ("keys", "values", "pooled", "tail")


@dataclass(slots=True)
class _Pass:
    """One pass's indices, and the state store's groups. `attention` is None without such layers,
    `grams` without n-gram embedding."""

    recurrent: RecurrentRows
    attention: RotatedRows | None
    grams: GramRows | None
    state: Mapping[str, Tensor]


@dataclass(slots=True)
class _Layer:
    """Exactly one of `gdn` and `attention` exists; `ngram` in few layers."""

    number: int
    ngram: NgramMemory | None
    mix_attention: StreamMixer
    gdn: GatedDeltaBlock | None
    attention: SparseAttentionBlock | None
    mix_experts: StreamMixer
    experts: FeedForward


def build_target(
    geometry: Geometry, weights: RankWeights, comm: Communicator, options: BuildOptions
) -> QwenTarget:
    """Builder named by the recipe; `options` add nothing to what the weights say.

    Raises:
        ConfigError: the TP degree does not divide a size.
        CheckpointError, ContractViolation: as `RankWeights.tensor`; stored hash constants are not
            those of config.json.
    """
    check_divisible(geometry, comm.size)
    return QwenTarget(Reader(geometry, weights, comm))


class QwenTarget:
    """See `flare_ray.recipes.declaration.Target`."""

    def __init__(self, reader: Reader) -> None:
        geometry = self._geometry = reader.geometry
        self._comm = reader.comm
        self._records = geometry.recurrence == "records"
        rule, self._layout = delta_rule(reader), row_layout(reader)
        self._embedding = reader.weights.shared(EMBEDDING)
        self._layers = [
            _layer(reader, number, rule, self._layout) for number in range(geometry.num_layers)
        ]
        self._final = mixer(reader, FINAL_MIXER, injects=False)
        self._head = vocabulary_head(reader)
        attending = [n for n, recurrent in enumerate(geometry.recurrent) if not recurrent]
        self._ring = group_name(attending[0], "tail") if attending else None

    def forward(self, rows: Rows, state: Mapping[str, Tensor]) -> TargetOutput:
        """Run rows through all layers; see the declaration for what is written."""
        batch, width = rows.tokens.shape
        work = self._open(rows, state)
        embedded = self._embedding.index_select(0, rows.tokens.reshape(-1))
        flat = embedded.repeat(1, self._geometry.streams)
        for layer in self._layers:
            flat = self._run_layer(layer, flat, work)
        sampling = self._final.mix_in(flat)[0].view(batch, width, -1)
        chosen = sampling
        if rows.last_only:
            last = (rows.lengths - 1).clamp_(min=0).view(-1, 1, 1)
            chosen = sampling.take_along_dim(last, dim=1)
        logits = self.head(chosen.flatten(0, 1))
        return TargetOutput(
            logits.view(batch, -1, logits.shape[-1]), flat.view(batch, width, -1), sampling
        )

    def head(self, sampling: Tensor) -> Tensor:
        """[R, H] after the final mixer -> [R, V]."""
        return self._comm.all_gather(self._head(sampling)).float()

    def commit(self, rows: Rows, emitted: Tensor, state: Mapping[str, Tensor]) -> None:
        """Nothing: how many records are replayed and where windows are read follows from the count
        that the next round starts with, and pages, groups and rings past the accepted rows are out
        of reach until rewritten."""

    def _open(self, rows: Rows, state: Mapping[str, Tensor]) -> _Pass:
        geometry, attention, grams = self._geometry, None, None
        if self._ring is not None:
            span = Span(rows.positions, rows.valid, rows.slots, rows.page_table)
            attention = self._layout.place(span, null_slot=state[self._ring].shape[0] - 1)
        if geometry.ngram.hashes:
            history, taps = (_rows(rows, n) for n in (geometry.ngram.size - 1, geometry.ngram.keep))
            grams = GramRows(rows.tokens, rows.positions, history, taps)
        return _Pass(_rows(rows, geometry.gdn.keep), attention, grams, state)

    def _run_layer(self, layer: _Layer, flat: Tensor, work: _Pass) -> Tensor:
        def group(purpose: str) -> Tensor:
            return work.state[group_name(layer.number, purpose)]

        if layer.ngram is not None:
            assert work.grams is not None
            flat = layer.ngram(flat, work.grams, group("tokens"), group("grams"))
        x, injection = layer.mix_attention.mix_in(flat)
        if layer.gdn is not None:
            records = Records(*map(group, RECORDS)) if self._records else None
            state = GatedDeltaState(group("window"), group("recurrent"), records)
            x = layer.gdn(x, work.recurrent, state)
        else:
            assert layer.attention is not None and work.attention is not None
            sparse = SparseState.of(*map(group, ATTENTION_STATE))
            x = layer.attention(x, work.attention, sparse)
        flat = mix_out(self._comm.all_reduce(x), flat, injection)
        x, injection = layer.mix_experts.mix_in(flat)
        return mix_out(self._comm.all_reduce(layer.experts(x)), flat, injection)


def _rows(rows: Rows, keep: int) -> RecurrentRows:
    """Indices of columns and of a window of `keep` history rows."""
    if rows.prefill:
        return prefill_rows(
            rows.slots, rows.column, valid=rows.valid, lengths=rows.lengths, keep=keep
        )
    return round_rows(rows.slots, rows.column, width=rows.tokens.shape[1], keep=keep)


def _layer(reader: Reader, number: int, rule: GatedDeltaRule, layout: RowLayout) -> _Layer:
    geometry = reader.geometry
    prefix, recurrent = geometry.layer_prefix(number), geometry.recurrent[number]
    attention = None if recurrent else attention_block(reader, f"{prefix}self_attn", layout)
    return _Layer(
        number=number,
        ngram=NgramMemory(reader, number) if number in geometry.ngram.hashes else None,
        mix_attention=mixer(reader, f"{prefix}attn_hyper_connection"),
        gdn=gated_delta_block(reader, f"{prefix}linear_attn", rule) if recurrent else None,
        attention=attention,
        mix_experts=mixer(reader, f"{prefix}mlp_hyper_connection"),
        experts=mixture(reader, f"{prefix}mlp"),
    )
