"""The frozen target and the drafter to train, of a Llama checkpoint folder, in plain torch.

Shapes: B rows, T tokens, H hidden, V vocabulary, D drafted tokens, K drafts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

HEAD = "lm_head.weight"
TOKENS = "shared_head.tokens"
NEVER = -1e5
"""Logit of a token that is not drafted."""


class Norm(nn.Module):
    """Root-mean-square norm with a weight; computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H] of the same type."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Projections of queries, keys and values by head, turned by position."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        self.key_heads = config["num_key_value_heads"]
        self.width, self.group = config["head_dim"], heads // self.key_heads
        keys = self.key_heads * self.width
        self.q_proj = nn.Linear(hidden, heads * self.width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(hidden, keys, bias=False) for _ in "kv")
        self.o_proj = nn.Linear(heads * self.width, hidden, bias=False)

    def project(self, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, key heads, group, T, width], keys and values [B, key heads, T, width].

        Args:
            x: [B, T, H].
            turns: cosines and sines [2, B or 1, T, width / 2].
        """
        q = self.q_proj(x).unflatten(-1, (self.key_heads, self.group, self.width))
        k, v = (
            p(x).unflatten(-1, (self.key_heads, self.width)) for p in (self.k_proj, self.v_proj)
        )
        q, k = turned(q.flatten(2, 3), turns), turned(k, turns)
        q = q.unflatten(2, (self.key_heads, self.group))
        return q.permute(0, 2, 3, 1, 4), k.transpose(1, 2), v.transpose(1, 2)

    def close(self, attended: Tensor) -> Tensor:
        """Heads [B, key heads, group, T, width] to [B, T, H]."""
        out: Tensor = self.o_proj(attended.permute(0, 3, 1, 2, 4).flatten(2))
        return out


class FeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, width = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer under its published names; attention proper is the caller's."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn, self.mlp = Attention(config), FeedForward(config)
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden, eps), Norm(hidden, eps)

    def enter(self, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of residual rows [B, T, H]."""
        return self.self_attn.project(self.input_layernorm(x), turns)

    def leave(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual rows behind the layer."""
        x = x + self.self_attn.close(attended)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class SharedHead(nn.Module):
    """The norm in front of the head, under its published name."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.norm = Norm(size, eps)


class Drafter(Layer):
    """The layer over pairs of a state and the token behind it, see the recipe's README."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.enorm, self.hnorm = Norm(hidden, eps), Norm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.shared_head = SharedHead(hidden, eps)

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Residual rows of pairs, [B, T, H] each."""
        out: Tensor = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        return out

    def state(self, x: Tensor, attended: Tensor) -> Tensor:
        """Outputs [B, T, H], which the head reads and the next draft begins with."""
        out: Tensor = self.shared_head.norm(self.leave(x, attended))
        return out

    def unroll(self, embedded: Tensor, hidden: Tensor, turns: Tensor, depth: int) -> list[Tensor]:
        """Outputs [B, T, H] of every depth, for every row as the end of a chain.

        Row i of depth k sees the true pairs up to i - k and the k rows of its own chain behind
        them; rows i < k have no whole chain and mean nothing.

        Args:
            embedded: of the tokens behind the states.
            hidden: the target's states.
            turns: of positions 0 .. T - 1.
            depth: drafts, at least one.
        """
        length = hidden.shape[1]
        at = torch.arange(length, device=hidden.device)
        scale = self.self_attn.width**-0.5
        outs: list[Tensor] = []
        chain: list[tuple[Tensor, Tensor]] = []
        for k in range(depth):
            x = self.joined(embedded, hidden if k == 0 else _later(outs[-1], 1, 1))
            q, keys, values = self.enter(x, turns)
            chain.append((keys, values))
            truth = torch.matmul(q * scale, chain[0][0].unsqueeze(2).mT)
            scores = [truth.masked_fill(at > at[:, None] - k, float("-inf"))]
            own = [
                tuple(_later(t, k - d, 2).unsqueeze(2) for t in chain[d]) for d in range(1, k + 1)
            ]
            scores += [(q * scale * key).sum(-1, keepdim=True) for key, _ in own]
            # A row without any true pair (i < k) still sees its own chain: no softmax is empty.
            weights = torch.softmax(torch.cat(scores, -1).float(), -1).to(q.dtype)
            mixed = torch.matmul(weights[..., :length], chain[0][1].unsqueeze(2))
            for n, (_, value) in enumerate(own):
                mixed = mixed + weights[..., length + n, None] * value
            outs.append(self.state(x, mixed))
        return outs


def _later(x: Tensor, rows: int, dim: int) -> Tensor:
    """Rows moved back by so many places along `dim`; the first ones become zeros."""
    if rows == 0:
        return x
    head = torch.zeros_like(x.narrow(dim, 0, rows))
    return torch.cat([head, x.narrow(dim, 0, x.shape[dim] - rows)], dim)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Heads [B, T, heads, width] with channel i turned with channel i + width / 2."""
    cos, sin = (t.unsqueeze(2).to(x.dtype) for t in turns)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class PackagedModel(nn.Module):
    """Target, drafter and head; the target needs no gradients.

    Args:
        config: of the checkpoint folder.

    Attributes:
        tokens: [D] ids that the drafter may propose, ascending; all until `choose`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        if config.get("rope_scaling") or not config["tie_word_embeddings"]:
            raise ValueError("scaled positions and a head of its own are not trained here")
        self.config = config
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        count = config["num_hidden_layers"]
        self.blocks = [Layer(config) for _ in range(count)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = Norm(config["hidden_size"], config["rms_norm_eps"])
        self.drafter = Drafter(config)
        self.tokens: Tensor
        self.register_buffer("tokens", torch.arange(config["vocab_size"]))
        self.frequencies: Tensor
        self.register_buffer("frequencies", _frequencies(config))
        for parameter in self.target_parameters():
            parameter.requires_grad_(False)

    def target_parameters(self) -> list[nn.Parameter]:
        """Everything but the drafter's."""
        return [p for n, p in self.named_parameters() if not n.startswith("drafter.")]

    def choose(self, tokens: Tensor) -> None:
        """Let the drafter propose these ids alone."""
        self.tokens = tokens.sort().values.to(self.embed_tokens.weight.device)

    def turns(self, positions: Tensor) -> Tensor:
        """Cosines and sines [2, B, T, width / 2] float32 of positions [B, T]."""
        angles = positions[..., None].float() * self.frequencies
        return torch.stack([angles.cos(), angles.sin()])

    def hidden(self, ids: Tensor) -> Tensor:
        """States [B, T, H] behind the final norm, of tokens [B, T] from position 0 on."""
        x = self.embed_tokens(ids)
        turns = self.turns(torch.arange(ids.shape[1], device=ids.device)[None])
        for layer in self.blocks:
            q, k, v = layer.enter(x, turns)
            mixed = F.scaled_dot_product_attention(
                q.flatten(1, 2), k, v, is_causal=True, enable_gqa=True
            )
            x = layer.leave(x, mixed.unflatten(1, q.shape[1:3]))
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., V]."""
        return F.linear(hidden, self.embed_tokens.weight)

    def draft_head(self) -> Tensor:
        """Rows [D, H] of the head that drafts read."""
        return self.embed_tokens.weight.index_select(0, self.tokens)

    def draft_logits(self, out: Tensor) -> Tensor:
        """[..., H] to [..., V], ``NEVER`` outside the drafted tokens."""
        logits = F.linear(out, self.draft_head())
        everything = logits.new_full((*logits.shape[:-1], self.config["vocab_size"]), NEVER)
        return everything.index_copy_(-1, self.tokens, logits)


def _frequencies(config: dict[str, Any]) -> Tensor:
    """Radians a position of every pair of channels."""
    width = config["head_dim"]
    channels = torch.arange(0, width, 2, dtype=torch.float32)
    return torch.exp(-math.log(config["rope_theta"]) / width * channels)


def load_target(folder: Path, device: torch.device, dtype: torch.dtype) -> PackagedModel:
    """The model of a checkpoint folder; the drafter begins as its last layer in float32, over the
    mean of state and embedding.
    """
    config = json.loads((folder / "config.json").read_text())
    with torch.device("meta"):
        model = PackagedModel(config)
    model.to_empty(device=device)
    stored = load_file(folder / "model.safetensors")
    target = {n.removeprefix("model."): t for n, t in stored.items() if n != HEAD}
    last = f"layers.{config['num_hidden_layers'] - 1}."
    hidden = config["hidden_size"]
    drafter = {n.removeprefix(last): t for n, t in target.items() if n.startswith(last)}
    plain = torch.eye(hidden)
    drafter["eh_proj.weight"] = torch.cat([plain, plain], 1) / 2
    for name in ("enorm", "hnorm", "shared_head.norm"):
        drafter[f"{name}.weight"] = torch.ones(hidden)
    target |= {f"drafter.{name}": tensor for name, tensor in drafter.items()}
    tables = {"tokens": torch.arange(config["vocab_size"]), "frequencies": _frequencies(config)}
    model.load_state_dict(target | tables)
    model.layers.to(dtype)
    model.embed_tokens.to(dtype)
    model.norm.to(dtype)
    return model.eval()


def drafter_tensors(model: PackagedModel) -> dict[str, Tensor]:
    """The drafter under published names: matrices and norms in BF16, and its tokens."""
    prefix = f"model.layers.{model.config['num_hidden_layers']}."
    parameters = model.drafter.named_parameters()
    tensors = {f"{prefix}{n}": p.detach().bfloat16().cpu().contiguous() for n, p in parameters}
    return tensors | {f"{prefix}{TOKENS}": model.tokens.cpu()}


def load_drafter(model: PackagedModel, tensors: dict[str, Tensor]) -> None:
    """The reverse of `drafter_tensors`, for plain tensors."""
    prefix = f"model.layers.{model.config['num_hidden_layers']}."
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    model.choose(own.pop(TOKENS))
    model.drafter.load_state_dict(own)
