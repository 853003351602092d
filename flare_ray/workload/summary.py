"""What a run says: equal work, latencies, speculation and ratios, by arm and category.

Only ended blocks count; warm-up and interrupted ones are left out and counted (contract: B3).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flare_ray.errors import ConfigError
from flare_ray.metrics import names
from flare_ray.workload.records import (
    JOURNAL,
    WARM,
    ArmStart,
    BlockEnd,
    Header,
    Observation,
    Record,
    read_header,
    read_journal,
)
from flare_ray.workload.stats import Cluster, Ratio, Work, speed, speed_ratio, tails

ALL = "all"
"""Every category together."""
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(slots=True)
class Run:
    """A run as it was read.

    Attributes:
        observations: of ended blocks, warm-up apart.
        ends: their ends.
        failed_before: observations of interrupted attempts, which count nowhere.
    """

    header: Header
    arms: list[ArmStart]
    observations: list[Observation]
    ends: list[BlockEnd]
    failed_before: int

    @property
    def categories(self) -> list[str]:
        """In the order run."""
        return list(dict.fromkeys(end.block.category for end in self.ends))

    @property
    def arm_names(self) -> list[str]:
        """Arms that ran, in the header's order."""
        ran = {end.block.arm for end in self.ends}
        return [name for name in self.header.arms if name in ran]

    @property
    def refused(self) -> dict[str, str]:
        """Why an arm did not start."""
        return {arm.arm: arm.refused for arm in self.arms if arm.refused}

    def of(self, arm: str, category: str = ALL) -> list[Observation]:
        """Observations of an arm."""
        return [
            one
            for one in self.observations
            if one.block.arm == arm and category in (ALL, one.block.category)
        ]


def read_run(folder: Path) -> Run:
    """A run of a folder.

    Raises:
        ConfigError: the folder holds none, or nothing in it has ended.
    """
    run = run_of(read_header(folder), read_journal(folder / JOURNAL))
    if not run.ends:
        raise ConfigError(f"{folder}: no block has ended yet; resume the run first")
    return run


