"""The drafter: one attention-and-experts layer of four streams over pairs (contract: R4, R8).

    row i    F[s] = fc_hidden(norm(h_i)[s]) + fc_embedding(norm(embedding(x[i+1])))   each stream s
             R = F;  R = mix_out(attention(mix_in(R)), R);  R = mix_out(experts(mix_in(R)), R)
             logits = head(mix_in(R) of the drafter's final mixer), a guess of x[i+2]

h_i, all streams of the target before its final mixer, is normalised as one vector. Proposing, R
takes the place of h_{i+1}, so row N - 1 comes from the saved tail and the pending token and every
later row from the one before it. Row i is rotated to position i: tokens shift, positions do not.

A pair's history is what its row leaves in the cache, groups and ring; that needs no attention, so
absorbing costs three products per row. The rows that proposing leaves at N and beyond are
overwritten by absorption or by the next proposal before any row can see them: pairs are absorbed in
order without gaps, and a row sees positions up to its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.layers.rows import Span, proposal_span
from flare_ray.device.layers.sparse_attention import RotatedRows, SparseState
from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.ops.stream_mixer.api import mix_out
from flare_ray.device.weights.loader import RankWeights
from flare_ray.recipes.declaration import (
    AbsorbRows,
    BuildOptions,
    Communicator,
    DraftSink,
    ProposalStart,
)
from flare_ray.recipes.qwen4_exp.blocks import (
    Reader,
    attention_block,
    mixer,
    mixture,
    row_layout,
    vocabulary_head,
)
from flare_ray.recipes.qwen4_exp.geometry import Geometry
from flare_ray.recipes.qwen4_exp.recipe import RECIPE
from flare_ray.recipes.qwen4_exp.state import check_divisible, group_name
from flare_ray.recipes.qwen4_exp.target import ATTENTION_STATE
from flare_ray.recipes.qwen4_exp.weights import DRAFTER, DRAFTER_LAYER, EMBEDDING


def build_drafter(
    geometry: Geometry, weights: RankWeights, comm: Communicator, options: BuildOptions
) -> QwenDrafter:
    """Builder named by the recipe; `options` add nothing to what the weights say.

    Raises:
        ConfigError: the TP degree does not divide a size.
        CheckpointError, ContractViolation: as `RankWeights.tensor`.
    """
    check_divisible(geometry, comm.size)
    return QwenDrafter(Reader(geometry, weights, comm))


@dataclass(slots=True)
class _Pairs:
    """tokens [R] x[i+1]; hidden [R, S H] h_i."""

    tokens: Tensor
    hidden: Tensor


class QwenDrafter:
    """See `flare_ray.recipes.declaration.Drafter`."""

    max_depth = RECIPE.speculation.max_draft_tokens

    def __init__(self, reader: Reader) -> None:
        geometry, weights = reader.geometry, reader.weights
        self._comm = reader.comm
        self._hidden = geometry.hidden
        self._layout = row_layout(reader)
        self._embedding = weights.shared(EMBEDDING)
        self._head = vocabulary_head(reader)
        self._embedding_norm = reader.norm(f"{DRAFTER}pre_fc_norm_embedding")
        self._hidden_norm = reader.norm(f"{DRAFTER}pre_fc_norm_hidden")
        self._fc_embedding = Linear(reader.whole(f"{DRAFTER}fc_embedding.weight"))
        self._fc_hidden = Linear(reader.whole(f"{DRAFTER}fc_hidden.weight"))
        self._mix_attention = mixer(reader, f"{DRAFTER_LAYER}attn_hyper_connection")
        self._attention = attention_block(reader, f"{DRAFTER_LAYER}self_attn", self._layout)
        self._mix_experts = mixer(reader, f"{DRAFTER_LAYER}mlp_hyper_connection")
        self._experts = mixture(reader, f"{DRAFTER_LAYER}mlp")
        self._final = mixer(reader, f"{DRAFTER}hyper_connection_mixer", injects=False)
        layer = geometry.num_layers
        self._groups = tuple(group_name(layer, name) for name in ATTENTION_STATE)

    def absorb(self, rows: AbsorbRows, state: Mapping[str, Tensor]) -> None:
        """Write the pairs' cache rows, groups and ring entries."""
        span = Span(rows.positions, rows.valid, rows.slots, rows.page_table)
        pairs = _Pairs(rows.tokens.reshape(-1), rows.feedback.flatten(0, 1))
        self._write(pairs, self._place(span, state, attends=False), self._sparse(state))

    def propose(self, start: ProposalStart, state: Mapping[str, Tensor], sink: DraftSink) -> None:
        """Complete the pair at N - 1, then draft by recursion."""
        depth, sparse = start.depth, self._sparse(state)
        steps = self._steps(start, state)
        pairs = _Pairs(start.pending, start.tail.to(self._embedding.dtype))
        if depth == 0:
            self._write(pairs, steps[0], sparse)
            return
        for step in range(depth):
            flat = self._run(self._joined(pairs), steps[step], sparse)
            vector = self._final.mix_in(flat)[0]
            logits = self._comm.all_gather(self._head(vector)).to(torch.float32)
            pairs = _Pairs(sink.draw(step, logits), flat)

    def _steps(self, start: ProposalStart, state: Mapping[str, Tensor]) -> list[RotatedRows]:
        """Indices of the proposal's passes, computed together."""
        rows = self._place(proposal_span(start), state, attends=start.depth > 0)
        return rows.steps(max(start.depth, 1))

    def _place(self, span: Span, state: Mapping[str, Tensor], *, attends: bool) -> RotatedRows:
        null_slot = state[self._groups[-1]].shape[0] - 1
        return self._layout.place(span, null_slot=null_slot, attends=attends)

    def _sparse(self, state: Mapping[str, Tensor]) -> SparseState:
        return SparseState.of(*(state[name] for name in self._groups))

    def _joined(self, pairs: _Pairs) -> Tensor:
        """[R, S H] rows of the layer's streams."""
        rows = pairs.tokens.shape[0]
        embedded = self._embedding.index_select(0, pairs.tokens)
        embedded = self._fc_embedding(self._embedding_norm(embedded))
        # rows of one stream each: a product takes its row count from the first dimension
        hidden = self._hidden_norm(pairs.hidden).reshape(-1, self._hidden)
        hidden = self._fc_hidden(hidden).view(rows, -1, self._hidden)
        return (hidden + embedded.unsqueeze(1)).flatten(1)

    def _write(self, pairs: _Pairs, rows: RotatedRows, sparse: SparseState) -> None:
        x, _ = self._mix_attention.mix_in(self._joined(pairs))
        self._attention.write(x, rows, sparse)

    def _run(self, flat: Tensor, rows: RotatedRows, sparse: SparseState) -> Tensor:
        """The layer on rows [R, S H]: the recycled R [R, S H]."""
        x, injection = self._mix_attention.mix_in(flat)
        attended = self._comm.all_reduce(self._attention(x, rows, sparse))
        flat = mix_out(attended, flat, injection)
        x, injection = self._mix_experts.mix_in(flat)
        return mix_out(self._comm.all_reduce(self._experts(x)), flat, injection)
