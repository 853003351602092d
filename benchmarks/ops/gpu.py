"""Operators of a GLM round on the device: microseconds beside the time their bytes take.

    python -m benchmarks.ops.gpu [SECTION ...]      sections: dense experts mixing recurrence
                                                    attention sampling

A run of all sections writes `gpu_operators.json`. Every operator runs inside one graph over
rotating operands, so weights come from memory. The last number of a line is measured over floor, at
the read bandwidth of the same run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.timing import Call, bandwidths, call_us
from benchmarks.support.results import write_result
from flare_ray.device.ops.hyper_connection.api import HyperConnection, SinkhornShape, mix_out
from flare_ray.device.ops.indexed_attention.api import indexed_attention
from flare_ray.device.ops.kda.api import SavedStates
from flare_ray.device.ops.kda.gated import GatedRows, Gates, gated_round
from flare_ray.device.ops.moe.api import Experts, ExpertWeights, PackedExperts
from flare_ray.device.ops.moe.packed import Fp8Stack, Nvfp4Stack
from flare_ray.device.ops.rmsnorm.api import RmsNorm
from flare_ray.device.ops.router.api import route
from flare_ray.device.ops.short_conv.api import round_conv
from flare_ray.device.sampling.chain import draw, verify_chain
from flare_ray.device.sampling.filters import FilterParams, target_probs
from flare_ray.device.sampling.philox import uniforms

HIDDEN, WIDTH, EXPERTS, TOP_K, V = 4096, 2048, 288, 8, 154_880
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(slots=True)
class Timed:
    """One operator at one size: calls over rotating operands and the bytes each call must move."""

    name: str
    calls: list[Call]
    moved: float


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_()


def routing(rows: int) -> tuple[Tensor, Tensor]:
    """Distinct experts a row, uniformly chosen."""
    scores = torch.rand((rows, EXPERTS), device="cuda")
    return scores.topk(TOP_K).indices, torch.rand((rows, TOP_K), device="cuda")


def _expert_calls(
    run: Callable[[Tensor, Tensor, Tensor], Tensor], rows: int, each: float
) -> tuple[list[Call], float]:
    calls: list[Call] = []
    moved = 0.0
    count = 6 if rows <= 8 else 3
    for _ in range(count):
        x, (ids, weights) = normal(rows, HIDDEN), routing(rows)
        calls.append(partial(run, x, ids, weights))
        moved += ids.unique().numel() * each / count
    return calls, moved


def dense() -> Iterator[Timed]:
    """The large products of a layer and the vocabulary head."""
    for out, name in ((24896, "kda joint"), (HIDDEN, "kda output"), (V, "head")):
        columns = 8192 if name == "kda output" else HIDDEN
        weights = [normal(out, columns) for _ in range(1 if out == V else 3)]
        for rows in (1, 6, 32):
            x = normal(rows, columns)
            calls: list[Call] = [partial(F.linear, x, w) for w in weights]
            yield Timed(f"{name} rows {rows}", calls, out * columns * 2)


def experts() -> Iterator[Timed]:
    """A layer's routed experts, all three products."""
    cuda = torch.device("cuda")
    nvfp4 = Nvfp4Stack.empty(EXPERTS, WIDTH, HIDDEN, cuda)
    nvfp4.gate_up.random_(0, 256)
    nvfp4.down.random_(0, 256)
    for scale in (nvfp4.gate_up_scale, nvfp4.down_scale):
        scale.copy_(torch.rand(scale.shape, device="cuda") + 0.5)
    nvfp4.factors.fill_(0.01)
    each = 3 * HIDDEN * WIDTH * 0.5625
    from flare_ray.device.ops.moe.fp4.triton import Fp4Experts

    for name, few in (("few", 1 << 20), ("wide", 0)):
        kind = Fp4Experts(nvfp4, limit=10.0, few_rows=few)
        for rows in ROWS:
            yield Timed(f"nvfp4 {name} rows {rows}", *_expert_calls(kind, rows, each))
    del nvfp4, kind
    fp8 = Fp8Stack.empty(EXPERTS, WIDTH, HIDDEN, cuda)
    for codes in (fp8.gate_up, fp8.down):
        codes.view(torch.int8).random_(-110, 110)
    fp8.gate_up_scale.fill_(1e-3)
    fp8.down_scale.fill_(1e-3)
    packed = PackedExperts(fp8, None, top_k=TOP_K, limit=10.0)
    for rows in ROWS:
        yield Timed(f"fp8 rows {rows}", *_expert_calls(packed, rows, 3 * HIDDEN * WIDTH))
    del fp8, packed
    weights = ExpertWeights(
        normal(EXPERTS, 2 * WIDTH, HIDDEN).mul_(0.02), normal(EXPERTS, WIDTH, HIDDEN).mul_(0.02)
    )
    plain = Experts(weights, shared=0, top_k=TOP_K, limit=10.0)
    for rows in ROWS:
        yield Timed(f"bfloat16 rows {rows}", *_expert_calls(plain, rows, 6 * HIDDEN * WIDTH))


