"""Trains the index scorers alone, so that selection beyond ``index_topk`` tokens keeps what
attention looks at.

The scores decide a choice and carry no gradient of the language loss. Each scorer learns the
attention mass per pool of its own layer: for sampled query rows, dense attention weights are
averaged over heads, summed over pools of four tokens, and the softmax of the pool scores is trained
towards them by cross-entropy. No other parameter changes, so contexts up to ``index_topk`` tokens
are not touched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .network.layers import Mla
from .phases import CLIP_NORM, Clock, Run, learning_rate, trunk_states
from .qwen.layers import Attention
from .storage import StoredView, round_in_place

Scored = Mla | Attention
"""A layer with a scorer."""
QUERY_ROWS = 192
PEAK_RATE = 1e-3
FIRST_ROW = 512
"""Query rows below see too few pools for a choice to matter."""


class InputTap:
    """Remembers the input of every latent-attention layer during one forward pass."""

    def __init__(self, layers: list[Scored]):
        self.inputs: dict[int, Tensor] = {}
        self._handles = [
            layer.register_forward_pre_hook(self._hook(i)) for i, layer in enumerate(layers)
        ]

    def _hook(self, index: int) -> Any:
        def remember(_: nn.Module, args: tuple[Any, ...]) -> None:
            self.inputs[index] = args[0].detach().float()

        return remember

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def pool_attention(layer: Scored, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Attention mass of every complete pool for sampled query rows.

    Args:
        layer: the layer.
        x: [B, T, H] its input.
        at: [R] sampled positions.
    Returns:
        mass [B, R, T // pool], zero where the pool is not complete for the query; and the mask of
        such pools [R, P].
    """
    rows, length, _ = x.shape
    q, k, _ = layer.qkv(x.flatten(0, 1), rows)
    scores = (q[:, :, at] @ k.transpose(-1, -2)).float() * layer.scale
    future = torch.arange(length, device=x.device) > at[:, None]
    weights = torch.softmax(scores.masked_fill(future, float("-inf")), -1).mean(1)
    pool = layer.indexer.pool
    count = length // pool
    mass = weights[..., : count * pool].unflatten(-1, (count, pool)).sum(-1)
    hidden = torch.arange(count, device=x.device) >= ((at + 1) // pool)[:, None]
    return mass.masked_fill(hidden, 0.0), hidden


def scorer_loss(layer: Scored, x: Tensor, at: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy to the pooled attention, and the mass that the best ``top_k`` pools hold of all
    pools' mass.
    """
    with torch.no_grad():
        mass, hidden = pool_attention(layer, x, at)
    scores = layer.pool_scores(x, at).masked_fill(hidden, float("-inf"))
    total = mass.sum(-1, keepdim=True)
    target = mass / total.clamp(min=1e-9)
    log_share = torch.log_softmax(scores, -1).masked_fill(hidden, 0.0)
    loss = -(target * log_share).sum(-1).mean()
    best = scores.topk(min(top_k, scores.shape[-1]), -1).indices
    active = (at + 1) // layer.indexer.pool > top_k
    kept = (mass.gather(-1, best).sum(-1) / total.squeeze(-1).clamp(min=1e-9))[:, active]
    return loss, kept.detach().mean() if active.any() else torch.ones((), device=x.device)


def index_phase(run: Run, layers: list[Scored], names: list[str]) -> None:
    """Train the scorers of ``layers`` on long rows; all other weights stay.

    Args:
        run: the run.
        layers: latent-attention layers, of the target or of the MTP layer.
        names: names of the model's parameters that belong to their scorers.
    """
    model = run.model
    model.zero_grad(set_to_none=True)
    trained = [p for layer in layers for p in layer.indexer.parameters()]
    model.eval()
    optimizer = torch.optim.AdamW(trained, PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    tap, clock, steps = InputTap(layers), Clock(run.settings.index_s), -2
    view = StoredView(model, names, run.family.stored_format)
    top_k = model.budget_tokens // model.pool
    first_kept: list[float] = []
    kept: list[float] = []
    while clock.fraction() < 1:
        if steps == 0:
            run.synchronize()
            clock.start()
        with view.seen():
            losses, shares = _step_losses(run, layers, tap, top_k)
            torch.stack(losses).sum().backward()
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * learning_rate(clock, 0.05)
        nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        if steps % 50 == 0 or steps == -1:
            kept = [round(s.item(), 4) for s in shares]
            first_kept = first_kept or kept
            run.say(f"index {steps} loss {[round(x.item(), 3) for x in losses]} mass kept {kept}")
    tap.close()
    round_in_place(model, names, run.family.stored_format)
    run.synchronize()
    run.report["index"] = {"steps": steps, "seconds": round(clock.elapsed(), 1)}
    run.report["index"] |= {"mass_kept_untrained": first_kept, "mass_kept_last_logged": kept}
    run.say(f"index done: {steps} steps")


def _step_losses(
    run: Run, layers: list[Scored], tap: InputTap, top_k: int
) -> tuple[list[Tensor], list[Tensor]]:
    ids = run.long.next()
    length = ids.shape[1] - 2
    hidden, embedded = trunk_states(run, ids)
    if run.model.mtp.self_attn in layers:
        with run.autocast():
            run.model.mtp(embedded, hidden, run.dtype)
    spread = torch.randperm(length - FIRST_ROW, device=run.device)[:QUERY_ROWS]
    at = (spread + FIRST_ROW).sort().values
    with run.autocast():
        pairs = [
            scorer_loss(layer, tap.inputs[i].unflatten(0, (ids.shape[0], -1)), at, top_k)
            for i, layer in enumerate(layers)
        ]
    return [p[0] for p in pairs], [p[1] for p in pairs]
