"""The DeepSeek-V4.1 model and its drafter as their equations say, on whole sequences.

Independent of the product: no state, no cache, no page, no operator of it; rows one by one where
that is the plainer form. Roundings of keys are found by searching a grid. Only the names of tensors
and settings are shared. Equations: the recipe's README.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.deepseek_tiny import compressed

MIN_GAP = 1e-5
"""Smallest difference between the last selected and the first left-out score: below it an equal
computation in another order may select otherwise."""


@dataclass
class Oracle:
    """Results for one sequence of L tokens: logits [L, V], hidden [L, H] after the final norm,
    features [L, taps * H]; picks per index source, a set of entries per row; the smallest gap at
    any selection's edge; rows that leave something out."""

    logits: Tensor
    hidden: Tensor
    features: Tensor
    picks: dict[int, list[set[int]]] = field(default_factory=dict)
    gap: float = math.inf
    sparse_rows: int = 0


@dataclass
class Drafted:
    """tokens [D], logits [D, V], confidence [D] in (0, 1)."""

    tokens: list[int]
    logits: Tensor
    confidence: Tensor


def nearest(values: Tensor, grid: Tensor) -> Tensor:
    """Nearest grid value in magnitude; a tie goes to the value of even place."""
    place = torch.arange(len(grid))
    distance = (values.abs().unsqueeze(-1).double() - grid.double()).abs()
    best = distance.amin(-1, keepdim=True)
    tied = distance == best
    score = torch.where(tied, (place % 2 == 0).double() + 1, torch.zeros((), dtype=torch.float64))
    return torch.copysign(grid[score.argmax(-1)], values)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = torch.tensor(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)


def rounded(
    x: Tensor, group: int, grid: Tensor, floor: float, *, e4m3_scale: bool = False
) -> Tensor:
    """Values on a grid whose scale belongs to a group of channels."""
    parts = x.unflatten(-1, (-1, group))
    largest = parts.abs().amax(-1, keepdim=True).clamp(min=floor)
    if e4m3_scale:
        scale = nearest(largest / float(grid[-1]), E4M3)
    else:
        mantissa, exponent = torch.frexp(largest * (1 / float(grid[-1])))
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    top = float(grid[-1])
    return (nearest((parts / scale).clamp(-top, top), grid) * scale).flatten(-2)


