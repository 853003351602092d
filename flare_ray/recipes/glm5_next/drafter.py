"""The drafter: one attention-and-experts layer over pairs (contract: R2, R8).

    row i    z = eh_proj(norm(embedding(x[i+1])), norm(h_i));  embedding = 0 at position 0
             z = z + attention(norm(z));  z = z + experts(norm(z));  m_i = norm(z)
             logits = head(m_i), a guess of x[i+2]

h_i is the target's for pairs that are history. Proposing, m_i takes the place of h_{i+1}, so row
N - 1 comes from the saved tail and the pending token and every later row from the one before it.

A pair's history is what its row leaves in the cache, pools and ring; that needs no attention, so
absorbing costs two products per row. The rows that proposing leaves at N and beyond are overwritten
by absorption or by the next proposal before any row can see them: pairs are absorbed in order
without gaps, and a row sees positions up to its own.

`index_share_for_mtp_iteration` (reuse the first draft's selection for the later ones) is not used:
every step selects afresh. Either only changes proposals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.layers.indexed_mla import IndexedState
from flare_ray.device.layers.rows import PagedRows, Span, paged_rows, proposal_span
from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.ops.pair_join.api import PairJoin
from flare_ray.device.weights.loader import RankWeights
from flare_ray.recipes.declaration import (
    AbsorbRows,
    BuildOptions,
    Communicator,
    DraftSink,
    ProposalStart,
)
from flare_ray.recipes.glm5_next.blocks import (
    Reader,
    check_divisible,
    feed_forward,
    index_layout,
    indexed_mla_block,
    vocabulary_head,
)
from flare_ray.recipes.glm5_next.geometry import Geometry
from flare_ray.recipes.glm5_next.recipe import RECIPE
from flare_ray.recipes.glm5_next.state import group_name
from flare_ray.recipes.glm5_next.weights import (
    EMBEDDING,
    HEAD,
    drafter_embedding,
    drafter_head,
)


def build_drafter(
    geometry: Geometry, weights: RankWeights, comm: Communicator, options: BuildOptions
) -> GlmDrafter:
    """Builder named by the recipe; `options` add nothing to what the weights say.

    Raises:
        ConfigError: the TP degree does not divide a size.
        CheckpointError, ContractViolation: as `RankWeights.tensor`.
    """
    check_divisible(geometry, comm.size)
    return GlmDrafter(Reader(geometry, weights, comm))


@dataclass(slots=True)
class _Pairs:
    """tokens [R] x[i+1]; hidden [R, H] h_i; positions [R] i."""

    tokens: Tensor
    hidden: Tensor
    positions: Tensor


class GlmDrafter:
    """See `flare_ray.recipes.declaration.Drafter`."""

    max_depth = RECIPE.speculation.max_draft_tokens

    def __init__(self, reader: Reader) -> None:
        geometry, weights = reader.geometry, reader.weights
        layer = geometry.num_layers
        prefix = geometry.layer_prefix(layer)
        own_embedding, own_head = drafter_embedding(geometry), drafter_head(geometry)
        self._comm = reader.comm
        self._layout = index_layout(geometry)
        self._embedding = weights.shared(own_embedding if weights.has(own_embedding) else EMBEDDING)
        self._head = vocabulary_head(reader, own_head if weights.has(own_head) else HEAD)
        norms = (reader.norm(f"{prefix}{half}norm") for half in "eh")
        self._pair = PairJoin(self._embedding, *norms)
        self._join = Linear(reader.whole(f"{prefix}eh_proj.weight"))
        self._attention_norm = reader.norm(f"{prefix}input_layernorm")
        self._attention = indexed_mla_block(reader, f"{prefix}self_attn")
        self._feed_forward_norm = reader.norm(f"{prefix}post_attention_layernorm")
        self._feed_forward = feed_forward(reader, f"{prefix}mlp", sparse=True)
        self._norm = reader.norm(f"{prefix}shared_head.norm")
        self._groups = tuple(group_name(layer, name) for name in ("latent", "pooled", "tail"))

    def absorb(self, rows: AbsorbRows, state: Mapping[str, Tensor]) -> None:
        """Write the pairs' cache rows, pools and ring entries."""
        span = Span(rows.positions, rows.valid, rows.slots, rows.page_table)
        pairs = _Pairs(
            rows.tokens.reshape(-1), rows.feedback.flatten(0, 1), rows.positions.reshape(-1)
        )
        self._write(pairs, self._place(span, state, attends=False), self._indexed(state))

    def propose(self, start: ProposalStart, state: Mapping[str, Tensor], sink: DraftSink) -> None:
        """Complete the pair at N - 1, then draft by recursion."""
        depth, indexed = start.depth, self._indexed(state)
        positions, steps = self._steps(start, state)
        token, hidden = start.pending, start.tail.to(self._embedding.dtype)
        if depth == 0:
            self._write(_Pairs(token, hidden, positions[0]), steps[0], indexed)
            return
        for step in range(depth):
            joined = self._joined(_Pairs(token, hidden, positions[step]))
            hidden = self._run(joined, steps[step], indexed)
            logits = self._comm.all_gather(self._head(hidden)).to(torch.float32)
            token = sink.draw(step, logits)

    def _steps(
        self, start: ProposalStart, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[PagedRows]]:
        """Positions [steps, B] and indices of the proposal's passes, computed together."""
        count, span = max(start.depth, 1), proposal_span(start)
        steps = self._place(span, state, attends=start.depth > 0).steps(count)
        return span.positions.view(count, -1), steps

    def _place(self, span: Span, state: Mapping[str, Tensor], *, attends: bool) -> PagedRows:
        null_slot = state[self._groups[2]].shape[0] - 1
        return paged_rows(
            span,
            self._layout,
            null_slot=null_slot,
            dtype=self._embedding.dtype,
            attends=attends,
        )

    def _indexed(self, state: Mapping[str, Tensor]) -> IndexedState:
        return IndexedState.of(*(state[name] for name in self._groups))

    def _joined(self, pairs: _Pairs) -> Tensor:
        """[R, H] rows of the layer's residual stream."""
        return self._join(self._pair(pairs.tokens, pairs.hidden, pairs.positions))

    def _write(self, pairs: _Pairs, rows: PagedRows, indexed: IndexedState) -> None:
        self._attention.write(self._attention_norm(self._joined(pairs)), rows, indexed)

    def _run(self, joined: Tensor, rows: PagedRows, indexed: IndexedState) -> Tensor:
        """The layer on rows [R, H]: the recycled m [R, H]."""
        attended = self._attention(self._attention_norm(joined), rows, indexed)
        joined = joined + self._comm.all_reduce(attended)
        fed = self._feed_forward(self._feed_forward_norm(joined))
        return self._norm(joined + self._comm.all_reduce(fed))
