"""Modules of the training model; attribute names are those of the published checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..shape import MTP_DEPTH, SHORT_ROW
from .functional import (
    Chain,
    Experts,
    KdaInputs,
    KdaSpec,
    MoeSpec,
    Site,
    kda_scan,
    rms,
    unchosen_tokens,
)
from .kernels import Kernels

Config = dict[str, Any]
SEGMENT = SHORT_ROW
QUERY_BLOCK = 512
"""Queries that score all pools at a time."""


class Linear(nn.Linear):
    """Projection without bias, normal with standard deviation ``gain / sqrt(inputs)``."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0):
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=gain * inputs**-0.5)


class Vector(nn.Module):
    """A norm weight and, for the index keys, its bias."""

    def __init__(self, size: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        if bias:
            self.bias = nn.Parameter(torch.zeros(size))


class Convolution(nn.Module):
    """Depthwise taps, close to the identity: the last tap is the current token."""

    def __init__(self, channels: int, taps: int):
        super().__init__()
        weight = 0.1 * torch.randn(channels, 1, taps)
        weight[:, :, -1] += 1.0
        self.weight = nn.Parameter(weight)


class Kda(nn.Module):
    """Gated delta-rule attention, chunked; input and output [N, H]."""

    def __init__(self, config: Config, kernels: Kernels):
        super().__init__()
        linear = config["linear_attn_config"]
        hidden, width = config["hidden_size"], linear["head_dim"]
        self.kernels, self.eps = kernels, config["rms_norm_eps"]
        self.spec = KdaSpec(
            linear["num_heads"], width, linear["short_conv_kernel_size"], linear["gate_lower_bound"]
        )
        channels = self.spec.heads * width
        self.q_proj, self.k_proj, self.v_proj = (Linear(hidden, channels) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            Convolution(channels, self.spec.taps) for _ in range(3)
        )
        self.f_a_proj, self.f_b_proj = Linear(hidden, width), Linear(width, channels)
        self.g_a_proj, self.g_b_proj = Linear(hidden, width), Linear(width, channels)
        self.b_proj = Linear(hidden, self.spec.heads)
        # A spread of memory lengths: the log decay per token at zero input is 1e-3 to 0.5.
        step = torch.exp(torch.rand(channels) * 6.2 - 6.9) / -self.spec.lower_bound
        self.dt_bias = nn.Parameter(torch.log(step / (1 - step)))
        self.A_log = nn.Parameter(torch.zeros(self.spec.heads))
        self.o_norm = Vector(width)
        self.o_proj = Linear(channels, hidden, 0.5)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """[N, H] of ``rows`` sequences to [N, H]."""
        x = x.unflatten(0, (rows, -1))
        # Only convolution and scan look beyond a chunk. Rows of several segments are cut into
        # segments for the rest, so that rows of every length run the same compiled shapes.
        length = x.shape[1]
        segment = SEGMENT if length % SEGMENT == 0 else length
        raw = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        halo = self.spec.taps - 1
        windows = F.pad(raw, (0, 0, halo, 0)).unfold(1, segment + halo, segment)
        taps = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])
        cut = (-1, segment)
        inputs = KdaInputs(
            raw=windows.flatten(0, 1).transpose(1, 2).contiguous(),
            taps=taps[:, 0],
            forget=self.f_b_proj(self.f_a_proj(x)).flatten(0, 1).unflatten(0, cut),
            beta=self.b_proj(x).flatten(0, 1).unflatten(0, cut),
            dt_bias=self.dt_bias,
            a_log=self.A_log,
        )
        gate = self.g_b_proj(self.g_a_proj(x)).flatten(0, 1).unflatten(0, cut)
        with torch.autocast(x.device.type, enabled=False):
            chunks = self.kernels.kda_front(inputs, self.spec)
            out = kda_scan(chunks, length // segment, self.spec.heads)
            out = self.kernels.kda_back(out, gate, self.o_norm.weight, self.spec, self.eps)
        return self.o_proj(out).flatten(0, 1)


class Indexer(nn.Module):
    """Chooses which pools of tokens a query attends to. Unused below ``index_topk`` tokens; see
    ``index_phase``.
    """

    def __init__(self, config: Config):
        super().__init__()
        hidden, heads, width = (
            config["hidden_size"],
            config["index_n_heads"],
            config["index_head_dim"],
        )
        self.heads, self.width, self.pool = heads, width, config["index_kpool"]
        self.wq_b = Linear(config["q_lora_rank"], heads * width)
        self.wk, self.weights_proj = Linear(hidden, width), Linear(hidden, heads)
        self.k_norm = Vector(width, bias=True)
        self.index_kpool_compress_gate = nn.Parameter(torch.randn(width, hidden) * hidden**-0.5)
        self.index_kpool_compress_ape = nn.Parameter(torch.zeros(self.pool, width))

    def raw_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and pooling gates of every token, [..., width] each, from block inputs [..., H]."""
        keys = F.layer_norm(self.wk(x), (self.width,), self.k_norm.weight, self.k_norm.bias, 1e-6)
        return keys, F.linear(x, self.index_kpool_compress_gate)

    def pool_keys(self, keys: Tensor, gates: Tensor) -> Tensor:
        """One key per pool [..., width] float32 from keys and gates [..., pool, width]."""
        weight = torch.softmax(gates.float() + self.index_kpool_compress_ape.float(), -2)
        return (weight * keys.float()).sum(-2)

    def pooled_keys(self, x: Tensor) -> Tensor:
        """One key per complete pool, [B, T // pool, width], from block inputs [B, T, H]."""
        count = x.shape[1] // self.pool
        keys, gates = (
            t[:, : count * self.pool].unflatten(1, (count, self.pool)) for t in self.raw_keys(x)
        )
        return self.pool_keys(keys, gates)

    def scores(self, x: Tensor, query_latent: Tensor, keys: Tensor) -> Tensor:
        """Score of every pool for every query, [B, R, P] float32; the caller masks pools of the
        future.

        Args:
            x: [B, R, H] block inputs of the query rows.
            query_latent: [B, R, q_lora] normed query latents of the same rows.
            keys: [B, P, width] pooled keys.
        """
        queries = self.wq_b(query_latent).unflatten(-1, (self.heads, self.width))
        hits = torch.relu(torch.einsum("brhd,bpd->brhp", queries.float(), keys) * self.width**-0.5)
        weights = self.weights_proj(x).float() * self.heads**-0.5
        return torch.einsum("brh,brhp->brp", weights, hits)


class Mla(nn.Module):
    """Latent attention without positions. Dense, unless ``budget`` says how many pools of tokens a
    query may choose; the two are equal while everything is chosen.
    """

    budget: int | None = None

    def __init__(self, config: Config):
        super().__init__()
        hidden, latent, query = config["hidden_size"], config["kv_lora_rank"], config["q_lora_rank"]
        self.heads, self.qk_width, self.v_width = (
            config["num_attention_heads"],
            config["qk_nope_head_dim"],
            config["v_head_dim"],
        )
        self.eps, self.scale = config["rms_norm_eps"], config["qk_nope_head_dim"] ** -0.5
        self.q_a_proj, self.q_a_layernorm = Linear(hidden, query), Vector(query)
        self.q_b_proj = Linear(query, self.heads * self.qk_width)
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = Linear(hidden, latent), Vector(latent)
        self.kv_b_proj = Linear(latent, self.heads * (self.qk_width + self.v_width))
        self.o_proj = Linear(self.heads * self.v_width, hidden, 0.5)
        self.indexer = Indexer(config)

    def query_latent(self, x: Tensor) -> Tensor:
        """Normed query latents [..., q_lora]."""
        return rms(self.q_a_proj(x), self.q_a_layernorm.weight, self.eps)

    def qkv(self, x: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, T, width] from [N, H]."""
        x = x.unflatten(0, (rows, -1))
        q = self.q_b_proj(self.query_latent(x)).unflatten(-1, (self.heads, self.qk_width))
        latent = rms(self.kv_a_proj_with_mqa(x), self.kv_a_layernorm.weight, self.eps)
        kv = self.kv_b_proj(latent).unflatten(-1, (self.heads, self.qk_width + self.v_width))
        k, v = kv.split([self.qk_width, self.v_width], -1)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def project(self, attended: Tensor) -> Tensor:
        """[B, heads, T, width] to [N, H]."""
        return self.o_proj(attended.transpose(1, 2).flatten(2)).flatten(0, 1)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """[N, H] of ``rows`` sequences to [N, H]."""
        q, k, v = self.qkv(x, rows)
        seen = None if self.budget is None else self.chosen(x.unflatten(0, (rows, -1)), self.budget)
        return self.project(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=seen is None, scale=self.scale
            )
        )

    def pool_scores(self, x: Tensor, at: Tensor) -> Tensor:
        """Score of every complete pool [B, R, P] for the rows ``at`` [R] of x [B, T, H]; the caller
        masks pools of the future. Only the scorer's weights get gradients.
        """
        with torch.no_grad():
            latent = self.query_latent(x[:, at])
        return self.indexer.scores(x[:, at], latent, self.indexer.pooled_keys(x))

    def chosen(self, x: Tensor, budget: int) -> Tensor:
        """[B, 1, T, T] bool: what every query sees with ``budget`` pools, its own tail beside them.

        Args:
            x: [B, T, H] input of the layer.
            budget: pools.
        """
        at = torch.arange(x.shape[1], device=x.device)
        pooled, parts = self.indexer.pooled_keys(x), []
        for part, block in zip(x.split(QUERY_BLOCK, 1), at.split(QUERY_BLOCK), strict=True):
            scores = self.indexer.scores(part, self.query_latent(part), pooled)
            complete = ((block + 1) // self.indexer.pool).expand(x.shape[0], -1)
            left_out = unchosen_tokens(scores, complete, budget, self.indexer.pool)
            left_out = F.pad(left_out, (0, len(at) - left_out.shape[-1]))  # the open pool stays
            parts.append(~left_out & (at <= block[:, None]))
        return torch.cat(parts, 1).unsqueeze(1)


class Mlp(nn.Module):
    """Dense gated unit."""

    def __init__(self, config: Config, width: int, kernels: Kernels):
        super().__init__()
        hidden = config["hidden_size"]
        self.kernels, self.limit = kernels, config["swiglu_limit"]
        self.gate_proj, self.up_proj = Linear(hidden, width), Linear(hidden, width)
        self.down_proj = Linear(width, hidden, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] to [N, H]."""
        return self.kernels.swiglu(
            x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight, self.limit
        )


class Router(nn.Module):
    """Router weight and the balancing bias."""

    e_score_correction_bias: Tensor

    def __init__(self, experts: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, hidden) * hidden**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))


