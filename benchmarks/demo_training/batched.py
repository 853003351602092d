"""Many requests at once on one device, float32: recurrent KDA, absorbed and indexed MLA, MTP cache.

A serving-style reference like :mod:`.reference`, for evaluations of thousands of prompts and for
text that the trunk itself writes. It takes the weights of a training model with plain kernels.
Every request keeps its own length: rows behind its committed ones are overwritten or masked.

Shapes: B requests, W rows of each at a time, P positions of capacity, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .network import DemoModel
from .network.functional import Written, rms, unchosen_tokens
from .network.layers import Kda, Layer, Mla

HEADROOM = 16
"""Rows behind the longest request that a verification, an absorption or a draft may write."""


@dataclass(slots=True)
class KdaCache:
    """State [B, heads, D, D] and convolution window [B, taps - 1, 3 heads D] of every request."""

    state: Tensor
    window: Tensor

    def select(self, keep: Tensor) -> None:
        """Keep the requests ``keep``."""
        self.state, self.window = self.state[keep], self.window[keep]


@dataclass(slots=True)
class MlaCache:
    """Latents [B, P, r], index keys and gates [B, P, width], pooled keys [B, P / pool, width]."""

    latent: Tensor
    keys: Tensor
    gates: Tensor
    pools: Tensor

    def select(self, keep: Tensor) -> None:
        """Keep the requests ``keep``."""
        self.latent, self.keys = self.latent[keep], self.keys[keep]
        self.gates, self.pools = self.gates[keep], self.pools[keep]


class BatchedSession:
    """Committed state of B requests; ``verify`` leaves candidates, ``commit`` keeps some rows each.

    Args:
        model: training model with plain kernels, float32, on the device to use.
        requests: B.
        positions: P, a multiple of the pool size, with room for the rows of the last round.
        top_k: most tokens that attention may choose; None = the configuration's ``index_topk``.

    Attributes:
        lengths: [B] committed positions of the target.
        draft_lengths: [B] rows of the MTP cache that belong to committed positions.
    """

    def __init__(
        self, model: DemoModel, requests: int, positions: int, top_k: int | None = None
    ) -> None:
        self.model, self.config = model, model.config
        self.layers = [layer for layer in model.layers if isinstance(layer, Layer)]
        self.top_k = (top_k or self.config["index_topk"]) // self.config["index_kpool"]
        self.device = model.embed_tokens.weight.device
        self.positions = positions
        self.lengths = torch.zeros(requests, dtype=torch.int64, device=self.device)
        self.draft_lengths = torch.zeros_like(self.lengths)
        self.bound = 0
        """Host-side copy of the largest length."""
        self._caches = [self._cache(layer.self_attn, requests) for layer in self.layers]
        self._draft_cache = self._cache(model.mtp.self_attn, requests)
        self._candidates: list[tuple[Tensor, Tensor] | None] = []

    def _cache(self, layer: Kda | Mla, requests: int) -> KdaCache | MlaCache:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(requests, *shape, device=self.device)

        if isinstance(layer, Kda):
            heads, width = layer.spec.heads, layer.spec.width
            return KdaCache(
                zeros(heads, width, width), zeros(layer.spec.taps - 1, 3 * heads * width)
            )
        width, pool = layer.indexer.width, layer.indexer.pool
        rank = self.config["kv_lora_rank"]
        return MlaCache(
            zeros(self.positions, rank),
            zeros(self.positions, width),
            zeros(self.positions, width),
            zeros(self.positions // pool, width),
        )

    def verify(self, ids: Tensor) -> Tensor:
        """Hidden states [B, W, H] behind the final norm of the next W tokens [B, W]."""
        model, spec, rows = self.model, self.model.spec, ids.shape
        kernels = model.kernels
        streams = model.embed_tokens(ids).flatten(0, 1).unsqueeze(1).repeat(1, spec.streams, 1)
        self._candidates = []
        sites = [s for a in self.layers for s in (a.attention_site(), a.feed_forward_site())]
        x, write, mixer = kernels.open_site(streams, sites[0], spec, torch.float32)
        for i, layer in enumerate(self.layers):
            y = self._attend(i, layer, x.unflatten(0, rows)).flatten(0, 1)
            written = Written(y, streams, write, mixer)
            x, streams, write, mixer = kernels.turn_site(
                written, sites[2 * i + 1], spec, torch.float32
            )
            written = Written(layer.mlp(x), streams, write, mixer)
            if i + 1 < len(self.layers):
                x, streams, write, mixer = kernels.turn_site(
                    written, sites[2 * i + 2], spec, torch.float32
                )
        return kernels.close_site(written, model.norm.weight, spec.rms_eps).unflatten(0, rows)

    def _attend(self, index: int, layer: Layer, x: Tensor) -> Tensor:
        cache, attention = self._caches[index], layer.self_attn
        if isinstance(attention, Kda):
            assert isinstance(cache, KdaCache)
            y, candidates = _kda_rows(attention, cache, x)
            self._candidates.append(candidates)
            return y
        assert isinstance(cache, MlaCache)
        self._candidates.append(None)
        return self._mla_rows(attention, cache, x, self.lengths)

    def commit(self, rows: Tensor, longest: int | None = None) -> None:
        """Keep the first ``rows`` [B] verified rows of every request, 0 = none.

        Args:
            rows: rows to keep.
            longest: the largest length afterwards where the host knows it; None = ask the device.
        """
        at = torch.arange(len(rows), device=self.device)
        for cache, candidates in zip(self._caches, self._candidates, strict=True):
            if isinstance(cache, KdaCache) and candidates is not None:
                states, history = candidates
                cache.state = states[at, rows]
                taps = cache.window.shape[1]
                span = rows[:, None] + torch.arange(taps, device=self.device)
                cache.window = history[at[:, None], span]
        self._candidates = []
        self.lengths = self.lengths + rows
        self.bound = int(self.lengths.max()) if longest is None else longest

    def draft(self, ids: Tensor, hidden: Tensor, start: Tensor) -> Tensor:
        """Run MTP rows at positions ``start`` [B] onwards: ids [B, W], hidden [B, W, H] to
        [B, W, H]; rows behind them are overwritten.
        """
        mtp, eps = self.model.mtp, self.model.mtp.eps
        embedded = self.model.embed_tokens(ids)
        position = start[:, None] + torch.arange(ids.shape[1], device=self.device)
        embedded = embedded.masked_fill((position == 0)[..., None], 0.0)
        pair = [rms(embedded, mtp.enorm.weight, eps), rms(hidden, mtp.hnorm.weight, eps)]
        x = mtp.eh_proj(torch.cat(pair, -1))
        y = rms(x, mtp.input_layernorm.weight, eps)
        assert isinstance(self._draft_cache, MlaCache)
        x = x + self._mla_rows(mtp.self_attn, self._draft_cache, y, start)
        inner = rms(x, mtp.post_attention_layernorm.weight, eps)
        x = x + mtp.mlp(inner.flatten(0, 1)).view_as(x)
        return rms(x, mtp.shared_head.norm.weight, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of hidden states."""
        return self.model.lm_head(hidden)

    def draft_logits(self, out: Tensor) -> Tensor:
        """Vocabulary logits of MTP outputs."""
        return self.model.draft_logits(out)

    def select(self, keep: Tensor) -> None:
        """Keep the requests ``keep`` [K] only; call between rounds."""
        for cache in (*self._caches, self._draft_cache):
            cache.select(keep)
        self.lengths, self.draft_lengths = self.lengths[keep], self.draft_lengths[keep]
        self.bound = int(self.lengths.max())

    def _mla_rows(self, layer: Mla, cache: MlaCache, x: Tensor, start: Tensor) -> Tensor:
        requests, rows, _ = x.shape
        position = start[:, None] + torch.arange(rows, device=self.device)
        at = torch.arange(requests, device=self.device)[:, None]
        latent = rms(layer.kv_a_proj_with_mqa(x), layer.kv_a_layernorm.weight, layer.eps)
        cache.latent[at, position] = latent
        cache.keys[at, position], cache.gates[at, position] = layer.indexer.raw_keys(x)
        self._pool(layer, cache, start, rows)
        pool = layer.indexer.pool
        seen = min(self.positions, -(-(self.bound + HEADROOM) // pool) * pool)
        query = layer.query_latent(x)
        hidden = torch.arange(seen, device=self.device) > position[..., None]
        if seen // pool > self.top_k:
            hidden |= self._unchosen(layer, cache.pools[:, : seen // pool], x, query, position)
        kv = layer.kv_b_proj.weight.view(layer.heads, layer.qk_width + layer.v_width, -1)
        q = layer.q_b_proj(query).unflatten(-1, (layer.heads, layer.qk_width))
        absorbed = torch.einsum("bwhd,hdr->bwhr", q, kv[:, : layer.qk_width])
        known = cache.latent[:, :seen]
        scores = (absorbed.flatten(1, 2) @ known.transpose(1, 2)).view(requests, rows, -1, seen)
        weights = torch.softmax(
            (scores * layer.scale).masked_fill(hidden[:, :, None], float("-inf")), -1
        )
        mixed = (weights.flatten(1, 2) @ known).view(requests, rows, layer.heads, -1)
        out = torch.einsum("bwhr,hvr->bwhv", mixed, kv[:, layer.qk_width :])
        return layer.o_proj(out.flatten(2))

    def _pool(self, layer: Mla, cache: MlaCache, start: Tensor, rows: int) -> None:
        """Renew every pooled key that the new rows touch; unfinished ones are masked by readers."""
        size = layer.indexer.pool
        count = min(cache.pools.shape[1], (rows + size - 2) // size + 1)
        pools = (start // size)[:, None] + torch.arange(count, device=self.device)
        pools = pools.clamp(max=cache.pools.shape[1] - 1)
        at = torch.arange(len(start), device=self.device)[:, None]
        span = (pools[..., None] * size + torch.arange(size, device=self.device)).flatten(1)
        keys, gates = (t[at, span].unflatten(1, (count, size)) for t in (cache.keys, cache.gates))
        cache.pools[at, pools] = layer.indexer.pool_keys(keys, gates)

    def _unchosen(
        self, layer: Mla, pools: Tensor, x: Tensor, query: Tensor, position: Tensor
    ) -> Tensor:
        """[B, W, 4 pools] mask of tokens in complete pools that are not among the best."""
        scores = layer.indexer.scores(x, query, pools)
        complete = (position + 1) // layer.indexer.pool
        return unchosen_tokens(scores, complete, self.top_k, layer.indexer.pool)


def _kda_rows(layer: Kda, cache: KdaCache, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Outputs [B, W, H]; states [B, W + 1, heads, D, D] before and behind every row, and the
    convolution's history [B, taps - 1 + W, channels].
    """
    spec, (requests, rows, _) = layer.spec, x.shape
    raw = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    history = torch.cat([cache.window, raw], 1)
    taps = torch.cat([c.weight for c in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)])[:, 0]
    mixed = F.silu((history.unfold(1, spec.taps, 1) * taps).sum(-1))
    q, k, v = mixed.view(requests, rows, 3, spec.heads, spec.width).unbind(2)
    q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * spec.width**-0.5
    k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
    gate = (layer.f_b_proj(layer.f_a_proj(x)) + layer.dt_bias).view_as(q)
    decay = torch.exp(spec.lower_bound * torch.sigmoid(layer.A_log.exp()[:, None] * gate))
    beta = torch.sigmoid(layer.b_proj(x))
    states, outs = [cache.state], []
    for t in range(rows):
        state = states[-1] * decay[:, t, :, :, None]
        change = v[:, t] - (k[:, t, :, None] @ state).squeeze(-2)
        state = state + k[:, t, :, :, None] * (change * beta[:, t, :, None])[:, :, None]
        outs.append((q[:, t, :, None] @ state).squeeze(-2))
        states.append(state)
    out = torch.stack(outs, 1)
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + layer.eps) * layer.o_norm.weight
    out = out * torch.sigmoid(layer.g_b_proj(layer.g_a_proj(x)).view_as(out))
    return layer.o_proj(out.flatten(2)), (torch.stack(states, 1), history)
