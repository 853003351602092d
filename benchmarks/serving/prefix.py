"""``python -m benchmarks.serving.prefix``: what kept prefixes save, and what keeping them costs.

Engines in this process, the demo checkpoint, one request at a time; about four minutes on two
quiet cores. Every comparison is paired: the sides take turns within one run, and medians count.

    1. time to the first token of a 4,096-token prompt and an 11-token tail: cold, and with the
       prefix on the device, in host memory, on disk (its files dropped from the page cache)
    2. chats of several turns that take turns: hit rate, and bytes by tier
    3. CPU time of decoding, prompts left out: no prefix cache, publication on the device, and host
       and disk besides, whose copies, checksums and files are made by threads beside the rounds and
       are counted too

The policy of 3. is fixed (widest rounds): adaptive widths follow the clock, and two runs of one
engine would differ by more than what is looked for. Rounds are then equal in every arm, which is
checked. Each turn begins and ends with the engine without a cache; how far those two lie apart is
`decode_control_ratio`, the resolution of this machine in this run. Two engines of equal settings
differ by where their memory lies; so the engines of 3. are made anew several times.

The demo declares 4,096 positions, twelve fewer than 1. needs. The checkpoint is served through a
folder of links with a config.json that declares twice as many: it uses no position encoding, so
nothing else depends on the number, and text beyond is not judged here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.prefix_engine import LocalPrefixEngine, first_tokens
from benchmarks.serving.service import leave_on_terminate, open_target
from benchmarks.support.results import Bound, print_result, write_result

RESULT = "prefix"
BOUNDS = (
    Bound(metric="ttft_hit_over_cold_4096_11", operator="<=", value=0.05),
    Bound(metric="host_restore_over_recompute_4096", operator="<=", value=0.25),
    Bound(metric="disk_restore_over_recompute_4096", operator="<=", value=0.5),
    Bound(metric="publish_overhead_ratio", operator="<=", value=0.03),
)
HOST_BYTES = 256 << 20
DISK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run.

    Attributes:
        prefix_tokens / tail_tokens: of the restores.
        repeats: measurements of each kind of restore.
        decode_tokens / turns_of_arms / engines: of the comparison of CPU time; turns per set of
            engines, and sets.
        chats / turns / turn_tokens / answer_tokens: of the multi-turn part.
    """

    prefix_tokens: int = 4096
    tail_tokens: int = 11
    repeats: int = 5
    decode_tokens: int = 192
    turns_of_arms: int = 12
    engines: int = 3
    chats: int = 6
    turns: int = 5
    turn_tokens: int = 90
    answer_tokens: int = 40


QUICK = Size(128, 5, 1, 70, 1, 1, 2, 2, 70, 5)


def served_copy(checkpoint: Path, folder: Path, positions: int) -> Path:
    """Links to a checkpoint's files, with a config.json that declares at least `positions`."""
    copy = folder / "served"
    copy.mkdir()
    for file in checkpoint.iterdir():
        if file.name != "config.json":
            (copy / file.name).symlink_to(file.resolve())
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    text["max_position_embeddings"] = max(text["max_position_embeddings"], positions)
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


def restores(engine: LocalPrefixEngine, size: Size) -> dict[str, list[float]]:
    """Seconds to the first token, by where the prefix came from; all four sides in turn."""
    seconds: dict[str, list[float]] = {"cold": [], "device": [], "host": [], "disk": []}
    for repeat in range(size.repeats + 1):
        prefix = engine.tokens(size.prefix_tokens, seed=repeat)
        tails = [engine.tokens(size.tail_tokens, seed=1000 + 10 * repeat + n) for n in range(4)]
        engine.reset("device", "host", "disk")
        found = {"cold": engine.first_token((*prefix, *tails[0]), cached=0)}
        engine.reset("device", "host", "disk")
        # Leaves the snapshot of the prefix on every tier.
        engine.first_token(prefix, cached=0)
        engine.rest()
        found["device"] = engine.first_token((*prefix, *tails[1]), cached=len(prefix))
        engine.rest()
        engine.reset("device")
        found["host"] = engine.first_token((*prefix, *tails[2]), cached=len(prefix))
        engine.rest()
        engine.reset("device", "host")
        engine.drop_page_cache()
        found["disk"] = engine.first_token((*prefix, *tails[3]), cached=len(prefix))
        if repeat:  # the first one warms up
            for place, value in found.items():
                seconds[place].append(value)
    return seconds


