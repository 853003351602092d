"""The report's tables, from a run: regressions first, then equal work, latencies, speculation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flare_ray.workload.stats import Ratio
from flare_ray.workload.summary import (
    ALL,
    Run,
    best_of,
    cell_of,
    depths_of,
    equal_work,
    ratio_between,
    round_costs,
)

MEASURES = {
    "total": "request to end",
    "decode": "first output to last",
    "cpu": "CPU time of the process",
}
SHOWN_COMPLAINTS = 20


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are text; `note` explains what is counted."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @property
    def markdown(self) -> str:
        """GitHub's form."""
        lines = [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
            for row in (self.headings, tuple("---" for _ in self.headings), *self.rows)
        ]
        note = f"{self.note}\n\n" if self.note else ""
        return f"## {self.title}\n\n{note}" + "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Roles:
    """Which arms play which part in the claims.

    Attributes:
        ours: the adaptive arm.
        off: the arm without speculation.
        fixed: arms of fixed depth, of which the best in hindsight counts.
    """

    ours: str
    off: str
    fixed: tuple[str, ...]


def roles_of(run: Run) -> Roles | None:
    """By the arms' names: `adaptive`, `off`, `fixed-K`; None where one part is missing."""
    arms = run.arm_names
    fixed = tuple(name for name in arms if name.startswith("fixed-"))
    if "adaptive" in arms and "off" in arms and fixed:
        return Roles("adaptive", "off", fixed)
    return None


def measures_of(run: Run) -> list[str]:
    """CPU time only where every arm runs in the measuring process, one request at a time."""
    inside = all(end.cpu_s >= 0 for end in run.ends)
    arrivals = run.header.settings.get("arrivals", {})
    alone = arrivals.get("kind") == "closed" and arrivals.get("lanes") == 1
    return ["total", "decode", "cpu"] if inside and alone else ["total", "decode"]


def claims_table(run: Run, roles: Roles) -> Table:
    """Adaptive against the best fixed depth and against none, worst first."""
    rows: list[tuple[float, tuple[str, ...]]] = []
    for category in (ALL, *run.categories):
        for measure in measures_of(run):
            best = best_of(run, roles.fixed, category, measure=measure)
            for kind, other in (("best fixed", best), ("off", roles.off)):
                ratio = ratio_between(run, roles.ours, other, category, measure=measure)
                if ratio is not None:
                    cells = (category, MEASURES[measure], f"{kind}: {other}", *shown(ratio))
                    rows.append((ratio.ratio, cells))
    rows.sort(key=lambda row: row[0])
    return Table(
        "Adaptive against the others, worst first",
        ("category", "time", "against", "ratio", "95 % interval", "sessions"),
        tuple(cells for _, cells in rows),
        "Speed over speed, above 1 = adaptive is faster. The best fixed depth is chosen per row in "
        "hindsight, which favours it by chance; intervals resample sessions and hold it.",
    )


def shown(ratio: Ratio) -> tuple[str, str, str]:
    """Ratio, interval and pairs as text; a regression that is certain is marked."""
    mark = " !" if ratio.upper < 1 else ""
    interval = f"{ratio.lower:.3f} to {ratio.upper:.3f}{mark}"
    return f"{ratio.ratio:.3f}", interval, str(ratio.sessions)


def work_table(run: Run) -> Table:
    """Completed tokens and termination reasons: no arm wins by stopping early."""
    rows = []
    for arm in run.arm_names:
        for category in (ALL, *run.categories):
            cell = cell_of(run, arm, category)
            reasons = ", ".join(f"{count} {name}" for name, count in cell.reasons.items())
            verdicts = f"{cell.right} of {cell.checked}" if cell.checked else "-"
            rows.append(
                (
                    arm,
                    category,
                    str(cell.requests),
                    str(cell.failed),
                    str(cell.prompt_tokens),
                    str(cell.cached_tokens),
                    str(cell.completion_tokens),
                    reasons,
                    verdicts,
                )
            )
    headings = ("arm", "category", "requests", "failed", "prompt tokens", "of them cached")
    return Table(
        "Equal work",
        (*headings, "completion tokens", "ends", "right answers"),
        tuple(rows),
        _differences(run),
    )


