"""What fits which GPUs: the tables of docs/operators/capacity.md, from the chart's own sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from flare_ray.device.prepare import SNAPSHOTS_PER_SLOT

MIB, GIB = 1 << 20, 1 << 30
GPUS = {"H200 141 GB": 139.0, "H100 80 GB": 79.0}
"""GiB that a process finds free: measured on the H200, the data sheet's less 1 GiB for the H100."""
SLOTS = 8
POOL_TOKENS = 524288
CONTEXT, CHUNK = 131072, 1024
PAGE_TOKENS = 64

EXAMPLES = (
    ("glm-5.3-flash", "nvfp4", "-", 2),
    ("deepseek-v4.1-flash", "mxfp4", "host", 4),
    ("qwen3.8-flash", "nvfp4", "host", 1),
)
"""Model, format, place of tables and ranks, on H200."""

HEAD = """# Capacity

Written by `helm/generate.py` from the sizes by which the chart decides. Bytes are of one rank;
GiB = 2^30 bytes.

## The sum

```
rank bytes = weights                               by model, format and ranks
           + tables                                hashed n-gram tables; 0 with `tables: host`
           + fixed + concurrency x slot            recurrent state, columns, rings
           + snapshots x snapshot                  kept prefixes: {snapshots} a slot or device_bytes
           + (page_pool_tokens / 64 + 1) x page    context of all requests, the same on every rank
           + graphs                                pool of programs: prefill_tokens x context
           + scratch                               buffers of the largest program
usable     = free memory less {headroom} % headroom
host       = ranks x (tables, with `tables: host`, + prefix_cache.host_bytes), page-locked
```

Weights and slots shrink with ranks; pages do not. So more ranks buy room for context, and engines
buy throughput. `flare-ray plan` prints the same sum for a checkpoint, with routed experts packed
where it stores them so: `nvfp4` and `mxfp4` below count them at 4 bits with their scales, as they
are published, and everything else in bfloat16 or wider. Tables are counted as stored.

## What fits

{slots} requests of up to {context:,} tokens, {pool:,} tokens of context in all, prompts in
chunks of {chunk:,}. *Tokens* is the largest `page_pool_tokens` that fits beside the same requests;
the other columns are GiB. *Host* is the memory that the tables take on the node for one engine.
"""

TAIL = """
## How many engines

Measure, then divide; all terms are in the metrics of a running engine:

```
tokens per second of one engine = lanes x emitted / seconds

lanes    flare_num_requests_running, at most engine.concurrency
emitted  rate(flare_spec_decode_emitted_tokens_total)
         / rate(flare_spec_decode_lane_rounds_total)
seconds  rate(flare_round_seconds_sum) / rate(flare_round_seconds_count)

engines = tokens per second wanted / (0.7 x tokens per second of one engine), rounded up
```

0.7 leaves room for prompts, whose chunks take turns with rounds, and for the engine that is being
replaced. Then check latency: a request of n tokens takes about its wait for a slot, plus its
prompt's chunks, plus n / emitted x seconds. If `flare_request_queue_time_seconds` grows while
`flare_page_usage_ratio` is low, slots are short (raise `engine.concurrency` or replicas); if the
ratio is near 1, context is short (raise `page_pool_tokens`, ranks or replicas).

No throughput of the published models on GPUs stands here: none has been measured yet.
"""


def capacity_text(models: dict[str, Any]) -> str:
    """The page."""
    headroom = models["headroomPercent"]
    lines = [
        HEAD.format(
            headroom=headroom,
            slots=SLOTS,
            pool=POOL_TOKENS,
            context=CONTEXT,
            chunk=CHUNK,
            snapshots=SNAPSHOTS_PER_SLOT,
        )
    ]
    lines += [
        "| Model | Format | Tables | GPU | Ranks | Weights | Tables | State | Pages | Graphs | Sum "
        "| Usable | Host | Tokens |",
        "| " + " | ".join(["---"] * 14) + " |",
    ]
    for name, preset in models["presets"].items():
        if preset["device"] == "cuda":
            lines += _rows(name, preset, headroom)
    lines += ["", "## Worked examples", "", *map(_example(models), EXAMPLES)]
    return "\n".join(lines) + "\n" + TAIL


def _rows(name: str, preset: dict[str, Any], headroom: int) -> Iterator[str]:
    for format_name in preset["ranks"]["1"]["weights"]:
        places = ("device", "host") if preset["ranks"]["1"]["tables"][format_name] else ("-",)
        for place, (gpu, free_gib) in itertools.product(places, GPUS.items()):
            usable = int(free_gib * GIB) * (100 - headroom) // 100
            for ranks, plan in preset["ranks"].items():
                sized = {**plan, "graphs": _graphs(preset["pool"])}
                cells = _cells(sized, format_name, usable, place=place, ranks=int(ranks))
                yield f"| {' | '.join((name, format_name, place, gpu, ranks, *cells))} |"


def _cells(
    plan: dict[str, Any], format_name: str, usable: int, *, place: str, ranks: int
) -> Iterator[str]:
    weights, tables = plan["weights"][format_name], plan["tables"][format_name]
    here = 0 if place == "host" else tables
    state = plan["fixed"] + SLOTS * _slot_bytes(plan)
    pages = (POOL_TOKENS // PAGE_TOKENS + 1) * plan["page"]
    graphs = plan["graphs"]
    fixed = weights + here + state + graphs + plan["scratch"]
    away = (tables - here) * ranks
    for part in (weights, here, state, pages, graphs, fixed + pages, usable, away):
        yield f"{part / GIB:.1f}"
    tokens = ((usable - fixed) // plan["page"] - 1) * PAGE_TOKENS
    yield f"{tokens:,}" if fixed + pages <= usable else "**does not fit**"


def _example(models: dict[str, Any]) -> Callable[[tuple[str, str, str, int]], str]:
    usable = int(GPUS["H200 141 GB"] * GIB) * (100 - models["headroomPercent"]) // 100

    def text(case: tuple[str, str, str, int]) -> str:
        name, format_name, place, ranks = case
        preset = models["presets"][name]
        plan = {**preset["ranks"][str(ranks)], "graphs": _graphs(preset["pool"])}
        weights, here, state, pages, graphs, total, room, away, tokens = _cells(
            plan, format_name, usable, place=place, ranks=ranks
        )
        host = f" {away} GiB of host memory are locked for the tables." if place == "host" else ""
        most = int(tokens.replace(",", "")) // CONTEXT
        return (
            f"- **{name}, {format_name}, {ranks} x H200**: weights {weights} + tables {here} + "
            f"state {state} + pages {pages} + graphs {graphs} = {total} of {room} GiB a rank."
            f"{host} A page of {PAGE_TOKENS} tokens is {plan['page'] / MIB:.2f} MiB and a slot "
            f"{_slot_bytes(plan) / MIB:,.0f} MiB with its snapshots, so the rest holds {tokens} "
            f"tokens of context: for {SLOTS} requests at a time, the whole of {min(most, SLOTS)} "
            "of the longest."
        )

    return text


def _slot_bytes(plan: dict[str, Any]) -> int:
    """A slot and the snapshots that come with it."""
    return plan["slot"] + SNAPSHOTS_PER_SLOT * plan["snapshot"]


def _graphs(pool: dict[str, int]) -> int:
    """Bytes of the pool: a chunk's rows weigh more than a round's."""
    row = pool["row"] + CONTEXT * pool["contextToken"]
    return pool["fixed"] + CHUNK * row + pool["scoredRows"] * pool["logitRow"]
