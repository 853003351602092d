"""Blocks that V4.1 shares with V4, against transformers' deepseek_v4 on the same numbers.

V4.1 itself does not exist there. Where V4 differs (a per-head norm of queries, a weight of experts
behind the last product, coefficients of the same site), the comparison stops before it.
"""

from __future__ import annotations

import math

import pytest
import torch

from flare_ray.device.ops.hyper_connection.api import HyperConnection, SinkhornShape
from flare_ray.device.ops.moe.api import Experts, ExpertWeights
from flare_ray.device.ops.rotary_pairs.api import frequencies, phases, rotate
from flare_ray.device.ops.router.api import route
from flare_ray.device.ops.sink_attention.api import Listed, sink_attention

modeling = pytest.importorskip(
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
    reason="the oracle is transformers' deepseek_v4 (5.24); this transformers has none",
)
ATOL = 2e-5
ROWS, HIDDEN, HEADS, DIM, TURNED = 9, 32, 4, 32, 8


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def config():
    from transformers import DeepseekV4Config

    made = DeepseekV4Config(
        vocab_size=64,
        hidden_size=HIDDEN,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        head_dim=DIM,
        partial_rotary_factor=TURNED / DIM,
        q_lora_rank=16,
        num_experts_per_tok=2,
        n_routed_experts=8,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
        sliding_window=16,
        o_groups=2,
        o_lora_rank=8,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        layer_types=["sliding_attention"] * 2,
        mlp_layer_types=["moe"] * 2,
        swiglu_limit=10.0,
        rms_norm_eps=1e-6,
    )
    made._attn_implementation = "eager"
    return made


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for value in [*module.parameters(), *module.buffers()]:
            if value.is_floating_point():
                size = value.shape[-1] if value.ndim > 1 else 4
                value.copy_(torch.randn(value.shape, generator=generator) / math.sqrt(size))
    return module.eval()


def test_rotation_of_adjacent_trailing_pairs(config):
    x = noise(1, HEADS, ROWS, DIM)
    rates = frequencies(TURNED, 10000.0)
    angles = torch.arange(ROWS)[:, None] * rates
    wanted = modeling.apply_rotary_pos_emb(x, angles.cos()[None], angles.sin()[None])
    got = rotate(x[0].transpose(0, 1).contiguous(), phases(torch.arange(ROWS), rates))
    assert float((got.transpose(0, 1) - wanted[0]).abs().max()) <= ATOL


def test_attention_with_a_sink(config):
    class Owner:
        num_key_value_groups = HEADS
        training = False
        sinks = noise(HEADS, seed=1)

    query, key = noise(1, HEADS, ROWS, DIM, seed=2), noise(1, 1, ROWS, DIM, seed=3)
    mask = torch.full((ROWS, ROWS), float("-inf")).triu(1)[None, None]
    wanted, _ = modeling.eager_attention_forward(
        Owner(), query, key, key, mask, scaling=DIM**-0.5, dropout=0.0
    )
    index = torch.arange(ROWS).expand(ROWS, -1)
    listed = Listed(key[0, 0], index.masked_fill(index > torch.arange(ROWS)[:, None], -1))
    rows = query[0].transpose(0, 1).contiguous()
    got = sink_attention(rows, (listed,), Owner.sinks, scale=DIM**-0.5)
    assert float((got - wanted[0]).abs().max()) <= ATOL


def test_stream_coefficients_and_sinkhorn(config):
    module = randomised(modeling.DeepseekV4HyperConnection(config))
    streams = noise(1, ROWS, 4, HIDDEN, seed=5)
    with torch.no_grad():
        post, mix, collapsed = module(streams)
    ours = HyperConnection(
        module.fn.detach().float(),
        module.base.detach().float(),
        module.scale.detach().float(),
        streams=4,
        shape=SinkhornShape(config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps),
    )
    x, site = ours.mix_in(streams[0])
    assert float((x - collapsed[0]).abs().max()) <= ATOL
    assert float((site.post - post[0].reshape(ROWS, 4)).abs().max()) <= ATOL
    assert float((site.mix - mix[0]).abs().max()) <= ATOL


def test_routing_and_experts(config):
    module = randomised(modeling.DeepseekV4SparseMoeBlock(config, 0))
    x = noise(1, ROWS, HIDDEN, seed=6)
    with torch.no_grad():
        wanted = module(x)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    gate, experts, shared = module.gate, module.experts, module.shared_experts
    both = torch.cat((shared.gate_proj.weight, shared.up_proj.weight))
    gate_up = torch.cat((experts.gate_up_proj, both[None])).detach()
    down = torch.cat((experts.down_proj, shared.down_proj.weight[None])).transpose(1, 2)
    ours = Experts(
        ExpertWeights(gate_up, down.detach().contiguous()), shared=1, top_k=2, limit=10.0
    )
    chosen, weights = route(
        x[0],
        gate.weight.detach().float(),
        gate.e_score_correction_bias.detach().float(),
        top_k=2,
        scale=1.5,
        scoring="sqrt_softplus",
    )
    assert float((ours(x[0], chosen, weights) - wanted.view(ROWS, -1)).abs().max()) <= ATOL