def _differences(run: Run) -> str:
    complaints = equal_work(run)
    if not complaints:
        return "Every arm completed the same tokens and ended for the same reason on every request."
    text = "; ".join(complaints[:SHOWN_COMPLAINTS])
    more = len(complaints) - SHOWN_COMPLAINTS
    tail = f"; and {more} more" if more > 0 else ""
    return f"{len(complaints)} requests ended differently between arms: {text}{tail}."


def latency_table(run: Run) -> Table:
    """Speed, and tails of first token, gaps and whole requests."""
    rows = []
    for category in (ALL, *run.categories):
        for arm in run.arm_names:
            cell = cell_of(run, arm, category)
            tails = [_tail(values) for values in (cell.ttft_ms, cell.itl_ms, cell.e2e_ms)]
            rows.append((category, arm, f"{cell.tokens_per_s:.1f}", *tails))
    quantiles = "p50 / p90 / p99, ms"
    return Table(
        "Speed and latencies",
        (
            *("category", "arm", "tokens/s"),
            *(f"{name}: {quantiles}" for name in ("first output", "gap", "whole request")),
        ),
        tuple(rows),
        "From the intended start. A gap lies between two deliveries, which may bring several "
        "tokens each. Tokens/s is over the blocks' wall time.",
    )


def _tail(values: dict[str, float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values.values()) or "-"


def speculation_table(run: Run) -> Table:
    """Offered, accepted and emitted, and acceptance by depth."""
    rows = []
    for arm in run.arm_names:
        for category in (ALL, *run.categories):
            cell, depths = cell_of(run, arm, category), depths_of(run, arm, category)
            if not cell.offered:
                continue
            by_depth = " ".join(
                f"{accepted / verified:.2f}" if verified else "-"
                for verified, accepted in zip(depths.verified, depths.accepted, strict=True)
            )
            widths = ", ".join(f"{width}: {count:.0f}" for width, count in depths.widths.items())
            copies = f"{cell.copied_accepted} of {cell.copied}" if cell.copied else "-"
            rows.append(
                (
                    arm,
                    category,
                    str(cell.offered),
                    str(cell.accepted),
                    copies,
                    f"{cell.mean_emitted:.2f}" if cell.rounds else "-",
                    by_depth or "-",
                    widths or "-",
                )
            )
    headings = ("arm", "category", "offered", "accepted", "copies accepted", "emitted a round")
    return Table(
        "Speculation",
        (*headings, "accepted at depth 1, 2, ...", "lanes by width"),
        tuple(rows),
        "By depth: accepted drafts over lanes of rounds whose program verified so deep; a lane "
        "that ended or was cut earlier counts as verified there: deep figures are lower bounds.",
    )


def cost_table(run: Run) -> Table:
    """Cost of the programs actually run."""
    rows = [
        (arm, kind, f"{count:.0f}", f"{whole:.2f}", f"{device:.2f}")
        for arm in run.arm_names
        for kind, (count, whole, device) in round_costs(run, arm).items()
    ]
    return Table(
        "Cost of rounds",
        ("arm", "kind", "programs", "mean ms with host", "mean ms in rank 0"),
        tuple(rows),
    )


def arms_table(run: Run) -> Table:
    """How every arm was started, refused ones included."""
    rows = [(arm.arm, arm.described, arm.refused or "ran") for arm in run.arms]
    return Table("Arms", ("arm", "started as", "state"), tuple(rows))


def failures_table(run: Run) -> Table:
    """Every failed request."""
    rows = [
        (one.block.arm, one.item_id, str(one.block.repeat), one.error)
        for one in run.observations
        if one.error
    ]
    return Table("Failed requests", ("arm", "item", "pass", "error"), tuple(rows))


def environment_table(run: Run) -> Table:
    """Where and how it ran."""
    header = run.header
    rows: Iterable[tuple[str, str]] = (
        ("workload", f"{header.workload}, SHA-256 {header.digest[:16]}"),
        *((name, str(value)) for name, value in header.settings.items()),
        *header.environment.items(),
        ("observations of interrupted blocks, not counted", str(run.failed_before)),
    )
    return Table("Run", ("what", "value"), tuple(rows))


def tables_of(run: Run) -> Sequence[Table]:
    """All tables in the report's order; empty ones are left out, failures never."""
    roles = roles_of(run)
    found = [
        *([claims_table(run, roles)] if roles else []),
        failures_table(run),
        work_table(run),
        latency_table(run),
        speculation_table(run),
        cost_table(run),
        arms_table(run),
        environment_table(run),
    ]
    return [table for table in found if table.rows]
