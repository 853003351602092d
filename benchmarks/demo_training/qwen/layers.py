"""Modules of the training model; attribute names are those of the published checkpoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flare_ray.recipes.qwen4_exp.ngram import HashConstants

from ..network.functional import kda_scan, unchosen_tokens
from ..network.layers import QUERY_BLOCK, SEGMENT, Convolution, Linear, Vector
from .functional import Experts, GdnInputs, GdnSpec, Grams, Site, StreamSpec, centred
from .kernels import Kernels

Config = dict[str, Any]


class Centred(nn.Module):
    """A norm weight that is the distance from one."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


class Mixer(nn.Module):
    """One mixing site; the ones behind the last layer write nothing back."""

    def __init__(self, config: Config, *, injects: bool = True):
        super().__init__()
        streams, rank = config["hc_count"], config["hc_lowrank"]
        flat = streams * config["hidden_size"]
        self.hc_norm = Centred(flat)
        # Products are divided by the number of streams.
        self.input_mix_weight_down = Linear(flat, rank, float(streams))
        self.input_mix_weight_up = Linear(rank, flat)
        self.block_inject_weight = Linear(flat, streams) if injects else None

    def site(self) -> Site:
        """The parameters."""
        inject = self.block_inject_weight
        return Site(
            self.hc_norm.weight,
            self.input_mix_weight_down.weight,
            self.input_mix_weight_up.weight,
            None if inject is None else inject.weight,
        )


