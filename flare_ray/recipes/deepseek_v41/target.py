"""The target: streams mixed around attention and experts, coefficients one sublayer late.

    s = embedding, once per stream;  pre = the first stream alone
    each layer:  s = s + gated table rows            Engram layers only
                 x = pre . s,  coefficients of s;  s = mix_out(attention(norm(x)), s)
                 x = the coefficients just made . s;  s = mix_out(experts(norm(x)), s)
    h = norm(pre . s), pre made at the last site;  logits = head(h)

h is kept for snapshots. The drafter's context is the plain mean over streams of what chosen layers
take in, side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.contracts.shapes import MAX_WIDTH
from flare_ray.device.ops.hyper_connection.api import collapse
from flare_ray.device.ops.rotary_pairs.api import Yarn, frequencies, phases
from flare_ray.device.weights.loader import RankWeights
from flare_ray.recipes.declaration import BuildOptions, Communicator, Rows, TargetOutput
from flare_ray.recipes.deepseek_v41.attention import LayerState, Shared, Site
from flare_ray.recipes.deepseek_v41.blocks import (
    Block,
    Reader,
    block,
    check_divisible,
    engram,
    engram_layer,
    first_coefficients,
    vocabulary_head,
)
from flare_ray.recipes.deepseek_v41.engram import EngramLayer
from flare_ray.recipes.deepseek_v41.geometry import Geometry, Mode
from flare_ray.recipes.deepseek_v41.rows import Ring, Span, entry_rows
from flare_ray.recipes.deepseek_v41.state import ENGRAM_IDS, ring_entries
from flare_ray.recipes.deepseek_v41.weights import EMBEDDING, FINAL_NORM, layer_prefix


@dataclass(slots=True)
class _Layer:
    number: int
    block: Block
    table: EngramLayer | None


@dataclass(slots=True)
class _Pass:
    """One pass: what layers of each ratio see, table rows, and what sources publish."""

    sites: dict[int, Site]
    shared: Shared
    state: Mapping[str, Tensor]
    numbers: Tensor | None


def build_target(
    geometry: Geometry, weights: RankWeights, comm: Communicator, options: BuildOptions
) -> DeepseekTarget:
    """Builder named by the recipe; `options` add nothing to what the weights say.

    Raises:
        ConfigError: the TP degree does not divide a size.
        CheckpointError, ContractViolation: as `RankWeights.tensor`, or the tokenizer is missing.
    """
    check_divisible(geometry, comm.size)
    return DeepseekTarget(Reader(geometry, weights, comm))


class DeepseekTarget:
    """See `flare_ray.recipes.declaration.Target`."""

    def __init__(self, reader: Reader) -> None:
        geometry, weights = reader.geometry, reader.weights
        self._geometry = geometry
        self._comm = reader.comm
        self._embedding = weights.shared(EMBEDDING)
        self._engram = engram(reader)
        self._layers = [_layer(reader, number) for number in range(geometry.num_layers)]
        self._norm = reader.norm(FINAL_NORM.removesuffix(".weight"))
        self._head = vocabulary_head(reader)
        rope, dim, device = geometry.rope, geometry.attention.rope_dim, weights.device
        stretched = Yarn(rope.factor, rope.beta_fast, rope.beta_slow, rope.original_tokens)
        self._near_rates = frequencies(dim, rope.theta).to(device)
        self._rates = frequencies(dim, rope.compressed_theta, stretched).to(device)

    def forward(self, rows: Rows, state: Mapping[str, Tensor]) -> TargetOutput:
        """Run rows through all layers; see the declaration for what is written."""
        batch, width = rows.tokens.shape
        streams_of = self._geometry.hyper.streams
        tokens = rows.tokens.reshape(-1)
        work = self._open(rows, tokens, state)
        embedded = self._embedding.index_select(0, tokens)
        streams = embedded.unsqueeze(1).repeat(1, streams_of, 1)
        pre = first_coefficients(tokens.shape[0], streams_of, tokens.device)
        taps = []
        for layer in self._layers:
            if layer.table is not None:
                assert work.numbers is not None
                place = self._geometry.engram.layers.index(layer.number)
                streams = layer.table(streams, work.numbers[place])
            if layer.number in self._geometry.dspark.taps:
                taps.append(streams.mean(1))
            streams, pre = self._run(layer, streams, pre, work)
        hidden = self._norm(collapse(streams, pre))
        chosen = hidden
        if rows.last_only:
            last = (rows.lengths - 1).clamp_(min=0)
            last += torch.arange(batch, device=last.device) * width
            chosen = hidden.index_select(0, last)
        logits = self.head(chosen)
        feedback = torch.cat(taps, dim=1) if taps else hidden[:, :0]
        return TargetOutput(
            logits.view(batch, -1, logits.shape[-1]),
            feedback.view(batch, width, -1),
            hidden.view(batch, width, -1),
        )

    def head(self, sampling: Tensor) -> Tensor:
        """[R, H] after the final norm -> [R, V]."""
        return self._comm.all_gather(self._head(sampling))

    def commit(self, rows: Rows, emitted: Tensor, state: Mapping[str, Tensor]) -> None:
        """Nothing: what rejected rows left lies at positions that are written again before any row
        sees them (state.py)."""

    def _open(self, rows: Rows, tokens: Tensor, state: Mapping[str, Tensor]) -> _Pass:
        geometry = self._geometry
        null_slot = state[f"{layer_prefix(0)}window"].shape[0] - 1
        span = Span.of(rows, null_slot)
        history = geometry.attention.window - 1
        near = Ring(span, history, ring_entries(history))
        positions = span.flat_positions
        sites = {0: Site(near, phases(positions, self._near_rates))}
        phase = phases(positions, self._rates)
        for ratio in sorted(set(geometry.ratios) - {0}):
            entries = entry_rows(span, ratio, top_k=geometry.index.top_k)
            turned = phase if ratio == 1 else phases(entries.first, self._rates)
            raw = Ring(span, ratio - 1, ring_entries(ratio - 1)) if ratio > 1 else None
            sites[ratio] = Site(near, phase, entries, turned, raw)
        numbers = None
        if self._engram is not None:
            back = self._engram.history
            ring = Ring(span, back, back + MAX_WIDTH)
            numbers = self._engram.numbers(tokens, ring, state[ENGRAM_IDS])
        return _Pass(sites, Shared(), state, numbers)

    def _run(
        self, layer: _Layer, streams: Tensor, pre: Tensor, work: _Pass
    ) -> tuple[Tensor, Tensor]:
        site = work.sites[self._geometry.ratios[layer.number]]
        prefix, state = layer_prefix(layer.number), work.state
        held = LayerState(state[f"{prefix}window"])
        if self._geometry.mode(layer.number) is Mode.FULL:
            held.entries = state[f"{prefix}entries"]
            held.index_keys = state[f"{prefix}index_keys"]
            held.raw = state.get(f"{prefix}raw")

        def attend(x: Tensor) -> Tensor:
            return layer.block.attention(x, site, held, work.shared)

        return layer.block.run(streams, pre, attend, self._comm)


def _layer(reader: Reader, number: int) -> _Layer:
    geometry = reader.geometry
    return _Layer(
        number=number,
        block=block(reader, layer_prefix(number), geometry.moe, number),
        table=engram_layer(reader, number) if number in geometry.engram.layers else None,
    )
