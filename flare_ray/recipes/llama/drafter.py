"""The drafter: one layer of the target's kind over pairs (contract: R8).

    row i    z = eh_proj(norm(embedding(x[i+1])), norm(h_i));  z = layer(z) at position i
             m_i = norm(z);  logits = head(m_i), a guess of x[i+2]

h_i is the target's for pairs that are history. Proposing, m_i takes the place of h_{i+1}.
A pair's history is its keys and values: absorbing needs no attention.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flare_ray.device.layers.dense_attention import DenseState
from flare_ray.device.layers.rows import Span, proposal_span
from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.weights.loader import RankWeights
from flare_ray.errors import ContractViolation
from flare_ray.recipes.declaration import (
    AbsorbRows,
    BuildOptions,
    Communicator,
    DraftSink,
    ProposalStart,
)
from flare_ray.recipes.llama.blocks import DraftHead, Reader, layer, placed, rotary
from flare_ray.recipes.llama.geometry import Geometry
from flare_ray.recipes.llama.recipe import RECIPE
from flare_ray.recipes.llama.state import check_divisible, group_name
from flare_ray.recipes.llama.weights import EMBEDDING


def build_drafter(
    geometry: Geometry, weights: RankWeights, comm: Communicator, options: BuildOptions
) -> LlamaDrafter:
    """Builder named by the recipe; `options` add nothing to what the weights say.

    Raises:
        ConfigError: the TP degree does not divide a size.
        CheckpointError, ContractViolation: as `RankWeights.tensor`.
        ContractViolation: the checkpoint has no drafter.
    """
    check_divisible(geometry, comm.size)
    if not geometry.num_drafter_layers:
        raise ContractViolation(
            "num_nextn_predict_layers is 0: there is no drafter to build; prepare ordinary rounds"
        )
    return LlamaDrafter(Reader(geometry, weights, comm))


class LlamaDrafter:
    """See `flare_ray.recipes.declaration.Drafter`."""

    max_depth = RECIPE.speculation.max_draft_tokens

    def __init__(self, reader: Reader) -> None:
        number = reader.geometry.num_layers
        prefix = reader.geometry.layer_prefix(number)
        self._embedding = reader.weights.shared(EMBEDDING)
        self._embedding_norm = reader.norm(f"{prefix}enorm")
        self._hidden_norm = reader.norm(f"{prefix}hnorm")
        self._join = Linear(reader.whole(f"{prefix}eh_proj.weight"))
        self._rotary = rotary(reader)
        self._layer = layer(reader, prefix)
        self._norm = reader.norm(f"{prefix}shared_head.norm")
        self._head = DraftHead(reader, prefix)
        self._groups = tuple(group_name(number, name) for name in ("keys", "values"))

    def absorb(self, rows: AbsorbRows, state: Mapping[str, Tensor]) -> None:
        """Write the pairs' keys and values."""
        span = Span(rows.positions, rows.valid, rows.slots, rows.page_table)
        turned = placed(self._rotary, span, self._embedding.dtype, attends=False)
        joined = self._joined(rows.tokens.reshape(-1), rows.feedback.flatten(0, 1))
        self._layer.attention.write(self._layer.attention_norm(joined), turned, self._own(state))

    def propose(self, start: ProposalStart, state: Mapping[str, Tensor], sink: DraftSink) -> None:
        """Complete the pair at N - 1, then draft by recursion."""
        dtype, own = self._embedding.dtype, self._own(state)
        attends = start.depth > 0
        turned = placed(self._rotary, proposal_span(start), dtype, attends=attends)
        steps = turned.steps(max(start.depth, 1))
        token, hidden = start.pending, start.tail.to(dtype)
        if not attends:
            joined = self._layer.attention_norm(self._joined(token, hidden))
            self._layer.attention.write(joined, steps[0], own)
            return
        for step in range(start.depth):
            hidden = self._norm(self._layer(self._joined(token, hidden), steps[step], own))
            token = sink.draw(step, self._head(hidden))

    def _joined(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """[R, H] rows of the layer's residual stream, from tokens [R] and states [R, H]."""
        embedded = self._embedding_norm(self._embedding.index_select(0, tokens))
        return self._join(torch.cat((embedded, self._hidden_norm(hidden)), dim=1))

    def _own(self, state: Mapping[str, Tensor]) -> DenseState:
        return DenseState.of(*(state[name] for name in self._groups))
