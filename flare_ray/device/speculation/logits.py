"""From the target's logits to what the request asked for, and the counts that follow a commit."""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.device.sampling.penalties import Penalties, apply_rules, ban_words, penalise
from flare_ray.device.speculation.inputs import FilterBounds
from flare_ray.device.state.layout import NO_TOKEN, Sampling
from flare_ray.device.state.request import RequestState
from flare_ray.recipes.declaration import Rows


def adjusted_logits(
    logits: Tensor, rows: Rows, request: RequestState, bounds: FilterBounds
) -> Tensor:
    """Penalties, rules and bans of every lane, at every row's own prefix.

    Args:
        logits: [B, W, V] float32; left as it is.
        rows: the verified rows; of a prefill (W = 1 logits) the last valid one counts, and it has
            no generated token in front of it.
        bounds: what the host knows; steps that no lane needs are left out.
    Returns:
        [B, W, V] float32, `logits` itself where no lane asks for anything.
    """
    state, slots = request.logits, rows.slots
    if bounds.any_penalty:
        columns = request.sampling.index_select(0, slots).unbind(1)
        logits = penalise(
            logits,
            state.counts.index_select(0, slots),
            rows.tokens[:, :0] if rows.prefill else rows.tokens[:, 1:],
            Penalties(
                columns[Sampling.REPETITION],
                columns[Sampling.PRESENCE],
                columns[Sampling.FREQUENCY],
            ),
        )
    if not bounds.max_rules and not bounds.max_bad_words:
        return logits
    adjusted = logits if bounds.any_penalty else logits.clone()
    last = (rows.lengths - 1).clamp(min=0).unsqueeze(1)
    if bounds.max_rules:
        positions = rows.positions.gather(1, last) if rows.prefill else rows.positions
        rules = state.rules[:, : bounds.max_rules].index_select(0, slots)
        addends = state.addends[:, : bounds.max_rules].index_select(0, slots)
        apply_rules(adjusted, rules, addends, positions)
    if bounds.max_bad_words:
        tokens = torch.full_like(last, NO_TOKEN) if rows.prefill else rows.tokens
        words = state.bad_words[:, : bounds.max_bad_words].index_select(0, slots)
        ban_words(adjusted, words, state.recent.index_select(0, slots), tokens)
    return adjusted


def count_consumed(rows: Rows, request: RequestState, bounds: FilterBounds) -> None:
    """Count the tokens of prompt chunks [B, T], before the first token is drawn."""
    if not bounds.any_penalty and not bounds.max_bad_words:
        return
    state = request.logits
    since = state.generated_from.index_select(0, rows.slots).unsqueeze(1)
    again = rows.valid & (rows.positions >= since)
    if bounds.any_penalty:
        state.count_prompt(rows.slots, rows.tokens, rows.valid & ~again)
        state.count_generated(rows.slots, rows.tokens, again)
    if bounds.max_bad_words:
        state.remember(rows.slots, torch.where(again, rows.tokens, NO_TOKEN), rows.lengths)


def count_emitted(
    rows: Rows, tokens: Tensor, emitted: Tensor, request: RequestState, bounds: FilterBounds
) -> None:
    """Count what a program has committed; a round's rows become recent tokens besides.

    Args:
        rows: what it consumed.
        tokens: [B, W] int64; the first `emitted` [B] of each row are pending or consumed now.
    """
    if bounds.any_penalty:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        request.logits.count_generated(rows.slots, tokens, places < emitted.unsqueeze(1))
    if bounds.max_bad_words and not rows.prefill:
        request.logits.remember(rows.slots, rows.tokens, emitted)
