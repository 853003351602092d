"""The target: attention and a gated feed-forward per layer, on one residual stream (contract: R1).

    x = embedding;  each layer:  x = x + attention(norm(x));  x = x + feed_forward(norm(x))
    h = norm(x);    logits = head(h)

h is the drafter's input and the head's.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flare_ray.device.layers.dense_attention import DenseState
from flare_ray.device.layers.rows import Span
from flare_ray.device.weights.loader import RankWeights
from flare_ray.recipes.declaration import BuildOptions, Communicator, Rows, TargetOutput
from flare_ray.recipes.llama.blocks import Reader, layer, placed, rotary, vocabulary_head
from flare_ray.recipes.llama.geometry import Geometry
from flare_ray.recipes.llama.state import check_divisible, group_name
from flare_ray.recipes.llama.weights import EMBEDDING, FINAL_NORM


def build_target(
    geometry: Geometry, weights: RankWeights, comm: Communicator, options: BuildOptions
) -> LlamaTarget:
    """Builder named by the recipe; `options` add nothing to what the weights say.

    Raises:
        ConfigError: the TP degree does not divide a size.
        CheckpointError, ContractViolation: as `RankWeights.tensor`.
    """
    check_divisible(geometry, comm.size)
    return LlamaTarget(Reader(geometry, weights, comm))


class LlamaTarget:
    """See `flare_ray.recipes.declaration.Target`."""

    def __init__(self, reader: Reader) -> None:
        geometry = reader.geometry
        self._comm = reader.comm
        self._embedding = reader.weights.shared(EMBEDDING)
        self._rotary = rotary(reader)
        self._layers = [
            layer(reader, geometry.layer_prefix(number)) for number in range(geometry.num_layers)
        ]
        self._norm = reader.norm(FINAL_NORM.removesuffix(".weight"))
        self._head = vocabulary_head(reader)

    def forward(self, rows: Rows, state: Mapping[str, Tensor]) -> TargetOutput:
        """Run rows through all layers; writes their keys and values."""
        batch, width = rows.tokens.shape
        span = Span(rows.positions, rows.valid, rows.slots, rows.page_table)
        turned = placed(self._rotary, span, self._embedding.dtype)
        x = self._embedding.index_select(0, rows.tokens.reshape(-1))
        for number, run in enumerate(self._layers):
            keys, values = (state[group_name(number, name)] for name in ("keys", "values"))
            x = run(x, turned, DenseState.of(keys, values))
        hidden = self._norm(x).view(batch, width, -1)
        chosen = hidden
        if rows.last_only:
            last = (rows.lengths - 1).clamp_(min=0).view(-1, 1, 1)
            chosen = hidden.take_along_dim(last, dim=1)
        logits = self.head(chosen.flatten(0, 1))
        return TargetOutput(logits.view(batch, -1, logits.shape[-1]), hidden, hidden)

    def head(self, sampling: Tensor) -> Tensor:
        """[R, H] after the final norm -> [R, V]."""
        return self._comm.all_gather(self._head(sampling)).float()

    def commit(self, rows: Rows, emitted: Tensor, state: Mapping[str, Tensor]) -> None:
        """Nothing: keys and values past the accepted rows are out of sight until rewritten."""
