"""Many requests at once on one device, float32: recurrent delta rule, cached and indexed attention,
n-gram windows, MTP cache.

What :mod:`benchmarks.demo_training.batched` is for the other architecture, with the same interface.
Every request keeps its own length: rows behind its committed ones are overwritten or masked.

Shapes: B requests, W rows of each at a time, P positions of capacity, S streams, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batched import HEADROOM
from ..network.functional import unchosen_tokens
from .functional import Written, gdn_heads, gram_gates, log_decay
from .layers import Attention, GatedDelta, Layer, Ple
from .model import QwenModel


@dataclass(slots=True)
class Window:
    """What a block keeps of the last rows, [B, n, channels]: inputs of a convolution, or ids."""

    rows: Tensor
    joined: Tensor | None = None
    """Kept rows and the candidates behind them."""

    def extended(self, new: Tensor) -> Tensor:
        """Kept rows with new ones [B, W, channels] behind them."""
        self.joined = torch.cat([self.rows, new], 1)
        return self.joined

    def commit(self, count: Tensor) -> None:
        """Keep the first ``count`` [B] new rows."""
        assert self.joined is not None  # rows were verified
        at = torch.arange(len(count), device=count.device)[:, None]
        span = count[:, None] + torch.arange(self.rows.shape[1], device=count.device)
        self.rows, self.joined = self.joined[at, span], None

    def select(self, keep: Tensor) -> None:
        """Keep the requests ``keep``."""
        self.rows = self.rows[keep]


@dataclass(slots=True)
class DeltaCache:
    """State [B, heads, D, D], the states before and behind every candidate row, and the window."""

    state: Tensor
    window: Window
    states: Tensor | None = None

    def commit(self, count: Tensor) -> None:
        """Keep the first ``count`` [B] new rows."""
        assert self.states is not None  # rows were verified
        at = torch.arange(len(count), device=count.device)
        self.state, self.states = self.states[at, count], None
        self.window.commit(count)

    def select(self, keep: Tensor) -> None:
        """Keep the requests ``keep``."""
        self.state = self.state[keep]
        self.window.select(keep)


@dataclass(slots=True)
class AttentionCache:
    """Keys and values [B, P, kv heads, D], raw index keys [B, P, width] and group keys
    [B, P / pool, width]; rows behind the committed ones are overwritten.
    """

    keys: Tensor
    values: Tensor
    raw: Tensor
    pools: Tensor

    def commit(self, count: Tensor) -> None:
        """Nothing: lengths say what counts."""

    def select(self, keep: Tensor) -> None:
        """Keep the requests ``keep``."""
        self.keys, self.values = self.keys[keep], self.values[keep]
        self.raw, self.pools = self.raw[keep], self.pools[keep]


class QwenSession:
    """Committed state of B requests; ``verify`` leaves candidates, ``commit`` keeps some rows each.

    Args:
        model: training model with plain kernels, float32, on the device to use.
        requests: B.
        positions: P, a multiple of the group size, with room for the rows of the last round.
        top_k: most tokens that attention may choose; None = the configuration's budget.

    Attributes:
        lengths: [B] committed positions of the target.
        draft_lengths: [B] rows of the MTP cache that belong to committed positions.
        bound: host-side copy of the largest length.
        state_width: channels of a hidden state.
    """

    def __init__(
        self, model: QwenModel, requests: int, positions: int, top_k: int | None = None
    ) -> None:
        self.model, self.positions, self.bound = model, positions, 0
        self.state_width = model.state_width
        self.top_k = (top_k or model.budget_tokens) // model.pool
        self.device = model.embed_tokens.weight.device
        self.lengths = torch.zeros(requests, dtype=torch.int64, device=self.device)
        self.draft_lengths = torch.zeros_like(self.lengths)
        self._caches = [self._cache(layer.block(), requests) for layer in model.blocks()]
        self._grams = {
            i: self._gram_windows(layer.ple, requests)
            for i, layer in enumerate(model.blocks())
            if layer.ple is not None
        }
        self._draft_cache = self._attention_cache(model.mtp.self_attn, requests)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.device)

    def _cache(self, block: GatedDelta | Attention, requests: int) -> DeltaCache | AttentionCache:
        if isinstance(block, Attention):
            return self._attention_cache(block, requests)
        spec = block.spec
        state = self._zeros(requests, spec.heads, spec.width, spec.width)
        channels = (2 * spec.key_heads + spec.heads) * spec.width
        return DeltaCache(state, Window(self._zeros(requests, spec.taps - 1, channels)))

    def _attention_cache(self, block: Attention, requests: int) -> AttentionCache:
        heads, index = (block.kv_heads, block.width), block.indexer
        return AttentionCache(
            self._zeros(requests, self.positions, *heads),
            self._zeros(requests, self.positions, *heads),
            self._zeros(requests, self.positions, index.width),
            self._zeros(requests, self.positions // index.pool, index.width),
        )

    def _gram_windows(self, ple: Ple, requests: int) -> tuple[Window, Window]:
        """Ids and convolution inputs."""
        grams = ple.grams()
        keep = (grams.taps.shape[1] - 1) * grams.dilation
        ids = self.lengths.new_zeros(requests, ple.ple_embedding.size - 1)
        return Window(ids), Window(self._zeros(requests, keep, self.state_width))

    def verify(self, ids: Tensor) -> Tensor:
        """Hidden states [B, W, S H] of the next W tokens [B, W]."""
        model, spec, rows = self.model, self.model.spec, ids.shape
        kernels = model.kernels
        at = self.lengths[:, None] + torch.arange(rows[1], device=self.device)
        flat = model.embed_tokens(ids).flatten(0, 1).repeat(1, spec.streams)
        for i, layer in enumerate(model.blocks()):
            if layer.ple is not None:
                flat = self._with_grams(i, layer.ple, flat.unflatten(0, rows), ids, at)
            site = layer.attn_hyper_connection.site()
            x, inject = kernels.open_site(flat, site, spec, torch.float32)
            y = self._block_rows(i, layer, x.unflatten(0, rows), at).flatten(0, 1)
            site = layer.mlp_hyper_connection.site()
            x, flat, inject = kernels.turn_site(Written(y, flat, inject), site, spec, torch.float32)
            flat = kernels.write_streams(layer.mlp(x), flat, inject)
        return flat.unflatten(0, rows)

    def _with_grams(self, index: int, ple: Ple, flat: Tensor, ids: Tensor, at: Tensor) -> Tensor:
        known, inputs = self._grams[index]
        e = ple.ple_embedding(known.extended(ids), at)
        grams = ple.grams()
        gated, new = gram_gates(flat, ple.key_proj(e), ple.value_proj(e), grams, self.model.spec)
        joined, width = inputs.extended(new), ids.shape[1]
        mixed = sum(
            joined[:, j * grams.dilation : j * grams.dilation + width] * grams.taps[:, j]
            for j in range(grams.taps.shape[1])
        )
        assert isinstance(mixed, Tensor)  # there are taps
        return (flat + gated + F.silu(mixed)).flatten(0, 1)

    def _block_rows(self, index: int, layer: Layer, x: Tensor, at: Tensor) -> Tensor:
        block, cache = layer.block(), self._caches[index]
        if isinstance(block, GatedDelta):
            assert isinstance(cache, DeltaCache)
            return _delta_rows(block, cache, x)
        assert isinstance(cache, AttentionCache)
        return self._attention_rows(block, cache, x, at)

    def commit(self, rows: Tensor, longest: int | None = None) -> None:
        """Keep the first ``rows`` [B] verified rows of every request, 0 = none.

        Args:
            rows: rows to keep.
            longest: the largest length afterwards where the host knows it; None = ask the device.
        """
        for cache in self._caches:
            cache.commit(rows)
        for windows in self._grams.values():
            for window in windows:
                window.commit(rows)
        self.lengths = self.lengths + rows
        self.bound = int(self.lengths.max()) if longest is None else longest

    def draft(self, ids: Tensor, hidden: Tensor, start: Tensor) -> Tensor:
        """Run MTP rows at positions ``start`` [B] onwards: ids [B, W], hidden [B, W, S H] to
        [B, W, S H]; rows behind them are overwritten.
        """
        mtp, rows = self.model.mtp, ids.shape
        at = start[:, None] + torch.arange(rows[1], device=self.device)
        flat = mtp.joined(self.model.embed_tokens(ids), hidden, torch.float32)
        x, inject = mtp.opened(flat, torch.float32)
        y = self._attention_rows(mtp.self_attn, self._draft_cache, x.unflatten(0, rows), at)
        return mtp.finished(Written(y.flatten(0, 1), flat, inject), rows[0], torch.float32)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits [B, W, V] of hidden states."""
        return self.model.logits(hidden)

    def draft_logits(self, out: Tensor) -> Tensor:
        """Vocabulary logits [B, W, V] of MTP outputs."""
        return self.model.draft_logits(out)

    def select(self, keep: Tensor) -> None:
        """Keep the requests ``keep`` [K] only; call between rounds."""
        for cache in (*self._caches, self._draft_cache):
            cache.select(keep)
        for windows in self._grams.values():
            for window in windows:
                window.select(keep)
        self.lengths, self.draft_lengths = self.lengths[keep], self.draft_lengths[keep]
        self.bound = int(self.lengths.max())

    def _attention_rows(
        self, block: Attention, cache: AttentionCache, x: Tensor, at: Tensor
    ) -> Tensor:
        """[B, W, H] of block inputs [B, W, H] at positions ``at`` [B, W]."""
        index, request = block.indexer, torch.arange(len(x), device=self.device)[:, None]
        q, gate, keys, values = block.parts(x, at)
        cache.keys[request, at], cache.values[request, at] = keys, values
        cache.raw[request, at] = index.raw_keys(x)
        self._pool(block, cache, at)
        pool = index.pool
        seen = min(self.positions, -(-(self.bound + HEADROOM) // pool) * pool)
        scores = index.scores(index.queries(x, at), cache.pools[:, : seen // pool])
        left_out = unchosen_tokens(scores, (at + 1) // pool, self.top_k, pool)
        later = torch.arange(seen, device=self.device) > at[..., None]
        ratio = block.heads // block.kv_heads
        k, v = (t[:, :seen].repeat_interleave(ratio, 2) for t in (cache.keys, cache.values))
        products = torch.einsum("bwhd,bshd->bhws", q, k) * block.scale
        weights = torch.softmax(
            products.masked_fill((left_out | later)[:, None], float("-inf")), -1
        )
        attended = torch.einsum("bhws,bshd->bhwd", weights, v)
        return block.project(attended, gate.flatten(2)).unflatten(0, at.shape)

    def _pool(self, block: Attention, cache: AttentionCache, at: Tensor) -> None:
        """Renew every group key that the new rows touch; unfinished ones are masked by readers."""
        size = block.indexer.pool
        count = min(cache.pools.shape[1], (at.shape[1] + size - 2) // size + 1)
        pools = at[:, :1] // size + torch.arange(count, device=self.device)
        pools = pools.clamp(max=cache.pools.shape[1] - 1)
        request = torch.arange(len(at), device=self.device)[:, None]
        span = (pools[..., None] * size + torch.arange(size, device=self.device)).flatten(1)
        raw = cache.raw[request, span].unflatten(1, (count, size))
        cache.pools[request, pools] = block.indexer.pool_keys(raw, pools * size)


def _delta_rows(block: GatedDelta, cache: DeltaCache, x: Tensor) -> Tensor:
    """Outputs [B, W, H]; leaves the states and the window's candidates in the cache."""
    spec, rows = block.spec, x.shape[1]
    joined = cache.window.extended(block.in_proj_qkv(x))
    windows = joined.unfold(1, spec.taps, 1)
    q, k, v = gdn_heads(F.silu((windows * block.conv1d.weight[:, 0]).sum(-1)), spec)
    decay = log_decay(block.in_proj_a(x), block.dt_bias, block.A_log).exp()
    beta = torch.sigmoid(block.in_proj_b(x))
    states, outs = [cache.state], []
    for t in range(rows):
        state = states[-1] * decay[:, t, :, None, None]
        change = (v[:, t] - (k[:, t, :, None] @ state).squeeze(-2)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * change[:, :, None]
        outs.append((q[:, t, :, None] @ state).squeeze(-2))
        states.append(state)
    cache.states = torch.stack(states, 1)
    out = torch.stack(outs, 1)
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + block.eps) * block.norm.weight
    gate = torch.sigmoid(block.in_proj_z(x).view_as(out))
    return block.out_proj((out * gate).flatten(2))