def mixing() -> Iterator[Timed]:
    """Streams, norms, routing."""
    shape = SinkhornShape(20, 1e-6, 1e-5)
    sites = [
        HyperConnection(
            normal(24, 4 * HIDDEN, dtype=torch.float32) * 0.01,
            torch.zeros(24, device="cuda"),
            torch.ones(3, device="cuda"),
            streams=4,
            shape=shape,
        )
        for _ in range(8)
    ]
    router = normal(EXPERTS, HIDDEN, dtype=torch.float32) * 0.02
    bias = torch.zeros(EXPERTS, device="cuda")
    norm = RmsNorm(normal(HIDDEN), eps=1e-5)
    for rows in (1, 6, 32, 128):
        streams, x = normal(rows, 4, HIDDEN), normal(rows, HIDDEN)
        _, site = sites[0].mix_in(streams)
        into: list[Call] = [partial(s.mix_in, streams) for s in sites]
        yield Timed(f"mix_in rows {rows}", into, 24 * 4 * HIDDEN * 4 + rows * 10 * HIDDEN)
        out: list[Call] = [partial(mix_out, x, streams, site)]
        yield Timed(f"mix_out rows {rows}", out * 8, rows * 18 * HIDDEN)
        yield Timed(f"rmsnorm rows {rows}", [partial(norm, x)] * 8, rows * 4 * HIDDEN)
        routed: list[Call] = [partial(route, x, router, bias, top_k=TOP_K, scale=2.5)]
        yield Timed(f"route rows {rows}", routed * 8, EXPERTS * HIDDEN * 4)


def recurrence() -> Iterator[Timed]:
    """A recurrent block between its products; B lanes of W rows."""
    heads, dim = 64, 128
    flat = heads * dim
    gates = Gates(
        torch.ones(flat, device="cuda"),
        torch.zeros(flat, device="cuda"),
        -5.0,
        torch.ones(dim, device="cuda"),
        1e-3,
    )
    taps = normal(4, 3 * flat, dtype=torch.float32)
    for batch, width in ((1, 1), (1, 6), (4, 6), (32, 1)):
        total = batch * width
        states = torch.zeros((6, (batch + 1) * 8, heads, dim, dim), device="cuda")
        window = normal(6, batch + 1, 11, 3 * flat)
        raw, outer, beta = normal(total, 3 * flat + 64), normal(2, total, flat), normal(total, 64)
        slots = torch.arange(batch, device="cuda")
        read = slots * 8
        write = (read.unsqueeze(1) + torch.arange(width, device="cuda")).flatten()
        qkv = normal(total, 3, heads, dim, dtype=torch.float32)
        rows = GatedRows(qkv, outer, beta)
        rule: list[Call] = [
            partial(gated_round, rows, gates, SavedStates(s, read, write)) for s in states
        ]
        state = heads * dim * dim * 4 * batch * (1 + width)
        yield Timed(f"delta rule B {batch} W {width}", rule, state)
        conv: list[Call] = [
            partial(round_conv, raw[:, : 3 * flat], w, taps, slots=slots, column=slots * 0)
            for w in window
        ]
        yield Timed(f"conv B {batch} W {width}", conv, total * 3 * flat * 8)