class Moe(nn.Module):
    """Routed experts, stored stacked, and one shared expert. Counts the load of its experts while
    training.
    """

    BIAS_STEP = 1e-3
    load: Tensor

    def __init__(self, config: Config, kernels: Kernels):
        super().__init__()
        hidden, width, count = (
            config["hidden_size"],
            config["moe_intermediate_size"],
            config["n_routed_experts"],
        )
        self.kernels = kernels
        self.spec = MoeSpec(
            config["num_experts_per_tok"], config["routed_scaling_factor"], config["swiglu_limit"]
        )
        self.gate = Router(count, hidden)
        self.experts_gate = nn.Parameter(torch.randn(count * width, hidden) * hidden**-0.5)
        self.experts_up = nn.Parameter(torch.randn(count * width, hidden) * hidden**-0.5)
        self.experts_down = nn.Parameter(torch.randn(count, hidden, width) * 0.3 * width**-0.5)
        self.shared_experts = Mlp(config, width * config["n_shared_experts"], kernels)
        self.register_buffer("load", torch.zeros(count), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] to [N, H]; adds to ``load`` while training."""
        bias = self.gate.e_score_correction_bias
        experts = Experts(
            self.gate.weight, bias, self.experts_gate, self.experts_up, self.experts_down
        )
        y, load = self.kernels.mixture(x, experts, self.spec)
        if self.training:
            self.load += load.detach()
        return y + self.shared_experts(x)

    @torch.no_grad()
    def balance(self) -> None:
        """Nudge the bias towards experts below the mean load, and start counting anew."""
        self.gate.e_score_correction_bias += self.BIAS_STEP * torch.sign(
            self.load.mean() - self.load
        )
        self.load.zero_()


def balance(moes: Iterable[Moe]) -> None:
    """One balancing step of every expert layer."""
    for moe in moes:
        moe.balance()


class Layer(nn.Module):
    """One target layer: an attention and a feed-forward block, each behind a stream-mixing site."""

    hc_attn_fn: nn.Parameter
    hc_attn_base: nn.Parameter
    hc_attn_scale: nn.Parameter
    hc_ffn_fn: nn.Parameter
    hc_ffn_base: nn.Parameter
    hc_ffn_scale: nn.Parameter

    def __init__(self, config: Config, index: int, kernels: Kernels):
        super().__init__()
        hidden, n = config["hidden_size"], config["hc_mult"]
        linear = config["layer_types"][index] == "linear_attention"
        sparse = config["mlp_layer_types"][index] == "sparse"
        self.self_attn = Kda(config, kernels) if linear else Mla(config)
        self.mlp = (
            Moe(config, kernels) if sparse else Mlp(config, config["intermediate_size"], kernels)
        )
        self.input_layernorm, self.post_attention_layernorm = Vector(hidden), Vector(hidden)
        for part in ("attn", "ffn"):
            base = torch.cat([0.7 * torch.randn(2 * n), 2.5 * torch.eye(n).flatten()])
            self.register_parameter(
                f"hc_{part}_fn", nn.Parameter(0.02 * torch.randn(2 * n + n * n, n * hidden))
            )
            self.register_parameter(f"hc_{part}_base", nn.Parameter(base))
            self.register_parameter(f"hc_{part}_scale", nn.Parameter(torch.ones(3)))

    def attention_site(self) -> Site:
        """Parameters of the site in front of the attention."""
        return Site(
            self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale, self.input_layernorm.weight
        )

    def feed_forward_site(self) -> Site:
        """Parameters of the site in front of the feed-forward block."""
        norm = self.post_attention_layernorm.weight
        return Site(self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale, norm)


class SharedHead(nn.Module):
    """The norm in front of the vocabulary head; the head itself is the target's."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm = Vector(hidden)