def chats(engine: LocalPrefixEngine, size: Size) -> dict[str, Any]:
    """Conversations that take turns, more of them than the device has room for."""
    engine.reset("device", "host", "disk")
    before = engine.stats()
    texts = [list(engine.tokens(size.turn_tokens, seed=5000 + chat)) for chat in range(size.chats)]
    for turn in range(size.turns):
        for chat, text in enumerate(texts):
            answer = engine.answer(text, size.answer_tokens)
            follow = engine.tokens(size.turn_tokens, seed=6000 + 100 * turn + chat)
            texts[chat] = [*text, *answer.tokens, *follow]
    engine.rest()
    after = engine.stats()
    queried = after.queried_tokens - before.queried_tokens
    return {
        "hit_rate": (after.hit_tokens - before.hit_tokens) / queried,
        "hit_rate_of_an_endless_device": _ideal_rate(size),
        "prompt_tokens": queried,
        "tiers": {
            tier.tier: {
                "snapshots": tier.snapshots,
                "used_bytes": tier.used_bytes,
                "restored_tokens": tier.restored_tokens - old.restored_tokens,
                "restored_bytes": tier.restored_bytes - old.restored_bytes,
                "evicted_tokens": tier.evicted_tokens - old.evicted_tokens,
            }
            for tier, old in zip(after.tiers, before.tiers, strict=True)
        },
    }


def _ideal_rate(size: Size) -> float:
    """Share of prompt tokens that an earlier turn of the same chat had consumed."""
    lengths = [
        size.turn_tokens + turn * (size.turn_tokens + size.answer_tokens)
        for turn in range(size.turns)
    ]
    seen = [length + size.answer_tokens - 1 for length in lengths[:-1]]
    return sum(seen) / sum(lengths)


def overhead(engines: dict[str, LocalPrefixEngine], size: Size) -> dict[str, list[float]]:
    """CPU seconds of decoding by arm, one prompt a turn.

    Args:
        engines: by arm; "none" is the engine that the others are compared with.

    Returns:
        Also "none_again", the second run of "none" in each turn.

    Raises:
        BenchmarkFailure: texts or rounds differ between arms.
    """
    middle = [name for name in engines if name != "none"]
    seconds: dict[str, list[float]] = {name: [] for name in (*engines, "none_again")}
    for turn in range(size.turns_of_arms + 1):
        prompt = engines["none"].tokens(100, seed=9000 + turn)
        middle.reverse()
        done = {
            name: engines[name.removesuffix("_again")].decode(prompt, size.decode_tokens)
            for name in ("none", *middle, "none_again")
        }
        if len({(answer.tokens, answer.drafts) for answer in done.values()}) != 1:
            raise BenchmarkFailure("texts or rounds differ with and without a prefix cache")
        if turn:  # the first one warms up
            for name, answer in done.items():
                seconds[name].append(answer.cpu_s)
    return seconds


def decoding(common: dict[str, Any], tiers: dict[str, Any], size: Size) -> dict[str, list[float]]:
    """`overhead` of several sets of engines, one after the other."""
    fixed = {**common, "speculation": {**common.get("speculation", {}), "policy": "fixed"}}
    seconds: dict[str, list[float]] = {}
    for number in range(size.engines):
        below = {**tiers, "disk_path": f"{tiers['disk_path']}-{number}"}
        with (
            LocalPrefixEngine({**fixed, "prefix_cache": {"enabled": False}}) as plain,
            LocalPrefixEngine({**fixed, "prefix_cache": {}}) as device,
            LocalPrefixEngine({**fixed, "prefix_cache": below}) as kept,
        ):
            first_tokens(plain, device, kept)
            found = overhead({"none": plain, "device": device, "all_tiers": kept}, size)
        for name, values in found.items():
            seconds.setdefault(name, []).extend(values)
    return seconds