def run_of(header: Header, records: Sequence[Record]) -> Run:
    """Ended blocks of the records; of a block that ended twice the first end counts."""
    ends: dict[object, BlockEnd] = {}
    for record in records:
        if isinstance(record, BlockEnd) and record.block.repeat != WARM:
            ends.setdefault(record.block, record)
    counted = {(end.block, end.attempt) for end in ends.values()}
    seen = [r for r in records if isinstance(r, Observation) and r.block.repeat != WARM]
    kept = [one for one in seen if (one.block, one.attempt) in counted]
    arms = {r.arm: r for r in records if isinstance(r, ArmStart)}
    return Run(header, list(arms.values()), kept, list(ends.values()), len(seen) - len(kept))


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm on one category.

    Attributes:
        reasons: requests by finish reason; failures under "error".
        right / checked: verdicts.
        tokens_per_s: completion tokens over the blocks' wall time.
        ttft_ms, itl_ms, e2e_ms: quantiles, from the intended start.
        mean_emitted: tokens a lane and round, the first token apart; 0 where not told.
    """

    arm: str
    category: str
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasons: dict[str, int]
    right: int
    checked: int
    tokens_per_s: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]
    offered: int
    accepted: int
    copied: int
    copied_accepted: int
    rounds: int
    mean_emitted: float


def cell_of(run: Run, arm: str, category: str = ALL) -> Cell:
    """Sums and quantiles of an arm on a category."""
    seen = run.of(arm, category)
    good = [one for one in seen if not one.error]
    wall_s = sum(
        end.wall_s
        for end in run.ends
        if end.block.arm == arm and category in (ALL, end.block.category)
    )
    tokens = sum(one.completion_tokens for one in good)
    rounds = _told(good, "rounds")
    in_rounds = sum(one.completion_tokens - 1 for one in good if one.rounds > 0)
    checked = [one for one in good if one.right is not None]
    return Cell(
        arm=arm,
        category=category,
        requests=len(seen),
        failed=len(seen) - len(good),
        prompt_tokens=sum(one.prompt_tokens for one in good),
        cached_tokens=sum(one.cached_tokens for one in good),
        completion_tokens=tokens,
        reasons=dict(sorted(Counter(one.finish_reason or "error" for one in seen).items())),
        right=sum(one.right is True for one in checked),
        checked=len(checked),
        tokens_per_s=tokens / wall_s if wall_s else 0.0,
        ttft_ms=tails([one.first_s * 1e3 for one in good]),
        itl_ms=tails([gap for one in good for gap in gaps_ms(one)]),
        e2e_ms=tails([one.total_s * 1e3 for one in good]),
        offered=_told(good, "offered"),
        accepted=_told(good, "accepted"),
        copied=_told(good, "copied"),
        copied_accepted=_told(good, "copied_accepted"),
        rounds=rounds,
        mean_emitted=in_rounds / rounds if rounds else 0.0,
    )


def gaps_ms(one: Observation) -> list[float]:
    """Between consecutive deliveries."""
    return [b - a for a, b in itertools.pairwise(one.chunk_ms)]


def _told(seen: Iterable[Observation], name: str) -> int:
    return sum(max(0, getattr(one, name)) for one in seen)


def work_of(run: Run, arm: str, category: str = ALL, *, measure: str = "total") -> Work:
    """Tokens and seconds by session of one arm.

    Args:
        measure: total = all tokens, intended start to end; decode = tokens behind the first
            delivery, from it to the last one; cpu = all tokens by CPU time of the process.
    """
    found: dict[Cluster, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in run.of(arm, category):
        if one.error or not one.chunk_ms:
            continue
        pair = found[(one.block.category, one.block.repeat, one.session)]
        pair[0] += one.completion_tokens - (measure == "decode")
        pair[1] += {"total": one.total_s, "decode": one.decode_s, "cpu": one.cpu_s}[measure]
    return {name: (pair[0], pair[1]) for name, pair in found.items()}


def best_of(run: Run, arms: Sequence[str], category: str, *, measure: str) -> str:
    """The fastest of some arms in hindsight."""
    return max(arms, key=lambda arm: speed(work_of(run, arm, category, measure=measure)))


def ratio_between(run: Run, arm: str, other: str, category: str, *, measure: str) -> Ratio | None:
    """Speed of `arm` over that of `other`."""
    return speed_ratio(
        work_of(run, arm, category, measure=measure),
        work_of(run, other, category, measure=measure),
    )


@dataclass(slots=True)
class Depths:
    """Drafts by depth, from the engine's counters; index 0 is the first draft.

    Attributes:
        verified: lanes of rounds whose program verified at least so many drafts.
        accepted: drafts accepted at each depth.
        widths: lanes of rounds by verification width.
    """

    verified: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    widths: dict[int, float] = field(default_factory=dict)


def depths_of(run: Run, arm: str, category: str = ALL) -> Depths:
    """Drafts by depth of one arm; empty where the server told no counters."""
    grown = counters_of(run, arm, category)
    widths = {int(w): v for w, v in _by_label(grown, names.SPEC_LANE_ROUNDS, "verify_width")}
    accepted = {
        int(p): v for p, v in _by_label(grown, names.SPEC_ACCEPTED_PER_POSITION, "position")
    }
    deepest = max(widths, default=1) - 1
    return Depths(
        verified=[sum(v for w, v in widths.items() if w > depth + 1) for depth in range(deepest)],
        accepted=[accepted.get(depth, 0.0) for depth in range(deepest)],
        widths=dict(sorted(widths.items())),
    )


def copies_of(run: Run, arm: str, category: str = ALL) -> dict[str, list[tuple[float, float]]]:
    """Copied drafts by source and depth: (offered, accepted), the first draft first."""
    found: dict[str, dict[int, list[float]]] = {}
    for name, value in counters_of(run, arm, category).items():
        for place, series in enumerate(
            (names.SPEC_COPIED_TOKENS, names.SPEC_COPIED_ACCEPTED_TOKENS)
        ):
            if name.startswith(f"{series.name}_total{{"):
                labels = dict(_LABEL.findall(name))
                depths = found.setdefault(labels["source"], {})
                depths.setdefault(int(labels["position"]), [0.0, 0.0])[place] += value
    return {
        source: [(told[0], told[1]) for _, told in sorted(depths.items())]
        for source, depths in sorted(found.items())
    }


def counters_of(run: Run, arm: str, category: str = ALL) -> dict[str, float]:
    """Growth of the engine's counters over an arm's blocks."""
    total: Counter[str] = Counter()
    for end in run.ends:
        if end.block.arm == arm and category in (ALL, end.block.category):
            total.update(end.counters)
    return dict(total)


def _by_label(
    grown: Mapping[str, float], series: names.Series, label: str
) -> Iterable[tuple[str, float]]:
    for name, value in grown.items():
        if name.startswith(f"{series.name}_total{{"):
            yield dict(_LABEL.findall(name))[label], value


def round_costs(run: Run, arm: str) -> dict[str, tuple[float, float, float]]:
    """By kind of program: how many ran, mean milliseconds with the host's gap, and in rank 0."""
    grown = counters_of(run, arm)
    found = {}
    for kind in ("prefill", "decode", "speculative"):
        label = f'{{kind="{kind}"}}'
        count = grown.get(f"{names.ROUND_SECONDS.name}_count{label}", 0.0)
        if count:
            whole = grown.get(f"{names.ROUND_SECONDS.name}_sum{label}", 0.0)
            device = grown.get(f"{names.ROUND_DEVICE_SECONDS.name}_sum{label}", 0.0)
            found[kind] = (count, whole / count * 1e3, device / count * 1e3)
    return found


def equal_work(run: Run) -> list[str]:
    """Sentences on requests of which two arms made different work; empty where all is equal.

    Prompt tokens count too: arms that made other contexts of the same messages are not comparable.
    """
    complaints = []
    by_item: dict[tuple[int, str], dict[str, tuple[int, int, str]]] = defaultdict(dict)
    for one in run.observations:
        outcome = (one.prompt_tokens, one.completion_tokens, one.finish_reason or "error")
        by_item[(one.block.repeat, one.item_id)][one.block.arm] = outcome
    for (repeat, item), outcomes in by_item.items():
        if len(set(outcomes.values())) > 1:
            shown = ", ".join(
                f"{arm} {prompt}+{tokens} {reason}"
                for arm, (prompt, tokens, reason) in outcomes.items()
            )
            complaints.append(f"{item} (pass {repeat}): {shown}")
    return complaints
