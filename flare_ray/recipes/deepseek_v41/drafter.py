"""DSpark: stages over one block that sees a window of committed context (contract: R3).

    context row i   m_i = norm(F_i P);  stage s keeps round(rotate(norm(m_i K_s), i))
    block           [pending, noise, noise, ...] at N, N + 1, ...; each stage is a target block
                    whose rows see every context row and, both ways, every row of the block
    c               the last stage's streams, collapsed;  base = head(norm(c))
    draft i         logits = base_i + markov_head(e_i), e_i = markov_embedding of the token before
                    forecast = sigmoid(confidence . (c_i, e_i)), known before the draft is drawn

F_i comes from the target's inputs at i alone, so a row is absorbed as soon as its token is consumed
and no tail is carried. Nothing of a block enters a window. The block is as long as the program
drafts; no weight depends on that length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.ops.hyper_connection.api import collapse
from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.ops.rotary_pairs.api import frequencies, phases
from flare_ray.device.ops.sink_attention.api import Listed
from flare_ray.device.weights.loader import RankWeights
from flare_ray.recipes.declaration import (
    AbsorbRows,
    BuildOptions,
    Communicator,
    DraftSink,
    ProposalStart,
)
from flare_ray.recipes.deepseek_v41.attention import ContextKey
from flare_ray.recipes.deepseek_v41.blocks import (
    Block,
    Reader,
    block,
    check_divisible,
    first_coefficients,
    rounding,
    vocabulary_head,
    wide_rows,
)
from flare_ray.recipes.deepseek_v41.geometry import Geometry
from flare_ray.recipes.deepseek_v41.recipe import RECIPE
from flare_ray.recipes.deepseek_v41.rows import Ring, Span
from flare_ray.recipes.deepseek_v41.state import ring_entries
from flare_ray.recipes.deepseek_v41.weights import EMBEDDING, stage_prefix


def build_drafter(
    geometry: Geometry, weights: RankWeights, comm: Communicator, options: BuildOptions
) -> DsparkDrafter:
    """Builder named by the recipe; `options` add nothing to what the weights say.

    Raises:
        ConfigError: the TP degree does not divide a size.
        CheckpointError, ContractViolation: as `RankWeights.tensor`.
    """
    check_divisible(geometry, comm.size)
    return DsparkDrafter(Reader(geometry, weights, comm))


@dataclass(slots=True)
class _Stage:
    block: Block
    key: ContextKey
    window: str


@dataclass(slots=True)
class _Places:
    """Rows of a proposal: context [R, window] places in the rings, -1 = hidden; own [R, D] places
    in the block; phase [R, n]."""

    context: Tensor
    own: Tensor
    phase: Tensor


class DsparkDrafter:
    """See `flare_ray.recipes.declaration.Drafter`."""

    max_depth = RECIPE.speculation.max_draft_tokens

    def __init__(self, reader: Reader) -> None:
        geometry, weights = reader.geometry, reader.weights
        last = stage_prefix(geometry.num_drafter_layers - 1)
        first = stage_prefix(0)
        self._geometry = geometry
        self._comm = reader.comm
        self._embedding = weights.shared(EMBEDDING)
        self._head = vocabulary_head(reader)
        joint = f"{first}main_proj.weight"
        self._join = reader.product(joint, reader.whole(joint))
        self._join_norm = reader.norm(f"{first}main_norm")
        self._stages = [_stage(reader, number) for number in range(geometry.num_drafter_layers)]
        self._norm = reader.norm(f"{last}norm")
        self._markov = reader.whole(f"{last}markov_head.embed.weight")
        self._transition = wide_rows(reader, f"{last}markov_head.head.weight")
        proj = reader.whole(f"{last}confidence_head.proj.weight", dtype=torch.float32)
        # the head of c and that of the embedding: one is a product of the whole block
        sizes = [geometry.hidden, geometry.dspark.markov_rank]
        self._of_row, self._of_token = (Linear(part) for part in proj.view(1, -1).split(sizes, 1))
        rates = frequencies(geometry.attention.rope_dim, geometry.rope.theta)
        self._rates = rates.to(weights.device)

    def absorb(self, rows: AbsorbRows, state: Mapping[str, Tensor]) -> None:
        """Write the rows' context keys into every stage's window."""
        window = self._geometry.attention.window
        null_slot = state[self._stages[0].window].shape[0] - 1
        span = Span.of(rows, null_slot)
        ring = Ring(span, window, ring_entries(window), reads=False)
        phase = phases(span.flat_positions, self._rates)
        context = self._join_norm(self._join(rows.feedback.flatten(0, 1)))
        for stage in self._stages:
            ring.write(state[stage.window], stage.key(context, phase))

    def propose(self, start: ProposalStart, state: Mapping[str, Tensor], sink: DraftSink) -> None:
        """Evaluate the block, then draw its drafts one after another."""
        depth = start.depth
        if depth == 0:
            return
        rows, base = self._block(start, state)
        sure = self._of_row(rows.flatten(0, 1).to(torch.float32)).view(-1, depth)
        token = start.pending
        for step in range(depth):
            before = self._markov.index_select(0, token).to(torch.float32)
            sink.forecast(step, _chance(sure[:, step] + self._of_token(before).squeeze(1)))
            logits = self._comm.all_gather(base[:, step] + self._transition(before))
            token = sink.draw(step, logits)

    def _block(self, start: ProposalStart, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """c [B, D, H], and this rank's part of the base logits [B, D, V / ranks]."""
        batch, depth = start.pending.shape[0], start.depth
        tokens = torch.full_like(start.pending, self._geometry.dspark.noise_id)
        tokens = tokens.unsqueeze(1).repeat(1, depth)
        tokens[:, 0] = start.pending
        places = self._places(start, state)
        streams_of = self._geometry.hyper.streams
        embedded = self._embedding.index_select(0, tokens.view(-1))
        streams = embedded.unsqueeze(1).repeat(1, streams_of, 1)
        pre = first_coefficients(batch * depth, streams_of, tokens.device)
        for stage in self._stages:
            context = Listed(state[stage.window].flatten(0, 1), places.context)

            def attend(x: Tensor, stage: _Stage = stage, context: Listed = context) -> Tensor:
                return stage.block.attention.block(x, places.phase, context, places.own)

            streams, pre = stage.block.run(streams, pre, attend, self._comm)
        rows = collapse(streams, pre)
        base = self._head(self._norm(rows))
        return rows.view(batch, depth, -1), base.view(batch, depth, -1)

    def _places(self, start: ProposalStart, state: Mapping[str, Tensor]) -> _Places:
        batch, depth = start.pending.shape[0], start.depth
        window = self._geometry.attention.window
        entries = state[self._stages[0].window].shape[1]
        device = start.pending.device
        seen = start.consumed.unsqueeze(1) - torch.arange(1, window + 1, device=device)
        context = start.slots.unsqueeze(1) * entries + seen % entries
        context.masked_fill_((seen < 0) | ~start.active.unsqueeze(1), -1)
        lane = torch.arange(batch, device=device).unsqueeze(1) * depth
        own = lane + torch.arange(depth, device=device)
        ahead = start.consumed.unsqueeze(1) + torch.arange(depth, device=device)
        return _Places(
            context=context.repeat_interleave(depth, dim=0),
            own=own.repeat_interleave(depth, dim=0),
            phase=phases(ahead.view(-1), self._rates),
        )


def _chance(logits: Tensor) -> Tensor:
    """Sigmoid of [B]. torch's own has other last bits in a vector's rest than inside it."""
    return logits.neg().exp_().add_(1.0).reciprocal_()


def _stage(reader: Reader, number: int) -> _Stage:
    prefix = stage_prefix(number)
    key = f"{prefix}attn.wkv.weight"
    return _Stage(
        block=block(reader, prefix, reader.geometry.dspark.moe),
        key=ContextKey(
            reader.product(key, reader.whole(key)),
            reader.norm(f"{prefix}attn.kv_norm"),
            rounding(reader.geometry),
        ),
        window=f"{prefix}window",
    )