class GatedDelta(nn.Module):
    """Gated delta rule, chunked; input and output [N, H]."""

    def __init__(self, config: Config, kernels: Kernels):
        super().__init__()
        hidden, width = config["hidden_size"], config["linear_key_head_dim"]
        if config["linear_value_head_dim"] != width:
            raise ValueError("the training model needs key and value heads of one width")
        heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
        self.kernels, self.eps = kernels, config["rms_norm_eps"]
        self.spec = GdnSpec(heads, width, key_heads, config["linear_conv_kernel_dim"])
        channels = (2 * key_heads + heads) * width
        self.in_proj_qkv, self.in_proj_z = Linear(hidden, channels), Linear(hidden, heads * width)
        self.in_proj_b, self.in_proj_a = Linear(hidden, heads), Linear(hidden, heads)
        self.conv1d = Convolution(channels, self.spec.taps)
        # A spread of memory lengths: the log decay per token at zero input is 1e-3 to 0.5.
        step = torch.exp(torch.linspace(-6.9, -0.7, heads))
        self.dt_bias = nn.Parameter(torch.log(torch.expm1(step)))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.norm = Vector(width)
        self.out_proj = Linear(heads * width, hidden, 0.5)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """[N, H] of ``rows`` sequences to [N, H]."""
        x = x.unflatten(0, (rows, -1))
        # Rows of several segments are cut, so that rows of every length run the same compiled
        # shapes; only convolution and scan look beyond a segment.
        length = x.shape[1]
        segment = SEGMENT if length % SEGMENT == 0 else length
        halo, cut = self.spec.taps - 1, (-1, segment)
        raw = F.pad(self.in_proj_qkv(x), (0, 0, halo, 0)).unfold(1, segment + halo, segment)
        inputs = GdnInputs(
            raw=raw.flatten(0, 1).transpose(1, 2).contiguous(),
            taps=self.conv1d.weight[:, 0],
            forget=self.in_proj_a(x).flatten(0, 1).unflatten(0, cut),
            beta=self.in_proj_b(x).flatten(0, 1).unflatten(0, cut),
            dt_bias=self.dt_bias,
            a_log=self.A_log,
        )
        gate = self.in_proj_z(x).flatten(0, 1).unflatten(0, cut)
        with torch.autocast(x.device.type, enabled=False):
            chunks = self.kernels.gdn_front(inputs, self.spec)
            out = kda_scan(chunks, length // segment, self.spec.heads)
            out = self.kernels.gdn_back(out, gate, self.norm.weight, self.spec, self.eps)
        return self.out_proj(out).flatten(0, 1)


class Rotary:
    """Rotation of the first ``channels`` of a head, half against half."""

    def __init__(self, config: Config):
        rope = config["rope_parameters"]
        self.channels = int(config["head_dim"] * rope["partial_rotary_factor"])
        self.theta = rope["rope_theta"]

    def __call__(self, x: Tensor, at: Tensor) -> Tensor:
        """[..., D] rotated to positions ``at``, whose shape broadcasts with that of ``x`` but for
        the last axis; float32.
        """
        half = self.channels // 2
        steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
        angle = at.unsqueeze(-1).float() * self.theta**-steps
        cos, sin = angle.cos(), angle.sin()
        first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


class Indexer(nn.Module):
    """Chooses which groups of tokens a query attends to; see ``index_phase``."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.width = config["indexer_n_heads"], config["indexer_head_dim"]
        self.pool, self.eps = config["indexer_compress_ratio"], config["rms_norm_eps"]
        self.rotary = Rotary(config)
        self.index_qk_proj = Linear(config["hidden_size"], (self.heads + 1) * self.width)
        self.q_layernorm, self.k_layernorm = Centred(self.width), Centred(self.width)

    def queries(self, x: Tensor, at: Tensor) -> Tensor:
        """[..., R, heads, width] float32 of block inputs [..., R, H] at positions [..., R]."""
        weight = self.index_qk_proj.weight[: self.heads * self.width]
        q = F.linear(x, weight).unflatten(-1, (self.heads, self.width))
        return self.rotary(centred(q, self.q_layernorm.weight, self.eps), at.unsqueeze(-1))

    def raw_keys(self, x: Tensor) -> Tensor:
        """[..., width] float32 of block inputs [..., H]."""
        return F.linear(x, self.index_qk_proj.weight[self.heads * self.width :]).float()

    def pool_keys(self, raw: Tensor, first: Tensor) -> Tensor:
        """Keys [..., P, width] of groups [..., P, pool, width] whose first tokens are at ``first``
        [..., P].
        """
        return self.rotary(centred(raw.mean(-2), self.k_layernorm.weight, self.eps), first)

    def pooled_keys(self, x: Tensor) -> Tensor:
        """One key per complete group, [B, T // pool, width], of block inputs [B, T, H]."""
        count = x.shape[1] // self.pool
        raw = self.raw_keys(x)[:, : count * self.pool].unflatten(1, (count, self.pool))
        return self.pool_keys(raw, torch.arange(count, device=x.device) * self.pool)

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[B, R, P] of queries [B, R, heads, width] and keys [B, P, width]."""
        hits = torch.relu(torch.einsum("brhd,bpd->brhp", queries, keys.float()))
        return hits.sum(2) * self.width**-0.5


class Attention(nn.Module):
    """Grouped-query attention with gated output. Dense, unless ``budget`` says how many groups of
    tokens a query may choose; the two are equal while everything is chosen.
    """

    budget: int | None = None

    def __init__(self, config: Config):
        super().__init__()
        hidden, width = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.width, self.eps, self.scale = width, config["rms_norm_eps"], width**-0.5
        self.rotary = Rotary(config)
        self.q_proj = Linear(hidden, 2 * self.heads * width)
        self.k_proj, self.v_proj = (Linear(hidden, self.kv_heads * width) for _ in range(2))
        self.q_norm, self.k_norm = Centred(width), Centred(width)
        self.o_proj = Linear(self.heads * width, hidden, 0.5)
        self.indexer = Indexer(config)

    def parts(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and output gates [..., R, heads, D], keys and values [..., R, kv heads, D] of
        block inputs [..., R, H] at positions [..., R].
        """
        both = self.q_proj(x).unflatten(-1, (self.heads, 2, self.width))
        q, gate = both.unbind(-2)
        k, v = (p(x).unflatten(-1, (self.kv_heads, self.width)) for p in (self.k_proj, self.v_proj))
        place = at.unsqueeze(-1)
        q = self.rotary(centred(q, self.q_norm.weight, self.eps), place).to(v.dtype)
        k = self.rotary(centred(k, self.k_norm.weight, self.eps), place).to(v.dtype)
        return q, gate, k, v

    def gated_qkv(self, x: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, T, D] of [N, H], and the gates [B, T, heads D]."""
        x = x.unflatten(0, (rows, -1))
        q, gate, k, v = self.parts(x, torch.arange(x.shape[1], device=x.device))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 2) for t in (k, v))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.flatten(2)

    def qkv(self, x: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, T, D] of [N, H]."""
        return self.gated_qkv(x, rows)[:3]

    def project(self, attended: Tensor, gate: Tensor) -> Tensor:
        """[B, heads, T, D] under gates [B, T, heads D] to [N, H]."""
        out = attended.transpose(1, 2).flatten(2)
        return self.o_proj(out * torch.sigmoid(gate.float()).to(out.dtype)).flatten(0, 1)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """[N, H] of ``rows`` sequences to [N, H]."""
        q, k, v, gate = self.gated_qkv(x, rows)
        seen = None if self.budget is None else self.chosen(x.unflatten(0, (rows, -1)), self.budget)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, scale=self.scale
        )
        return self.project(attended, gate)

    def pool_scores(self, x: Tensor, at: Tensor) -> Tensor:
        """Score of every complete group [B, R, P] for the rows ``at`` [R] of x [B, T, H]; the
        caller masks groups of the future.
        """
        return self.indexer.scores(self.indexer.queries(x[:, at], at), self.indexer.pooled_keys(x))

    def chosen(self, x: Tensor, budget: int) -> Tensor:
        """[B, 1, T, T] bool: what every query sees with ``budget`` groups, its own tail beside
        them; x [B, T, H] is the input of the layer.
        """
        at = torch.arange(x.shape[1], device=x.device)
        pooled, parts = self.indexer.pooled_keys(x), []
        for part, block in zip(x.split(QUERY_BLOCK, 1), at.split(QUERY_BLOCK), strict=True):
            scores = self.indexer.scores(self.indexer.queries(part, block), pooled)
            complete = ((block + 1) // self.indexer.pool).expand(x.shape[0], -1)
            left_out = unchosen_tokens(scores, complete, budget, self.indexer.pool)
            left_out = F.pad(left_out, (0, len(at) - left_out.shape[-1]))  # the open group stays
            parts.append(~left_out & (at <= block[:, None]))
        return torch.cat(parts, 1).unsqueeze(1)


class Shared(nn.Module):
    """The shared expert."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, width), Linear(hidden, width)
        self.down_proj = Linear(width, hidden, 0.5)


class Router(nn.Module):
    """Router weight."""

    def __init__(self, experts: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, hidden) * hidden**-0.5)


class Moe(nn.Module):
    """Routed experts, stored stacked, and one gated shared expert.

    Attributes:
        unbalanced: balancing loss of the last call, one at equal loads.
    """

    unbalanced: Tensor

    def __init__(self, config: Config, kernels: Kernels):
        super().__init__()
        hidden, width = config["hidden_size"], config["moe_intermediate_size"]
        count = config["num_experts"]
        self.kernels, self.top_k = kernels, config["num_experts_per_tok"]
        self.gate = Router(count, hidden)
        self.experts_gate = nn.Parameter(torch.randn(count * width, hidden) * hidden**-0.5)
        self.experts_up = nn.Parameter(torch.randn(count * width, hidden) * hidden**-0.5)
        self.experts_down = nn.Parameter(torch.randn(count, hidden, width) * 0.5 * width**-0.5)
        self.shared_expert = Shared(hidden, config["shared_expert_intermediate_size"])
        self.shared_expert_gate = Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] to [N, H]."""
        experts = Experts(self.gate.weight, self.experts_gate, self.experts_up, self.experts_down)
        y, self.unbalanced = self.kernels.mixture(x, experts, self.top_k)
        own = self.shared_expert
        shared = self.kernels.gated_unit(
            x, own.gate_proj.weight, own.up_proj.weight, own.down_proj.weight
        )
        return y + torch.sigmoid(self.shared_expert_gate(x).float()).to(y.dtype) * shared


class GramEmbedding(nn.Module):
    """The table of hashed n-grams and its constants."""

    layer_multipliers: Tensor
    ngram_heads_vocab_sizes: Tensor
    ngram_heads_offsets: Tensor

    def __init__(self, config: Config, constants: HashConstants):
        super().__init__()
        self.size, self.reset = config["ngram_size"], config["eos_token_id"]
        divisor = config["make_ngram_vocab_size_divisible_by"]
        rows = -(-constants.rows // divisor) * divisor
        width = config["ple_embed_dim"] // len(constants.primes)
        self.ngram_embedding = nn.Parameter(0.3 * torch.randn(rows, width))
        for name, values in (
            ("layer_multipliers", constants.multipliers),
            ("ngram_heads_vocab_sizes", constants.primes),
            ("ngram_heads_offsets", constants.offsets),
        ):
            self.register_buffer(name, torch.tensor(values))

    def rows(self, joined: Tensor, at: Tensor) -> Tensor:
        """Rows [B, W, heads] of every head for the tokens at positions ``at`` [B, W], where
        ``joined`` [B, size - 1 + W] has the tokens before them too.
        """
        history, width = self.size - 1, at.shape[1]
        mixed = joined[:, history:] * self.layer_multipliers[0]
        orders, forgotten = [], torch.zeros_like(at, dtype=torch.bool)
        for back in range(1, self.size):
            token = joined[:, history - back : history - back + width]
            token = token.masked_fill(forgotten | (at < back), self.reset)
            forgotten = token == self.reset
            mixed = mixed ^ (token * self.layer_multipliers[back])
            orders.append(mixed)
        primes = self.ngram_heads_vocab_sizes.unflatten(0, (history, -1))
        hashed = torch.stack(orders, -1).unsqueeze(-1) % primes
        return hashed.flatten(-2) + self.ngram_heads_offsets

    def forward(self, joined: Tensor, at: Tensor) -> Tensor:
        """Embeddings [B, W, heads width]; arguments as in :meth:`rows`."""
        return F.embedding(self.rows(joined, at), self.ngram_embedding).flatten(-2)


class Ple(nn.Module):
    """The n-gram embedding of one layer."""

    def __init__(self, config: Config, constants: HashConstants, kernels: Kernels):
        super().__init__()
        hidden, flat = config["hidden_size"], config["hc_count"] * config["hidden_size"]
        self.kernels = kernels
        self.key_proj = Linear(config["ple_embed_dim"], flat)
        self.value_proj = Linear(config["ple_embed_dim"], hidden)
        self.norm_key, self.norm_query, self.norm_conv = (Centred(flat) for _ in range(3))
        self.conv1d = Convolution(flat, config["ple_conv_kernel_size"])
        nn.init.normal_(self.conv1d.weight, std=0.1)
        self.ple_embedding = GramEmbedding(config, constants)

    def grams(self) -> Grams:
        """Parameters of the injection."""
        return Grams(
            self.norm_key.weight,
            self.norm_query.weight,
            self.norm_conv.weight,
            self.conv1d.weight[:, 0],
            self.ple_embedding.size,
        )

    def forward(self, flat: Tensor, ids: Tensor, spec: StreamSpec) -> Tensor:
        """Streams [N, S H] with the embedding of ids [B, T] added."""
        at = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        e = self.ple_embedding(F.pad(ids, (self.ple_embedding.size - 1, 0)), at)
        streams = flat.unflatten(0, ids.shape)
        key, value = self.key_proj(e), self.value_proj(e)
        return self.kernels.inject_grams(streams, key, value, self.grams(), spec).flatten(0, 1)


class Layer(nn.Module):
    """One layer: a recurrent or an attention block, and experts, each behind a mixing site."""

    def __init__(self, config: Config, kernels: Kernels, *, recurrent: bool, ple: Ple | None):
        super().__init__()
        self.ple = ple
        self.attn_hyper_connection, self.mlp_hyper_connection = Mixer(config), Mixer(config)
        self.linear_attn = GatedDelta(config, kernels) if recurrent else None
        self.self_attn = None if recurrent else Attention(config)
        self.mlp = Moe(config, kernels)

    def block(self) -> GatedDelta | Attention:
        """The recurrent or the attention block."""
        found = self.self_attn if self.linear_attn is None else self.linear_attn
        assert found is not None  # one of the two is there
        return found