def attention() -> Iterator[Timed]:
    """Selected latents of 64 heads."""
    cache = normal(1 << 18, 512)
    for rows in (1, 6, 8, 24, 128):
        query = normal(rows, 64, 512)
        for count in (1024, 2051):
            lists = [torch.randint(0, 1 << 18, (rows, count), device="cuda") for _ in range(4)]
            calls: list[Call] = [
                partial(indexed_attention, query, cache, i, scale=0.06) for i in lists
            ]
            yield Timed(f"attention rows {rows} of {count}", calls, rows * count * 1024)


def sampling() -> Iterator[Timed]:
    """One lane of W rows, and four."""
    for batch, width in ((1, 1), (1, 6), (4, 6), (32, 1)):
        logits = [normal(batch, width, V, dtype=torch.float32) * 4 for _ in range(2)]
        params = FilterParams(
            torch.ones(batch, device="cuda"),
            torch.zeros(batch, dtype=torch.int64, device="cuda"),
            torch.full((batch,), 0.95, device="cuda"),
            torch.zeros(batch, device="cuda"),
            max_top_k=0,
            every_lane_greedy=False,
            any_top_p=True,
            any_min_p=False,
        )
        keys = torch.arange(batch, device="cuda")
        p = target_probs(logits[0], params)
        q = p[:, : width - 1].contiguous()
        drafts = torch.zeros((batch, width - 1), dtype=torch.int64, device="cuda")
        lengths = torch.full((batch,), width - 1, device="cuda")
        u = uniforms(keys, keys, width + 1)
        size = batch * width * V * 4
        name = f"B {batch} W {width}"
        yield Timed(
            f"distribution {name}",
            [partial(target_probs, x, params) for x in logits],
            2 * size,
        )
        yield Timed(f"draw {name}", [partial(draw, p[:, 0], u[:, 0])] * 4, batch * V * 4)
        chain: Call = partial(verify_chain, p, q, drafts, lengths, u)
        yield Timed(f"chain {name}", [chain] * 4, 2 * batch * V * 4)
        yield Timed(f"uniforms {name}", [partial(uniforms, keys, keys, width + 1)] * 4, 1)


SECTIONS = (dense, experts, mixing, recurrence, attention, sampling)


def main() -> None:
    """Print a line an operator, and write them all where no section was named."""
    wanted = sys.argv[1:]
    ceilings = bandwidths()
    print(ceilings, flush=True)
    metrics: dict[str, Any] = {name: round(value, 3) for name, value in ceilings.items()}
    for section in SECTIONS:
        if not wanted or section.__name__ in wanted:
            metrics[section.__name__] = measured(section, ceilings["read_tb_s"])
            torch.cuda.empty_cache()
    if not wanted:
        write_result("gpu_operators", metrics)


@torch.inference_mode()
def measured(section: Callable[[], Iterator[Timed]], read_tb_s: float) -> dict[str, Any]:
    """Microseconds of a section's operators, beside the time that their bytes take."""
    rows: dict[str, Any] = {}
    for timed in section():
        spent = call_us(timed.calls)
        floor = timed.moved / read_tb_s / 1e6
        rows[timed.name] = {"us": round(spent, 1), "floor_us": round(floor, 1)}
        ratio = spent / max(floor, 1e-9)
        print(f"{timed.name:28s} {spent:9.1f} us  floor {floor:8.1f}  x{ratio:.2f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
