"""What transformers computes for a tiny Qwen checkpoint, read from the same files.

The target is transformers' own model. Its MTP layer does not exist there, so it is composed here
from transformers' decoder layer and mixer. Only this file knows transformers; the product never
imports it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support.recipe_oracle import Oracle, left_out, watched_topk


class TransformersQwen:
    """Target and MTP layer of a checkpoint, by transformers' modules."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

        text = json.loads((folder / "config.json").read_text())["text_config"]
        self.config = Qwen4ExpTextConfig(**text)
        self.config._attn_implementation = "eager"
        tensors = _as_transformers(load_file(folder / "model.safetensors"), text)
        self.model = Qwen4ExpForCausalLM(self.config).eval()
        target = {name: value for name, value in tensors.items() if not name.startswith("mtp.")}
        self.model.load_state_dict(target)
        self.layers = self.config.num_hidden_layers
        self.mtp = MtpLayer(self.config)
        self.mtp.load_state_dict(_below(tensors, "mtp."))
        self.count = int(text["indexer_budget"]) // int(text["indexer_compress_ratio"])

    @torch.no_grad()
    def run(self, tokens: Tensor) -> Oracle:
        """See `Reference.run`."""
        selected: dict[int, list[set[int]]] = {}
        gaps: list[float] = []
        grabbed: dict[str, Tensor] = {}
        mixer = self.model.model.hyper_connection_mixer
        before = mixer.register_forward_pre_hook(
            lambda module, args: grabbed.update(feedback=args[0][0])
        )
        after = mixer.register_forward_hook(
            lambda module, args, output: grabbed.update(sampling=output[0])
        )
        with self._spy(selected, gaps):
            logits = self.model(input_ids=tokens[None], use_cache=False).logits[0]
            flat, _ = self._mtp_rows(tokens[1:], grabbed["feedback"][:-1])
        before.remove()
        after.remove()
        return Oracle(
            tokens=tokens,
            logits=logits,
            feedback=grabbed["feedback"],
            sampling=grabbed["sampling"],
            selected=selected,
            mtp_logits=flat,
            gap=min(gaps, default=float("inf")),
            sparse_rows=left_out(selected),
        )

    @torch.no_grad()
    def draft(self, oracle: Oracle, consumed: int, tokens: list[int]) -> Tensor:
        """See `Reference.draft`; every step runs the whole history, without a cache."""
        fed, hidden, logits = oracle.tokens[1:consumed], oracle.feedback[:consumed], []
        for token in tokens:
            fed = torch.cat((fed, torch.tensor([token])))
            rows, flat = self._mtp_rows(fed, hidden)
            logits.append(rows[-1])
            hidden = torch.cat((hidden, flat[-1:]))
        return torch.stack(logits)

    def _mtp_rows(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and streams [T, S H] of the pairs (hidden[i], tokens[i]) at position i."""
        text = self.model.model
        vector, flat = self.mtp(text.embed_tokens(tokens), hidden, text.rotary_emb)
        return self.model.lm_head(vector), flat

    @contextmanager
    def _spy(self, selected: dict[int, list[set[int]]], gaps: list[float]) -> Iterator[None]:
        """Record every indexer's selection, and the score gap at its edge."""

        def keep(number: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                selected[number] = [set(row.nonzero().flatten().tolist()) for row in output[0, 0]]

            return hook

        blocks = dict(enumerate(self.model.model.layers))
        blocks[self.layers] = self.mtp.layers[0]
        hooks = [
            layer.self_attn.indexer.register_forward_hook(keep(number))
            for number, layer in blocks.items()
            if hasattr(layer, "self_attn")
        ]
        try:
            with watched_topk(dims=1, count=self.count, gaps=gaps):
                yield
        finally:
            for hook in hooks:
                hook.remove()


class MtpLayer(nn.Module):
    """Feedback fusion, one attention-and-experts layer of transformers, its mixer."""

    def __init__(self, text_config: Any) -> None:
        super().__init__()
        from transformers.models.qwen4_exp import modeling_qwen4_exp as modules

        config = copy.deepcopy(text_config)
        config.num_hidden_layers, config.layer_types = 1, ["indexed_attention"]
        config.ple_layer_ids = []
        config._attn_implementation = "eager"
        hidden, streams = config.hidden_size, config.hc_count
        norm, eps = modules.Qwen4ExpTextRMSNorm, config.rms_norm_eps
        self.pre_fc_norm_embedding = norm(hidden, eps=eps)
        self.pre_fc_norm_hidden = norm(hidden * streams, eps=eps)
        self.fc_embedding = nn.Linear(hidden, hidden, bias=False)
        self.fc_hidden = nn.Linear(hidden, hidden, bias=False)
        self.layers = nn.ModuleList([modules.Qwen4ExpTextDecoderLayer(config, 0)])
        self.hyper_connection_mixer = modules.Qwen4ExpTextGatedResidual(config, use_combine=False)
        self.streams = streams
        self.eval()

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        """Rows [T, H], [T, S H] at positions 0 .. T - 1 -> (v [T, H], streams [T, S H])."""
        count = len(embedded)
        token = self.fc_embedding(self.pre_fc_norm_embedding(embedded)).unsqueeze(1)
        parts = self.pre_fc_norm_hidden(hidden).unflatten(1, (self.streams, -1))
        flat = (self.fc_hidden(parts) + token).reshape(1, count, -1)
        positions = torch.arange(count).view(1, 1, -1).expand(3, 1, -1)
        mask = torch.zeros(1, 1, count, count)
        later = torch.ones(count, count).triu(1).bool()
        mask.masked_fill_(later, torch.finfo(torch.float32).min)
        flat = self.layers[0](flat, rotary(flat, positions), attention_mask=mask)
        return self.hyper_connection_mixer(flat)[0], flat[0]


def _as_transformers(tensors: dict[str, Tensor], text: dict[str, Any]) -> dict[str, Tensor]:
    """Published names and parts -> transformers' own: one table, one tensor per expert matrix."""
    result: dict[str, Tensor] = {}
    shards: dict[str, dict[int, Tensor]] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, value in tensors.items():
        name = name.replace("model.language_model.", "model.", 1)
        stem, _, leaf = name.partition(".shard_")
        if leaf:
            shards.setdefault(stem, {})[int(leaf.removesuffix(".weight"))] = value
            continue
        stem, _, leaf = name.partition(".experts.")
        if leaf and leaf[0].isdigit():
            number, part, _ = leaf.split(".")
            experts.setdefault(f"{stem}.experts", {})[int(number), part] = value
            continue
        result[name] = value
    for stem, parts in shards.items():
        result[f"{stem}.weight"] = torch.cat([parts[number] for number in range(len(parts))])
    for stem, matrices in experts.items():
        count = range(text["num_experts"])
        both = [torch.cat((matrices[e, "gate_proj"], matrices[e, "up_proj"])) for e in count]
        result[f"{stem}.gate_up_proj"] = torch.stack(both)
        result[f"{stem}.down_proj"] = torch.stack([matrices[e, "down_proj"] for e in count])
    return result


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
