"""The whole training model: embedding, layers between mixing sites, MTP layer and head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flare_ray.recipes.qwen4_exp.ngram import HashSettings, hash_constants

from ..network.functional import Chain
from ..network.layers import Linear, shifted
from ..shape import MTP_DEPTH
from .functional import StreamSpec, Written, centred
from .kernels import Kernels
from .layers import Attention, Centred, Config, Layer, Mixer, Moe, Ple


class Mtp(nn.Module):
    """The multi-token-prediction layer: attention and experts over all streams, dense in training.

    Its outputs and its inputs are streams [B, T, S H]; `readout` makes them what the head takes.
    """

    def __init__(self, config: Config, kernels: Kernels, spec: StreamSpec):
        super().__init__()
        hidden = config["hidden_size"]
        self.kernels, self.spec = kernels, spec
        self.pre_fc_norm_embedding = Centred(hidden)
        self.pre_fc_norm_hidden = Centred(hidden * spec.streams)
        self.fc_embedding, self.fc_hidden = Linear(hidden, hidden), Linear(hidden, hidden)
        self.layers = nn.ModuleList([Layer(config, kernels, recurrent=False, ple=None)])
        self.hyper_connection_mixer = Mixer(config, injects=False)

    @property
    def layer(self) -> Layer:
        """The layer."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    @property
    def self_attn(self) -> Attention:
        """Its attention."""
        block = self.layer.block()
        assert isinstance(block, Attention)
        return block

    @property
    def mlp(self) -> Moe:
        """Its experts."""
        return self.layer.mlp

    def joined(self, embedded: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Streams [N, S H] float32 of pairs of next-token embeddings [B, T, H] and target streams
        [B, T, S H]; the latter are normed as one vector.
        """
        e = centred(embedded, self.pre_fc_norm_embedding.weight, self.spec.eps).to(dtype)
        m = centred(hidden, self.pre_fc_norm_hidden.weight, self.spec.eps).to(dtype)
        parts = self.fc_hidden(m.unflatten(-1, (self.spec.streams, -1))).float()
        return (parts + self.fc_embedding(e).float().unsqueeze(-2)).flatten(0, 1).flatten(1)

    def opened(self, flat: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Input of the attention, and the factors of its output."""
        site = self.layer.attn_hyper_connection.site()
        opened: tuple[Tensor, Tensor] = self.kernels.open_site(flat, site, self.spec, dtype)
        return opened

    def finished(self, written: Written, rows: int, dtype: torch.dtype) -> Tensor:
        """Streams [B, T, S H] behind the experts, from the attention's output."""
        site = self.layer.mlp_hyper_connection.site()
        x, flat, inject = self.kernels.turn_site(written, site, self.spec, dtype)
        streams: Tensor = self.kernels.write_streams(self.layer.mlp(x), flat, inject)
        return streams.unflatten(0, (rows, -1))

    def forward(self, embedded: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """One draft step for every position.

        Args:
            embedded: [B, T, H] embeddings of the next tokens.
            hidden: [B, T, S H] target streams.
            dtype: type of the products.
        Returns:
            [B, T, S H] float32.
        """
        rows, flat = hidden.shape[0], self.joined(embedded, hidden, dtype)
        x, inject = self.opened(flat, dtype)
        return self.finished(Written(self.self_attn(x, rows), flat, inject), rows, dtype)

    def readout(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, H] that the vocabulary head takes, of outputs [B, T, S H]."""
        site = self.hyper_connection_mixer.site()
        x: Tensor = self.kernels.open_site(out.flatten(0, 1), site, self.spec, dtype)[0]
        return x.unflatten(0, out.shape[:2])

    def unroll(
        self, embedded: Tensor, hidden: Tensor, dtype: torch.dtype, steps: int
    ) -> list[Tensor]:
        """Recursive drafting for every position at once; step k + 1 runs on step k's outputs of the
        row before.

        Row i is rotated to position i in every step. Row i of step k sees first-step rows up to
        i - k + 1 and the rows that its own chain left at the positions after. Returns ``steps``
        tensors [B, T, S H]; row i of step k belongs to a chain that began at row i - k + 1.
        """
        rows, attention = hidden.shape[0], self.self_attn
        outs: list[Tensor] = []
        chain: list[tuple[Tensor, Tensor]] = []
        first: tuple[Tensor, Tensor] | None = None
        for step in range(1, steps + 1):
            flat = self.joined(embedded, shifted(outs[-1], 1, 1) if outs else hidden, dtype)
            x, inject = self.opened(flat, dtype)
            q, k, v, gate = attention.gated_qkv(x, rows)
            if first is None:
                first = (k, v)
                attended = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=attention.scale
                )
            else:
                chain.append((k, v))
                attended = self._chain_attention(q, first, chain, step)
            written = Written(attention.project(attended, gate), flat, inject)
            outs.append(self.finished(written, rows, dtype))
        return outs

    def _chain_attention(
        self, q: Tensor, first: tuple[Tensor, Tensor], chain: list[tuple[Tensor, Tensor]], step: int
    ) -> Tensor:
        last = len(chain) - 1
        own = [(shifted(k, last - n, 2), shifted(v, last - n, 2)) for n, (k, v) in enumerate(chain)]
        extra = torch.stack([(q * k).float().sum(-1) for k, _ in own], -1)
        extra = F.pad(extra, (0, MTP_DEPTH - 1 - len(own)), value=float("-inf"))
        at = torch.full((), step, device=q.device)
        products = Chain(q @ first[0].transpose(-1, -2), extra, at)
        base, weights = self.kernels.chain_weights(products, self.self_attn.scale, q.dtype)
        return base @ first[1] + sum(weights[..., n : n + 1] * v for n, (_, v) in enumerate(own))


class QwenModel(nn.Module):
    """Parameter names follow the published checkpoint, except stacked experts and the n-gram table
    in one piece.

    Its hidden states are the streams in front of the final mixer, [B, T, S H].
    """

    def __init__(self, config: Config, kernels: Kernels | None = None):
        super().__init__()
        self.config, self.kernels = config, kernels or Kernels()
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        self.spec = StreamSpec(config["hc_count"], config["rms_norm_eps"])
        self.budget_tokens, self.pool = config["indexer_budget"], config["indexer_compress_ratio"]
        self.num_experts, self.state_width = config["num_experts"], hidden * self.spec.streams
        self.embed_tokens = nn.Embedding(vocab, hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.3)
        self.layers = nn.ModuleList([self._layer(i) for i in range(config["num_hidden_layers"])])
        self.hyper_connection_mixer = Mixer(config, injects=False)
        self.mtp = Mtp(config, self.kernels, self.spec)
        self.lm_head = Linear(hidden, vocab, 0.5)

    def _layer(self, index: int) -> Layer:
        config, ple = self.config, None
        if index + 1 in config["ple_layer_ids"]:
            settings = HashSettings(
                vocab_size=config["vocab_size"],
                size=config["ngram_size"],
                heads=config["heads_per_ngram"],
                base=config["ngram_vocab_size_base"],
                seed=config["seed"],
            )
            place = config["ple_layer_ids"].index(index + 1)
            ple = Ple(config, hash_constants(settings, place), self.kernels)
        recurrent = config["layer_types"][index] == "linear_attention"
        return Layer(config, self.kernels, recurrent=recurrent, ple=ple)

    def blocks(self) -> list[Layer]:
        """The target's layers."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def hidden(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Target streams in front of the final mixer, [B, T, S H] float32, from ids [B, T]."""
        rows, kernels, spec = ids.shape[0], self.kernels, self.spec
        flat = self.embed_tokens(ids).flatten(0, 1).float().repeat(1, spec.streams)
        written: Written | None = None
        for layer in self.blocks():
            site = layer.attn_hyper_connection.site()
            if written is not None and layer.ple is None:
                x, flat, inject = kernels.turn_site(written, site, spec, dtype)
            else:
                flat = flat if written is None else kernels.write_streams(*written)
                flat = flat if layer.ple is None else layer.ple(flat, ids, spec)
                x, inject = kernels.open_site(flat, site, spec, dtype)
            written = Written(layer.block()(x, rows), flat, inject)
            site = layer.mlp_hyper_connection.site()
            x, flat, inject = kernels.turn_site(written, site, spec, dtype)
            written = Written(layer.mlp(x), flat, inject)
        assert written is not None  # there are layers
        out: Tensor = kernels.write_streams(*written)
        return out.unflatten(0, (rows, -1))

    def readout(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, H] that the vocabulary head takes, of hidden states [B, T, S H]."""
        site = self.hyper_connection_mixer.site()
        x: Tensor = self.kernels.open_site(hidden.flatten(0, 1), site, self.spec, dtype)[0]
        return x.unflatten(0, hidden.shape[:2])

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, T, V] float32 of hidden states."""
        return self.lm_head(self.readout(hidden, torch.float32))

    def draft_logits(self, out: Tensor) -> Tensor:
        """[B, T, V] float32 of the MTP layer's outputs."""
        return self.lm_head(self.mtp.readout(out, torch.float32))

    def set_budget(self, tokens: int | None) -> None:
        """Let every attention layer choose at most so many tokens, or see all (None)."""
        for layer in self.modules():
            if isinstance(layer, Attention):
                layer.budget = None if tokens is None else tokens // layer.indexer.pool

    def attentions(self) -> list[Attention]:
        """The target's attention layers, in their order."""
        return [m for m in self.layers.modules() if isinstance(m, Attention)]

    def moes(self) -> list[Moe]:
        """Every expert layer, the MTP layer's last."""
        return [m for m in self.modules() if isinstance(m, Moe)]