def run(section: dict[str, Any], size: Size, folder: Path) -> dict[str, Any]:
    """All parts.

    Args:
        section: engine settings; `checkpoint` as a path.
        folder: for links and the disk tier.
    """
    context = size.prefix_tokens + size.tail_tokens + 64
    context = max(context, size.decode_tokens + 200, 1024)
    checkpoint = served_copy(Path(section["checkpoint"]), folder, context)
    common = {**section, "checkpoint": str(checkpoint), "context_tokens": context}
    tiers = {
        "host_bytes": HOST_BYTES,
        "disk_path": str(folder / "cache"),
        "disk_bytes": DISK_BYTES,
    }
    with LocalPrefixEngine({**common, "prefix_cache": tiers}) as kept:
        first_tokens(kept)
        seconds = restores(kept, size)
        row_bytes = kept.row_bytes
    cpu = decoding({**common, "context_tokens": 1024}, tiers, size)
    # Few rows, so that conversations have to leave the device.
    few = {**tiers, "device_bytes": 4 * row_bytes, "disk_path": str(folder / "chats")}
    with LocalPrefixEngine({**common, "prefix_cache": few}) as engine:
        talk = chats(engine, size)
    return _metrics(seconds, cpu, size) | {
        "chats": talk,
        "settings": {
            "checkpoint": Path(section["checkpoint"]).name,
            "served_context_tokens": context,
            "snapshot_row_bytes": row_bytes,
            "threads_per_rank": section.get("threads_per_rank", 1),
            **asdict(size),
        },
    }


def _metrics(
    seconds: dict[str, list[float]], cpu: dict[str, list[float]], size: Size
) -> dict[str, Any]:
    middle = {place: statistics.median(values) for place, values in seconds.items()}
    cold = middle["cold"]
    around = list(zip(cpu["none"], cpu["none_again"], strict=True))
    cost = {
        name: statistics.median(
            on / statistics.mean(off) for on, off in zip(cpu[name], around, strict=True)
        )
        - 1.0
        for name in ("device", "all_tiers")
    }
    return {
        "ttft_hit_over_cold_4096_11": middle["device"] / cold,
        "host_restore_over_recompute_4096": middle["host"] / cold,
        "disk_restore_over_recompute_4096": middle["disk"] / cold,
        "publish_overhead_ratio": cost["device"],
        "all_tiers_overhead_ratio": cost["all_tiers"],
        "decode_control_ratio": statistics.median(last / first for first, last in around) - 1.0,
        "ttft_s": {place: {"median": middle[place], "all": seconds[place]} for place in seconds},
        "decode_cpu_s": cpu,
        "decode_cpu_s_per_token": statistics.median(cpu["none"]) / size.decode_tokens,
    }


def print_tables(metrics: dict[str, Any], console: Console) -> None:
    """What was measured, for people."""
    table = Table(title="Time to the first token")
    for column in ("prefix from", "median ms", "of cold"):
        table.add_column(column, justify="right")
    for place, times in metrics["ttft_s"].items():
        share = times["median"] / metrics["ttft_s"]["cold"]["median"]
        table.add_row(place, f"{1000 * times['median']:.1f}", f"{share:.4f}")
    console.print(table)
    talk = metrics["chats"]
    console.print(
        f"chats: {talk['hit_rate']:.3f} of {talk['prompt_tokens']} prompt tokens were restored, "
        f"{talk['hit_rate_of_an_endless_device']:.3f} could have been"
    )
    device, below = metrics["publish_overhead_ratio"], metrics["all_tiers_overhead_ratio"]
    console.print(
        f"publishing costs {100 * device:.1f} % of decoding's CPU time, with copies to host and "
        f"disk beside it {100 * below:.1f} %; two runs without a cache differ by "
        f"{100 * metrics['decode_control_ratio']:.1f} %"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.prefix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="another checkpoint; prints, writes nothing"
    )
    parser.add_argument("--quick", action="store_true", help="smoke run; prints, writes nothing")
    options = parser.parse_args(arguments)
    leave_on_terminate()
    console = Console()
    size = QUICK if options.quick else Size()
    try:
        with (
            open_target(checkpoint=options.checkpoint) as target,
            tempfile.TemporaryDirectory(prefix="flare-prefix-") as folder,
        ):
            section = {**target.engine, "checkpoint": str(target.checkpoint)}
            os.environ.setdefault("OMP_NUM_THREADS", str(section.get("threads_per_rank", 1)))
            metrics = run(section, size, Path(folder))
    except BenchmarkFailure as failure:
        print(f"prefix failed: {failure}", file=sys.stderr)
        return 2
    print_tables(metrics, console)
    if not options.quick and options.checkpoint is None:
        result = write_result(RESULT, metrics, BOUNDS)
        print_result(result, console)
        return int(not all(target.met for target in result.targets))
    for bound in BOUNDS:
        state = "met" if bound.is_met_by(metrics) else "missed"
        console.print(f"{bound.metric}: {metrics[bound.metric]:.4g} <= {bound.value:g} {state}")
    console.print("not an official run: no result was written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
