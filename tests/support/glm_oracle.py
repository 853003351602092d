"""What transformers computes for a tiny GLM checkpoint, read from the same files.

The target is transformers' own model, loaded through its conversion of published names. Its MTP
layer does not exist there, so it is composed here from transformers' attention, experts and norms.
Only this file knows transformers; the product never imports it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support.recipe_oracle import Oracle, left_out, watched_topk


class TransformersGlm:
    """Target and MTP layer of a checkpoint, by transformers' modules."""

    def __init__(self, folder: Path) -> None:
        from transformers import Glm5NextForConditionalGeneration
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.model, loading = Glm5NextForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        self.model.eval()
        absent = [name for name in loading["missing_keys"] if not name.startswith("model.visual.")]
        assert not absent, f"transformers found no {absent}"
        self.text = self.model.model.language_model
        self.config = self.text.config
        self.layers = self.config.num_hidden_layers
        tensors = load_file(folder / "model.safetensors")
        self.mtp = MtpLayer(self.config, tensors, f"model.language_model.layers.{self.layers}.")
        raw = json.loads((folder / "config.json").read_text())["text_config"]
        self.count = raw["index_topk"] // raw["index_kpool"]

    @torch.no_grad()
    def run(self, tokens: Tensor) -> Oracle:
        """Teacher-forced results for `tokens` [L]."""
        selected: dict[int, list[set[int]]] = {}
        gaps: list[float] = []
        with self._spy(selected, gaps):
            hidden = self.text(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
            embedded = self.text.embed_tokens(tokens[1:])
            rows = self.mtp(embedded, hidden[:-1], torch.arange(len(tokens) - 1))
        return Oracle(
            tokens=tokens,
            logits=self.model.lm_head(hidden),
            feedback=hidden,
            sampling=hidden,
            selected=selected,
            mtp_logits=self.model.lm_head(rows),
            gap=min(gaps, default=float("inf")),
            sparse_rows=left_out(selected),
        )

    @torch.no_grad()
    def draft(self, oracle: Oracle, consumed: int, tokens: list[int]) -> Tensor:
        """Logits [D, V] of recursive drafts after `consumed` tokens.

        Args:
            tokens: the pending token, then the drafts that are fed back (D entries in all).
        """
        from transformers.cache_utils import DynamicCache

        cache = DynamicCache(config=self.mtp.config)
        if consumed > 1:
            embedded = self.text.embed_tokens(oracle.tokens[1:consumed])
            self.mtp(embedded, oracle.feedback[: consumed - 1], torch.arange(consumed - 1), cache)
        hidden, logits = oracle.feedback[consumed - 1 : consumed], []
        for step, token in enumerate(tokens):
            embedded = self.text.embed_tokens(torch.tensor([token]))
            hidden = self.mtp(embedded, hidden, torch.tensor([consumed - 1 + step]), cache)
            logits.append(self.model.lm_head(hidden)[0])
        return torch.stack(logits)

    @contextmanager
    def _spy(self, selected: dict[int, list[set[int]]], gaps: list[float]) -> Iterator[None]:
        """Record every indexer's selection, and the score gap at its edge."""

        def keep(number: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                selected[number] = [set(row[row >= 0].tolist()) for row in output[0]]

            return hook

        hooks = [
            layer.self_attn.indexer.register_forward_hook(keep(number))
            for number, layer in enumerate(self.text.layers)
            if hasattr(layer.self_attn, "indexer")
        ]
        hooks.append(self.mtp.attention.indexer.register_forward_hook(keep(self.layers)))
        try:
            with watched_topk(dims=3, count=self.count, gaps=gaps):
                yield
        finally:
            for hook in hooks:
                hook.remove()


class MtpLayer(nn.Module):
    """eh_proj over two norms, then attention and experts with ordinary residuals."""

    def __init__(self, text_config: Any, tensors: dict[str, Tensor], prefix: str) -> None:
        super().__init__()
        from transformers.models.glm5_next import modeling_glm5_next as modules

        self.config = copy.deepcopy(text_config)
        self.config.layer_types = ["indexed_attention"]
        self.config.indexer_types = ["full"]
        self.config.mlp_layer_types = ["sparse"]
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        self.attention = modules.Glm5NextTextAttention(self.config, 0).eval()
        self.experts = modules.Glm5NextTextMoE(self.config).eval()
        self.attention.load_state_dict(_below(own, "self_attn."))
        self.experts.load_state_dict(_stacked(_below(own, "mlp."), self.config.n_routed_experts))
        self.own = own

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, cache: Any = None
    ) -> Tensor:
        """Rows [T, H] at consecutive positions -> m [T, H]."""
        embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        pair = [self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")]
        z = F.linear(torch.cat(pair, dim=-1), self.own["eh_proj.weight"])
        everything = torch.ones((1, len(z)), dtype=torch.bool)
        attended, *_ = self.attention(
            self._norm(z, "input_layernorm")[None], attention_mask=everything, cache=cache
        )
        z = z + attended[0]
        z = z + self.experts(self._norm(z, "post_attention_layernorm")[None])[0]
        return self._norm(z, "shared_head.norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return self.own[f"{name}.weight"] * (x * scale)


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _stacked(tensors: dict[str, Tensor], experts: int) -> dict[str, Tensor]:
    """Experts in the form transformers holds them: one tensor for all, gate rows before up rows."""
    parts = {
        part: [tensors.pop(f"experts.{i}.{part}_proj.weight") for i in range(experts)]
        for part in ("gate", "up", "down")
    }
    both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
    tensors["experts.gate_up_proj"] = torch.stack(both)
    tensors["experts.down_proj"] = torch.stack(parts["down"])
    return tensors