def unpacked(value: Tensor, scale: Tensor) -> Tensor:
    """Values of packed weights: E4M3 by blocks, or pairs of E2M1 codes."""
    scale = scale.float()
    if value.dtype == torch.float8_e4m3fn:
        high, wide = (-(-s // g) for s, g in zip(value.shape, scale.shape, strict=True))
        high, wide = (1 if high == 1 else 32), (32 if wide > 1 else 1)
        factors = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)
        return value.float() * factors[: value.shape[0], : value.shape[1]]
    codes = value.view(torch.uint8).int()
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    signs = 1.0 - 2.0 * (both >> 3)
    return signs * E2M1[both & 7] * scale.repeat_interleave(32, 1)


class DeepseekOracle:
    """A checkpoint folder's model."""

    def __init__(self, folder: Path) -> None:
        text: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
        self.text = text
        stored = load_file(folder / "model.safetensors")
        self.packed = {
            n.removesuffix(".weight") for n, v in stored.items() if v.element_size() == 1
        }
        self.weights = {
            name: unpacked(value, stored[f"{name.removesuffix('.weight')}.scale"])
            if name.removesuffix(".weight") in self.packed
            else value
            for name, value in stored.items()
            if not name.endswith(".scale")
        }
        self.layers = text["num_hidden_layers"]
        self.window = text["sliding_window"]
        self.ids = compressed(text["vocab_size"])

    def linear(self, x: Tensor, name: str) -> Tensor:
        if name in self.packed:
            x = rounded(x, 32, E4M3, 1e-4)
        return x @ self.weights[f"{name}.weight"].t()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return (
            self.weights[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + 1e-20).sqrt()
        )

    def key_rounding(self, x: Tensor) -> Tensor:
        return rounded(x, 32, E4M3, 1e-4) if self.text["kv_fake_quantisation"] else x

    def entry_rounding(self, x: Tensor) -> Tensor:
        if not self.text["kv_fake_quantisation"]:
            return x
        return rounded(x, 16, E2M1, 6 * 2.0**-9, e4m3_scale=True)

    def index_rounding(self, x: Tensor) -> Tensor:
        return rounded(x, 32, E2M1, 6 * 2.0**-126) if self.text["kv_fake_quantisation"] else x

    def rates(self, compressing: bool) -> Tensor:
        dim = self.text["qk_rope_head_dim"]
        theta = self.text["compress_rope_theta" if compressing else "rope_theta"]
        plain = torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)])
        if not compressing:
            return plain
        yarn = self.text["rope_scaling"]
        original = yarn["original_max_position_embeddings"]
        edges = [
            dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (yarn["beta_fast"], yarn["beta_slow"])
        ]
        low, high = max(math.floor(edges[0]), 0), min(math.ceil(edges[1]), dim - 1)
        mixed = []
        for i, rate in enumerate(plain.tolist()):
            ramp = min(max((i - low) / max(high - low, 1e-3), 0), 1)
            mixed.append(rate / yarn["factor"] * ramp + rate * (1 - ramp))
        return torch.tensor(mixed)

    def turn(self, x: Tensor, positions: Tensor, compressing: bool, sign: int = 1) -> Tensor:
        """[L, ..., D] by positions [L]."""
        rates = self.rates(compressing)
        angle = sign * positions.float().view(-1, *[1] * (x.dim() - 1)) * rates
        n = 2 * len(rates)
        even, odd = x[..., -n::2], x[..., -n + 1 :: 2]
        result = x.clone()
        result[..., -n::2] = even * angle.cos() - odd * angle.sin()
        result[..., -n + 1 :: 2] = even * angle.sin() + odd * angle.cos()
        return result

    def mixes(self, streams: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        n, eps = self.text["hc_mult"], self.text["hc_eps"]
        flat = streams.flatten(1)
        raw = (
            flat
            @ self.weights[f"{name}_fn"].t()
            / (flat.square().mean(1, keepdim=True) + 1e-20).sqrt()
        )
        base, scale = self.weights[f"{name}_base"], self.weights[f"{name}_scale"]
        pre = torch.sigmoid(raw[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * torch.sigmoid(raw[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = torch.softmax((raw[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n), -1) + eps
        for step in range(2 * self.text["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(-2 if step % 2 == 0 else -1, keepdim=True) + eps)
        return pre, post, comb

    def block(self, streams: Tensor, pre: Tensor, prefix: str, attend, experts: tuple[int, int]):
        """(streams, the coefficients handed on)."""

        def close(output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
            return post[..., None] * output[:, None] + torch.einsum("tij,tid->tjd", comb, streams)

        own, post, comb = self.mixes(streams, f"{prefix}hc_attn")
        x = torch.einsum("ti,tid->td", pre, streams)
        streams = close(attend(self.norm(x, f"{prefix}attn_norm")), post, comb)
        after, post, comb = self.mixes(streams, f"{prefix}hc_ffn")
        x = torch.einsum("ti,tid->td", own, streams)
        return close(
            self.experts(self.norm(x, f"{prefix}ffn_norm"), f"{prefix}ffn.", *experts), post, comb
        ), after

    def experts(self, x: Tensor, prefix: str, count: int, chosen: int) -> Tensor:
        scores = torch.log1p(torch.exp(self.linear(x, f"{prefix}gate"))).sqrt()
        bias = self.weights[f"{prefix}gate.bias"]
        result = self.expert(x, f"{prefix}shared_experts.", 1.0)
        for row in range(len(x)):
            order = sorted(range(count), key=lambda e: (-float(scores[row, e] + bias[e]), e))[
                :chosen
            ]
            total = float(scores[row, order].sum())
            for e in order:
                weight = float(scores[row, e]) / total * self.text["routed_scaling_factor"]
                result[row] += self.expert(x[row : row + 1], f"{prefix}experts.{e}.", weight)[0]
        return result

    def expert(self, x: Tensor, prefix: str, weight: float) -> Tensor:
        limit = self.text["swiglu_limit"]
        gate = self.linear(x, f"{prefix}w1").clamp(max=limit)
        up = self.linear(x, f"{prefix}w3").clamp(-limit, limit)
        return self.linear(weight * gate * torch.sigmoid(gate) * up, f"{prefix}w2")

    def queries(self, x: Tensor, prefix: str, positions: Tensor, compressing: bool):
        latent = self.norm(self.linear(x, f"{prefix}wq_a"), f"{prefix}q_norm")
        heads = self.linear(latent, f"{prefix}wq_b").view(
            len(x), self.text["num_attention_heads"], -1
        )
        return latent, self.turn(heads, positions, compressing)

    def keys(self, x: Tensor, prefix: str, positions: Tensor, compressing: bool) -> Tensor:
        key = self.norm(self.linear(x, f"{prefix}wkv"), f"{prefix}kv_norm")
        return self.key_rounding(self.turn(key, positions, compressing))

    def attend_row(self, query: Tensor, keys: Tensor, prefix: str) -> Tensor:
        """[heads, D] over keys [N, D]."""
        scores = query @ keys.t() / math.sqrt(query.shape[1])
        sink = self.weights[f"{prefix}attn_sink"][:, None]
        return torch.softmax(torch.cat([scores, sink], 1), 1)[:, :-1] @ keys

    def output(self, result: Tensor, prefix: str, positions: Tensor, compressing: bool) -> Tensor:
        result = self.turn(result, positions, compressing, sign=-1)
        groups = self.text["o_groups"]
        parts = result.reshape(len(result), groups, -1)
        maps = self.weights[f"{prefix}wo_a.weight"].view(groups, self.text["o_lora_rank"], -1)
        return self.linear(torch.einsum("tgd,grd->tgr", parts, maps).flatten(1), f"{prefix}wo_b")

    def attention(self, x: Tensor, layer: int, shared: dict, oracle: Oracle) -> Tensor:
        prefix, ratio = f"layers.{layer}.attn.", self.text["compress_ratios"][layer]
        positions = torch.arange(len(x))
        latent, query = self.queries(x, prefix, positions, ratio > 0)
        keys = self.keys(x, prefix, positions, ratio > 0)
        if layer in self.text["kv_source_layer_ids"]:
            self.compress(x, prefix, ratio, shared)
        if layer in self.text["index_source_layer_ids"]:
            shared["picks"] = self.select(x, latent, layer, shared, oracle)
        rows = []
        for t in range(len(x)):
            seen = keys[max(0, t - self.window + 1) : t + 1]
            if ratio:
                seen = torch.cat([seen, shared["entries"][sorted(shared["picks"][t])]])
            rows.append(self.attend_row(query[t], seen, prefix))
        return self.output(torch.stack(rows), prefix, positions, ratio > 0)

    def compress(self, x: Tensor, prefix: str, ratio: int, shared: dict) -> None:
        name = f"{prefix}compressor."
        value = self.linear(x, f"{name}wkv")
        groups = [slice(j * ratio, (j + 1) * ratio) for j in range(len(x) // ratio)]
        if ratio > 1:
            gate = self.linear(x, f"{name}wgate")
            pooled = [(value[g] * torch.softmax(gate[g], 0)).sum(0) for g in groups]
            value = torch.stack(pooled) if pooled else value[:0]
        latent = self.norm(value, f"{name}norm")
        first = torch.arange(len(latent)) * ratio
        key = self.norm(self.linear(latent, f"{prefix}indexer.wk"), f"{prefix}indexer.k_norm")
        shared["index"] = self.index_rounding(self.turn(key, first, True))
        shared["entries"] = self.entry_rounding(self.turn(latent, first, True))
        shared["ratio"] = ratio

    def select(
        self, x: Tensor, latent: Tensor, layer: int, shared: dict, oracle: Oracle
    ) -> list[set[int]]:
        text, prefix = self.text, f"layers.{layer}.attn.indexer."
        heads, dim, count = text["index_n_heads"], text["index_head_dim"], text["index_topk"]
        query = self.linear(latent, f"{prefix}wq_b").view(len(x), heads, dim)
        query = self.index_rounding(self.turn(query, torch.arange(len(x)), True))
        weight = self.linear(x, f"{prefix}weights_proj") / math.sqrt(dim * heads)
        candidates, size = text["candidate_source_layer_id"], text["candidate_block_size"]
        picks, pools = [], []
        for t in range(len(x)):
            visible = (t + 1) // shared["ratio"]
            scores = (weight[t, :, None] * (query[t] @ shared["index"][:visible].t()).relu()).sum(0)
            allowed = list(range(visible))
            if 0 <= candidates < layer:
                allowed = [j for j in allowed if j // size in shared["pool"][t]]
            order = sorted(allowed, key=lambda j: (-float(scores[j]), j))
            if len(order) > count:
                oracle.gap = min(oracle.gap, float(scores[order[count - 1]] - scores[order[count]]))
                oracle.sparse_rows += 1
            picks.append(set(order[:count]))
            if layer == candidates:
                pools.append(self.best_blocks(scores, visible, oracle))
        if layer == candidates:
            shared["pool"] = pools
        oracle.picks[layer] = picks
        return picks

    def best_blocks(self, scores: Tensor, visible: int, oracle: Oracle) -> set[int]:
        size, keep = self.text["candidate_block_size"], self.text["candidate_topk_blocks"]
        best = {
            b: float(scores[b * size : (b + 1) * size].max()) for b in range(-(-visible // size))
        }
        if visible:
            best[(visible - 1) // size] = math.inf
        order = sorted(best, key=lambda b: (-best[b], b))
        if len(order) > keep:
            oracle.gap = min(oracle.gap, best[order[keep - 1]] - best[order[keep]])
        return set(order[:keep])

    def engram(self, streams: Tensor, tokens: list[int], layer: int) -> Tensor:
        text, place = self.text, self.text["engram_layer_ids"].index(layer)
        prefix, reach = f"layers.{layer}.engram.", text["engram_max_ngram_size"]
        n, hidden = text["hc_mult"], text["hidden_size"]
        primes = self.primes()[place]
        bound = (2**63 - 1) // text["engram_compressed_vocab_size"] // 2
        drawn = np.random.default_rng(10007 * layer).integers(0, bound, reach, dtype=np.int64)
        result = streams.clone()
        for t in range(len(tokens)):
            back = [
                self.ids[tokens[t - s]] if t >= s else self.ids[text["engram_pad_token_id"]]
                for s in range(reach)
            ]
            mixed, rows, offset = back[0] * (2 * int(drawn[0]) + 1), [], 0
            for s in range(1, reach):
                mixed ^= back[s] * (2 * int(drawn[s]) + 1)
                for prime in primes[s - 1]:
                    rows.append(offset + mixed % prime)
                    offset += prime
            flat = self.weights[f"{prefix}embed.weight"][rows].flatten()
            joint = self.linear(flat, f"{prefix}wkv").view(n + 1, hidden)
            for c in range(n):
                h, key = streams[t, c], joint[c]
                product = (
                    self.weights[f"{prefix}q_weight"][c] * self.weights[f"{prefix}k_weight"][c]
                )
                d = float(
                    (h * product * key).sum()
                    / h.square().mean().sqrt()
                    / key.square().mean().sqrt()
                )
                d /= math.sqrt(hidden)
                gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(d), 1e-6)), d)))
                result[t, c] = h + gate * joint[n]
        return result

    def primes(self) -> list[list[list[int]]]:
        used: set[int] = set()
        result = []
        for _ in self.text["engram_layer_ids"]:
            sizes = []
            for _ in range(self.text["engram_max_ngram_size"] - 1):
                found, number = [], self.text["engram_vocab_size"]
                while len(found) < self.text["engram_n_heads"]:
                    if number not in used and all(
                        number % d for d in range(2, math.isqrt(number) + 1)
                    ):
                        found.append(number)
                        used.add(number)
                    number += 1
                sizes.append(found)
            result.append(sizes)
        return result

    @torch.no_grad()
    def run(self, tokens: list[int]) -> Oracle:
        """Every row of a sequence."""
        text, oracle, shared, features = self.text, Oracle(*[torch.empty(0)] * 3), {}, []
        streams = self.weights["embed.weight"][tokens][:, None].repeat(1, text["hc_mult"], 1)
        pre = torch.zeros(len(tokens), text["hc_mult"])
        pre[:, 0] = 1
        experts = (text["n_routed_experts"], text["num_experts_per_tok"])
        for layer in range(self.layers):
            if layer in text["engram_layer_ids"]:
                streams = self.engram(streams, tokens, layer)
            if layer in text["dspark_target_layer_ids"]:
                features.append(streams.mean(1))

            def attend(x: Tensor, layer: int = layer) -> Tensor:
                return self.attention(x, layer, shared, oracle)

            streams, pre = self.block(streams, pre, f"layers.{layer}.", attend, experts)
        oracle.hidden = self.norm(torch.einsum("ti,tid->td", pre, streams), "norm")
        oracle.logits = self.linear(oracle.hidden, "head")
        oracle.features = torch.cat(features, 1)
        return oracle

    @torch.no_grad()
    def draft(
        self, features: Tensor, pending: int, depth: int, forced: list[int] | None = None
    ) -> Drafted:
        """Greedy or forced drafts after the consumed rows `features` [N, taps * H]."""
        text, n = self.text, len(features)
        stages = text["num_nextn_predict_layers"]
        start = max(0, n - self.window)
        context = self.norm(self.linear(features[start:], "mtp.0.main_proj"), "mtp.0.main_norm")
        ids = [pending] + [text["dspark_noise_token_id"]] * (depth - 1)
        streams = self.weights["embed.weight"][ids][:, None].repeat(1, text["hc_mult"], 1)
        pre = torch.zeros(depth, text["hc_mult"])
        pre[:, 0] = 1
        own, before = torch.arange(n, n + depth), torch.arange(start, n)
        for stage in range(stages):
            prefix = f"mtp.{stage}.attn."
            known = self.keys(context, prefix, before, False)

            def attend(x: Tensor, prefix: str = prefix, known: Tensor = known) -> Tensor:
                _, query = self.queries(x, prefix, own, False)
                keys = torch.cat([known, self.keys(x, prefix, own, False)])
                rows = torch.stack([self.attend_row(q, keys, prefix) for q in query])
                return self.output(rows, prefix, own, False)

            experts = (text["dspark_n_routed_experts"], text["dspark_num_experts_per_tok"])
            streams, pre = self.block(streams, pre, f"mtp.{stage}.", attend, experts)
        rows = torch.einsum("ti,tid->td", pre, streams)
        last = f"mtp.{stages - 1}."
        base = self.linear(self.norm(rows, f"{last}norm"), "head")
        previous, tokens, logits, confidence = pending, [], [], []
        for step in range(depth):
            embedded = self.weights[f"{last}markov_head.embed.weight"][previous]
            logits.append(base[step] + self.linear(embedded, f"{last}markov_head.head"))
            both = torch.cat([rows[step], embedded])
            confidence.append(torch.sigmoid(self.linear(both, f"{last}confidence_head.proj"))[0])
            previous = int(logits[-1].argmax()) if forced is None else forced[step]
            tokens.append(previous)
        return Drafted(tokens, torch.stack(logits), torch.stack(confidence))
