"""The whole training model: embedding, layers between mixing sites, MTP layer and head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .functional import MhcSpec, Written
from .kernels import Kernels
from .layers import Config, Layer, Linear, Mla, Moe, MtpLayer, Vector


class DemoModel(nn.Module):
    """Parameter names follow the published checkpoint, except stacked experts and ``mtp.`` for the
    last layer.
    """

    def __init__(self, config: Config, kernels: Kernels | None = None):
        super().__init__()
        self.config, self.kernels = config, kernels or Kernels()
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        self.spec = MhcSpec(
            config["hc_mult"], config["hc_sinkhorn_iters"], config["rms_norm_eps"], config["hc_eps"]
        )
        self.budget_tokens, self.pool = config["index_topk"], config["index_kpool"]
        self.num_experts = config["n_routed_experts"]
        self.embed_tokens = nn.Embedding(vocab, hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.3)
        layers = [Layer(config, i, self.kernels) for i in range(config["num_hidden_layers"])]
        self.layers = nn.ModuleList(layers)
        self.mtp = MtpLayer(config, self.kernels)
        self.norm = Vector(hidden)
        self.lm_head = Linear(hidden, vocab, 0.5)

    def hidden(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Target hidden states behind the final norm, [B, T, H] float32, from ids [B, T]."""
        rows, kernels, spec = ids.shape[0], self.kernels, self.spec
        streams = (
            self.embed_tokens(ids).flatten(0, 1).unsqueeze(1).float().repeat(1, spec.streams, 1)
        )
        layers = [layer for layer in self.layers if isinstance(layer, Layer)]
        x, write, mixer = kernels.open_site(streams, layers[0].attention_site(), spec, dtype)
        for i, layer in enumerate(layers):
            written = Written(layer.self_attn(x, rows), streams, write, mixer)
            x, streams, write, mixer = kernels.turn_site(
                written, layer.feed_forward_site(), spec, dtype
            )
            written = Written(layer.mlp(x), streams, write, mixer)
            if i + 1 < len(layers):
                site = layers[i + 1].attention_site()
                x, streams, write, mixer = kernels.turn_site(written, site, spec, dtype)
        return kernels.close_site(written, self.norm.weight, spec.rms_eps).unflatten(0, (rows, -1))

    def readout(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Hidden states as they are: the vocabulary head takes them."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, T, V] of hidden states."""
        return self.lm_head(hidden)

    def draft_logits(self, out: Tensor) -> Tensor:
        """[B, T, V] of the MTP layer's outputs."""
        return self.lm_head(out)

    def attentions(self) -> list[Mla]:
        """The target's latent-attention layers, in their order."""
        return [m for m in self.layers.modules() if isinstance(m, Mla)]

    def set_budget(self, tokens: int | None) -> None:
        """Let every latent-attention layer choose at most so many tokens, or see all (None)."""
        for layer in self.modules():
            if isinstance(layer, Mla):
                layer.budget = None if tokens is None else tokens // layer.indexer.pool

    def moes(self) -> list[Moe]:
        """Every expert layer, the MTP layer's last."""
        return [m for m in self.modules() if isinstance(m, Moe)]
