"""What transformers computes for a tiny Llama checkpoint, read from the same files.

The target is transformers' own model; the MTP layer is composed here from its decoder layer. Only
this file knows transformers; the product never imports it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support.recipe_oracle import Oracle

NEVER = -1e5
"""Logit of a token that the drafter does not know."""


class TransformersLlama:
    """Target and MTP layer of a checkpoint, by transformers' modules."""

    def __init__(self, folder: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = json.loads((folder / "config.json").read_text())
        self.config = LlamaConfig(**config)
        self.config._attn_implementation = "eager"
        tensors = load_file(folder / "model.safetensors")
        own = f"model.layers.{config['num_hidden_layers']}."
        self.model = LlamaForCausalLM(self.config).eval()
        target = {name: value for name, value in tensors.items() if not name.startswith(own)}
        if config["tie_word_embeddings"]:
            target["lm_head.weight"] = target["model.embed_tokens.weight"]
        self.model.load_state_dict(target)
        drafted = tensors.pop(f"{own}shared_head.tokens", None)
        self.outside = torch.ones(config["vocab_size"], dtype=torch.bool)
        self.outside[slice(None) if drafted is None else drafted] = False
        self.mtp = MtpLayer(self.config).eval()
        self.mtp.load_state_dict(
            {n.removeprefix(own): value for n, value in tensors.items() if n.startswith(own)}
        )

    @torch.no_grad()
    def run(self, tokens: Tensor) -> Oracle:
        """See `Reference.run`."""
        hidden = self.model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        logits = self.model.lm_head(hidden)
        mtp, _ = self._mtp_rows(tokens[1:], hidden[:-1])
        everything = float("inf")
        return Oracle(tokens, logits, hidden, hidden, {}, mtp, gap=everything, sparse_rows=0)

    @torch.no_grad()
    def draft(self, oracle: Oracle, consumed: int, tokens: list[int]) -> Tensor:
        """See `Reference.draft`; every step runs the whole history, without a cache."""
        fed, hidden, logits = oracle.tokens[1:consumed], oracle.feedback[:consumed], []
        for token in tokens:
            fed = torch.cat((fed, torch.tensor([token])))
            rows, recycled = self._mtp_rows(fed, hidden)
            logits.append(rows[-1])
            hidden = torch.cat((hidden, recycled[-1:]))
        return torch.stack(logits)

    def _mtp_rows(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and states [T, H] of the pairs (hidden[i], tokens[i]) at position i."""
        text = self.model.model
        states = self.mtp(text.embed_tokens(tokens), hidden, text.rotary_emb)
        logits = self.model.lm_head(states)
        return logits.masked_fill(self.outside, NEVER), states


class MtpLayer(nn.Module):
    """Two norms, their projection, one decoder layer of transformers, a norm."""

    def __init__(self, config) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

        size = config.hidden_size
        self.enorm, self.hnorm = (LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        layer = LlamaDecoderLayer(config, 0)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.shared_head = nn.Module()
        self.shared_head.norm = LlamaRMSNorm(size, config.rms_norm_eps)

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: nn.Module) -> Tensor:
        """[T, H] twice to [T, H]."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))[None]
        length = x.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        turns = rotary(x, torch.arange(length)[None])
        attended, _ = self.self_attn(
            self.input_layernorm(x), position_embeddings=turns, attention_mask=mask
        )
        x = x + attended
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.shared_head.norm(x)[0]