class MtpLayer(nn.Module):
    """The multi-token-prediction layer: latent attention and experts on plain residuals, no stream
    mixing.
    """

    def __init__(self, config: Config, kernels: Kernels):
        super().__init__()
        hidden = config["hidden_size"]
        self.kernels, self.eps = kernels, config["rms_norm_eps"]
        self.enorm, self.hnorm = Vector(hidden), Vector(hidden)
        self.eh_proj = Linear(2 * hidden, hidden)
        self.input_layernorm, self.post_attention_layernorm = Vector(hidden), Vector(hidden)
        self.self_attn, self.mlp = Mla(config), Moe(config, kernels)
        self.shared_head = SharedHead(hidden)

    def _inputs(self, embedded: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        # Position 0 has no embedding: the rule of the published engines, which the checkpoint is
        # trained under.
        embedded = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], 1)
        pair = [
            rms(embedded, self.enorm.weight, self.eps),
            rms(hidden, self.hnorm.weight, self.eps),
        ]
        return self.eh_proj(torch.cat(pair, -1).to(dtype)).float().flatten(0, 1)

    def _attention_input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return rms(x, self.input_layernorm.weight, self.eps).to(dtype)

    def _finish(self, x: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        x = x + self.mlp(rms(x, self.post_attention_layernorm.weight, self.eps).to(dtype))
        return rms(x.float(), self.shared_head.norm.weight, self.eps).unflatten(0, (rows, -1))

    def forward(self, embedded: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """One draft step for every position.

        Args:
            embedded: [B, T, H] embeddings of the next tokens.
            hidden: [B, T, H] target hidden states behind the final norm.
            dtype: type of the products.
        Returns:
            [B, T, H] float32; the vocabulary head applies directly.
        """
        rows = hidden.shape[0]
        x = self._inputs(embedded, hidden, dtype)
        x = x + self.self_attn(self._attention_input(x, dtype), rows)
        return self._finish(x, rows, dtype)

    def readout(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        """Outputs as they are: the vocabulary head takes them."""
        return out

    def unroll(
        self, embedded: Tensor, hidden: Tensor, dtype: torch.dtype, steps: int
    ) -> list[Tensor]:
        """Recursive drafting for every position at once; step k + 1 runs on step k's outputs of the
        row before.

        Row i of step k sees first-step rows up to i - k + 1 and the rows that its own chain left at
        the positions after. Returns ``steps`` tensors [B, T, H]; row i of step k belongs to a chain
        that began at row i - k + 1.
        """
        rows = hidden.shape[0]
        attention = self.self_attn
        outs: list[Tensor] = []
        chain: list[tuple[Tensor, Tensor]] = []
        first: tuple[Tensor, Tensor] | None = None
        for step in range(1, steps + 1):
            x = self._inputs(embedded, shifted(outs[-1], 1, 1) if outs else hidden, dtype)
            q, k, v = attention.qkv(self._attention_input(x, dtype), rows)
            if first is None:
                first = (k, v)
                attended = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=attention.scale
                )
            else:
                chain.append((k, v))
                attended = self._chain_attention(q, first, chain, step)
            outs.append(self._finish(x + attention.project(attended), rows, dtype))
        return outs

    def _chain_attention(
        self, q: Tensor, first: tuple[Tensor, Tensor], chain: list[tuple[Tensor, Tensor]], step: int
    ) -> Tensor:
        last = len(chain) - 1
        own = [(shifted(k, last - n, 2), shifted(v, last - n, 2)) for n, (k, v) in enumerate(chain)]
        extra = torch.stack([(q * k).float().sum(-1) for k, _ in own], -1)
        extra = F.pad(extra, (0, MTP_DEPTH - 1 - len(own)), value=float("-inf"))
        at = torch.tensor(step, device=q.device)
        products = Chain(q @ first[0].transpose(-1, -2), extra, at)
        base, weights = self.kernels.chain_weights(products, self.self_attn.scale, q.dtype)
        return base @ first[1] + sum(weights[..., n : n + 1] * v for n, (_, v) in enumerate(own))


def shifted(x: Tensor, by: int, dim: int) -> Tensor:
    """``x`` moved ``by`` places along ``dim``, zeros in front."""
    if by == 0:
        return x
    head = x.narrow(dim, 0, by)
    return torch.cat([torch.zeros_like(head), x.narrow(dim, 0, x.shape[dim] - by)], dim)
