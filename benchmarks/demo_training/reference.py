"""Independent serving-style reference of the demo in float32: recurrent KDA, absorbed MLA, MTP
cache.

Owns one request at a time and shares no code with the training model or the serving engine, but
for the reading of packed weights.
Contexts stay within ``index_topk`` tokens, where indexed attention is dense; longer ones are
refused. Shapes: W verified rows, H hidden, n residual streams, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from flare_ray.device.weights.quantiser import dequantise_tensors

KdaState = tuple[Tensor, Tensor]
"""Delta-rule state [heads, D, D] and the convolution window [taps - 1, 3 heads D]."""


class Reference:
    """Weights and the layer functions over them.

    Args:
        folder: checkpoint with ``config.json`` and ``model.safetensors``.
    """

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text())["text_config"]
        tensors = dequantise_tensors(load_file(folder / "model.safetensors"), torch.float32)
        self.weights = {
            k.removeprefix("model.language_model."): v.float() for k, v in tensors.items()
        }
        linear = self.config["linear_attn_config"]
        self.kda_heads, self.kda_width = linear["num_heads"], linear["head_dim"]
        self.taps, self.lower_bound = (
            linear["short_conv_kernel_size"],
            linear["gate_lower_bound"],
        )
        self.layers, self.eps = self.config["num_hidden_layers"], self.config["rms_norm_eps"]
        self.is_kda = [t == "linear_attention" for t in self.config["layer_types"]]
        self._experts = {
            p: self._stacked(p)
            for p in (f"layers.{i}.mlp." for i in range(self.layers + 1))
            if p + "gate.weight" in self.weights
        }

    def _stacked(self, prefix: str) -> list[Tensor]:
        count = self.config["n_routed_experts"]
        return [
            torch.stack(
                [self.weights[f"{prefix}experts.{e}.{n}_proj.weight"] for e in range(count)]
            )
            for n in ("gate", "up", "down")
        ]

    def rms(self, x: Tensor, name: str) -> Tensor:
        """Norm with the weight ``name``."""
        return self.weights[name] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Projection ``name``."""
        return F.linear(x, self.weights[name + ".weight"])

    def dense(self, x: Tensor, prefix: str) -> Tensor:
        """Gated unit [W, H] to [W, H]."""
        limit = self.config["swiglu_limit"]
        gate = F.silu(self.linear(x, prefix + "gate_proj").clamp(max=limit))
        up = self.linear(x, prefix + "up_proj").clamp(-limit, limit)
        return self.linear(gate * up, prefix + "down_proj")

    def feed_forward(self, x: Tensor, prefix: str) -> Tensor:
        """Dense or expert layer [W, H] to [W, H]."""
        if prefix not in self._experts:
            return self.dense(x, prefix)
        limit, (gate, up, down) = self.config["swiglu_limit"], self._experts[prefix]
        score = torch.sigmoid(self.linear(x, prefix + "gate"))
        biased = score + self.weights[prefix + "gate.e_score_correction_bias"]
        chosen = biased.topk(self.config["num_experts_per_tok"], -1).indices
        weight = score.gather(-1, chosen)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        weight = weight * self.config["routed_scaling_factor"]
        g = F.silu(torch.einsum("th,eih->tei", x, gate).clamp(max=limit))
        u = torch.einsum("th,eih->tei", x, up).clamp(-limit, limit)
        y = torch.einsum("tei,ehi->teh", g * u, down)
        y = y.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))
        return (weight[..., None] * y).sum(1) + self.dense(x, prefix + "shared_experts.")

    def mix(self, streams: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        """Input [W, H], write-back weights [W, n] and mixer [W, n, n] of streams [W, n, H]."""
        n, eps = self.config["hc_mult"], self.config["hc_eps"]
        flat = streams.flatten(1)
        flat = flat * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + self.eps)
        parts = F.linear(flat, self.weights[prefix + "_fn"]).split([n, n, n * n], -1)
        base = self.weights[prefix + "_base"].split([n, n, n * n])
        scale = self.weights[prefix + "_scale"]
        read, write, mixer = (p * s + b for p, s, b in zip(parts, scale, base, strict=True))
        mixer = torch.softmax(mixer.view(-1, n, n), -1) + eps
        mixer = mixer / (mixer.sum(-2, keepdim=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            mixer = mixer / (mixer.sum(-1, keepdim=True) + eps)
            mixer = mixer / (mixer.sum(-2, keepdim=True) + eps)
        x = ((torch.sigmoid(read) + eps)[..., None] * streams).sum(1)
        return x, 2 * torch.sigmoid(write), mixer

    def kda(self, x: Tensor, prefix: str, state: KdaState) -> tuple[Tensor, list[KdaState]]:
        """Outputs [W, H] and the state behind every row."""
        rows, heads, width = x.shape[0], self.kda_heads, self.kda_width
        s, window = state
        raw = torch.cat([self.linear(x, prefix + n + "_proj") for n in "qkv"], -1)
        history = torch.cat([window, raw])
        taps = torch.cat([self.weights[prefix + n + "_conv1d.weight"] for n in "qkv"])[:, 0].T
        mixed = F.silu((history.unfold(0, self.taps, 1).transpose(1, 2) * taps).sum(1))
        q, k, v = mixed.view(rows, 3, heads, width).unbind(1)
        q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6) * width**-0.5
        k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        forget = self.linear(self.linear(x, prefix + "f_a_proj"), prefix + "f_b_proj")
        gate = (forget + self.weights[prefix + "dt_bias"]).view(rows, heads, width)
        rate = self.weights[prefix + "A_log"].exp()[:, None]
        decay = torch.exp(self.lower_bound * torch.sigmoid(rate * gate))
        beta = torch.sigmoid(self.linear(x, prefix + "b_proj"))
        outs, states = [], []
        for t in range(rows):
            s = s * decay[t][..., None]
            change = (v[t] - torch.einsum("hkv,hk->hv", s, k[t])) * beta[t][:, None]
            s = s + k[t][..., None] * change[:, None]
            outs.append(torch.einsum("hkv,hk->hv", s, q[t]))
            states.append((s, history[t + 1 : t + self.taps]))
        z = self.linear(self.linear(x, prefix + "g_a_proj"), prefix + "g_b_proj")
        out = self.rms(torch.stack(outs), prefix + "o_norm.weight")
        out = out * torch.sigmoid(z.view(rows, heads, width))
        return self.linear(out.flatten(1), prefix + "o_proj"), states

    def mla(self, x: Tensor, prefix: str, cache: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """Outputs [W, H] and the latent cache with these rows behind its first ``before`` ones.

        Raises:
            ValueError: if the context grows beyond ``index_topk``.
        """
        c, rows = self.config, x.shape[0]
        heads, qk, v_width = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"]
        if before + rows > c["index_topk"]:
            raise ValueError(
                f"context of {before + rows} tokens; this reference is dense and stops at "
                f"index_topk {c['index_topk']}: use shorter prompts"
            )
        kv = self.weights[prefix + "kv_b_proj.weight"].view(heads, qk + v_width, -1)
        latent = self.rms(self.linear(x, prefix + "q_a_proj"), prefix + "q_a_layernorm.weight")
        q = self.linear(latent, prefix + "q_b_proj").view(rows, heads, qk)
        new = self.rms(
            self.linear(x, prefix + "kv_a_proj_with_mqa"), prefix + "kv_a_layernorm.weight"
        )
        cache = torch.cat([cache[:before], new])
        scores = torch.einsum("thd,hdr,nr->thn", q, kv[:, :qk], cache) * qk**-0.5
        future = torch.arange(before + rows) > before + torch.arange(rows)[:, None]
        weights = torch.softmax(scores.masked_fill(future[:, None], float("-inf")), -1)
        out = torch.einsum("thn,nr,hvr->thv", weights, cache, kv[:, qk:])
        return self.linear(out.flatten(1), prefix + "o_proj"), cache


class Session:
    """Committed state of one request: ``verify`` leaves candidates, ``commit`` keeps the first
    rows.

    Attributes:
        tokens: committed positions of the target.
        draft_rows: rows of the MTP cache that belong to committed positions.
    """

    def __init__(self, reference: Reference):
        self.reference, self.tokens, self.draft_rows = reference, 0, 0
        channels = reference.kda_heads * reference.kda_width
        latent = reference.config["kv_lora_rank"]
        self._states: list[KdaState | Tensor] = [
            (
                torch.zeros(reference.kda_heads, reference.kda_width, reference.kda_width),
                torch.zeros(reference.taps - 1, 3 * channels),
            )
            if kda
            else torch.zeros(0, latent)
            for kda in reference.is_kda
        ]
        self._candidates: list[list[KdaState] | Tensor] = []
        self._draft_cache = torch.zeros(0, latent)

    def verify(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [W, H] behind the final norm and logits [W, V]; nothing is committed."""
        r = self.reference
        embedded = r.weights["embed_tokens.weight"][ids]
        streams = embedded[:, None].repeat(1, r.config["hc_mult"], 1)
        self._candidates = []
        for i in range(r.layers):
            p = f"layers.{i}."
            x, write, mixer = r.mix(streams, p + "hc_attn")
            x = r.rms(x, p + "input_layernorm.weight")
            state = self._states[i]
            y: Tensor
            new: list[KdaState] | Tensor
            if isinstance(state, tuple):
                y, new = r.kda(x, p + "self_attn.", state)
            else:
                y, new = r.mla(x, p + "self_attn.", state, self.tokens)
            self._candidates.append(new)
            streams = _written(y, streams, write, mixer)
            x, write, mixer = r.mix(streams, p + "hc_ffn")
            y = r.feed_forward(r.rms(x, p + "post_attention_layernorm.weight"), p + "mlp.")
            streams = _written(y, streams, write, mixer)
        hidden = r.rms(streams.mean(1), "norm.weight")
        return hidden, r.linear(hidden, "lm_head")

    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` verified rows (at least one)."""
        self._states = [new[rows - 1] if isinstance(new, list) else new for new in self._candidates]
        self.tokens += rows

    def draft(self, ids: Tensor, hidden: Tensor, at: int) -> Tensor:
        """Run MTP rows at positions ``at`` onwards; rows behind them are overwritten.

        Args:
            ids: [W] the next token of each position.
            hidden: [W, H] target hidden states, or recycled MTP outputs.
            at: first position.
        Returns:
            [W, H]; the vocabulary head applies directly.
        """
        r, p = self.reference, f"layers.{self.reference.layers}."
        embedded = r.weights["embed_tokens.weight"][ids].clone()
        if at == 0:
            embedded[0] = 0
        pair = [r.rms(embedded, p + "enorm.weight"), r.rms(hidden, p + "hnorm.weight")]
        x = r.linear(torch.cat(pair, -1), p + "eh_proj")
        y, self._draft_cache = r.mla(
            r.rms(x, p + "input_layernorm.weight"), p + "self_attn.", self._draft_cache, at
        )
        x = x + y
        x = x + r.feed_forward(r.rms(x, p + "post_attention_layernorm.weight"), p + "mlp.")
        return r.rms(x, p + "shared_head.norm.weight")


def _written(y: Tensor, streams: Tensor, write: Tensor, mixer: Tensor) -> Tensor:
    return write[..., None] * y[:, None] + torch.einsum("tij,tih->tjh", mixer, streams)
