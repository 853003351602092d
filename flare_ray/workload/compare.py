"""Two runs side by side: what became slower, wrong, or different, regressions first.

Speeds are compared over the sessions that both runs have. Intervals hold for all rows together
(Bonferroni): a dozen rows at 95 % each would show a false regression in every fourth comparison.
With a reference arm each run is divided by its own reference first, so machines of different speed
compare; that is the form for a gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flare_ray.errors import ConfigError
from flare_ray.workload.stats import COVERAGE, Ratio, Work, ratio_of_ratios, speed_ratio
from flare_ray.workload.summary import ALL, Run, cell_of, work_of


@dataclass(frozen=True, slots=True)
class Change:
    """Speed of one arm on one category, new over old."""

    arm: str
    category: str
    ratio: Ratio

    @property
    def is_regression(self) -> bool:
        """Whether the whole interval lies below 1."""
        return self.ratio.upper < 1.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that differs.

    Attributes:
        changes: slowest first.
        verdicts: sentences on answers that were right and are wrong now, by arm.
        failed: sentences on arms of which more requests fail.
        work: sentences on tokens and ends that changed.
    """

    changes: tuple[Change, ...]
    verdicts: tuple[str, ...]
    failed: tuple[str, ...]
    work: tuple[str, ...]

    def failures(self, gate: float) -> list[str]:
        """Why a gate fails: a change that lies below it as a whole, or requests that fail now.

        The interval decides, not the estimate: noise widens it and so never fails a gate by itself,
        and a real loss does as soon as there are enough sessions to be sure of it.
        """
        slow = [
            f"{change.arm} on {change.category}: {change.ratio.ratio:.3f} "
            f"({change.ratio.lower:.3f} to {change.ratio.upper:.3f}), gate {gate:g}"
            for change in self.changes
            if change.ratio.upper < gate
        ]
        return [*slow, *self.failed]


def compare(old: Run, new: Run, *, reference: str | None = None) -> Comparison:
    """Compare two runs of equal items.

    Args:
        reference: arm that each run is divided by.
    Raises:
        ConfigError: other items, or no arm in common.
    """
    if old.header.digest != new.header.digest:
        raise ConfigError(
            f"the runs have other items ({old.header.workload}, {new.header.workload}): compare "
            "runs of one workload"
        )
    arms = [name for name in old.arm_names if name in new.arm_names and name != reference]
    missing = reference is not None and not (
        reference in old.arm_names and reference in new.arm_names
    )
    if not arms or missing:
        raise ConfigError(
            f"arms {old.arm_names} and {new.arm_names} have none in common to compare"
            + (f" with reference {reference!r}" if reference else "")
        )
    categories = [name for name in old.categories if name in new.categories]
    pairs = [(arm, category) for arm in arms for category in (ALL, *categories)]
    coverage = 1 - (1 - COVERAGE) / len(pairs)
    changes = []
    for arm, category in pairs:
        sides = [_sides(run, arm, category, reference) for run in (new, old)]
        ratio = (
            ratio_of_ratios(sides[0], sides[1], coverage=coverage)
            if reference
            else (speed_ratio(sides[0][0], sides[1][0], coverage=coverage))
        )
        if ratio is not None:
            changes.append(Change(arm, category, ratio))
    changes.sort(key=lambda change: change.ratio.ratio)
    return Comparison(
        changes=tuple(changes),
        verdicts=tuple(_verdicts(old, new, arms)),
        failed=tuple(_failed(old, new, arms)),
        work=tuple(_work(old, new, arms)),
    )


def _sides(run: Run, arm: str, category: str, reference: str | None) -> tuple[Work, Work]:
    """Work of an arm, and of the reference, none where there is no reference."""
    return work_of(run, arm, category), work_of(run, reference, category) if reference else {}


def _verdicts(old: Run, new: Run, arms: Sequence[str]) -> list[str]:
    found = []
    for arm in arms:
        before, after = _rights(old, arm), _rights(new, arm)
        lost = sorted(item for item, right in before.items() if right and not after.get(item, True))
        if lost:
            shown = ", ".join(lost[:5]) + (" ..." if len(lost) > 5 else "")
            found.append(f"{arm}: {len(lost)} answer(s) were right and are not: {shown}")
    return found


def _rights(run: Run, arm: str) -> dict[str, bool]:
    """Items by whether every checked answer to them was right."""
    found: dict[str, bool] = {}
    for one in run.of(arm):
        if one.right is not None:
            found[one.item_id] = found.get(one.item_id, True) and one.right
    return found


def _failed(old: Run, new: Run, arms: Sequence[str]) -> list[str]:
    found = []
    for arm in arms:
        errors = [[bool(one.error) for one in run.of(arm)] for run in (old, new)]
        if sum(errors[1]) > sum(errors[0]):
            found.append(f"{arm}: {sum(errors[1])} of {len(errors[1])} requests failed")
    return found


def _work(old: Run, new: Run, arms: Sequence[str]) -> list[str]:
    found = []
    for arm in arms:
        before, after = cell_of(old, arm), cell_of(new, arm)
        if before.reasons != after.reasons:
            found.append(f"{arm}: ends {before.reasons} became {after.reasons}")
        if before.completion_tokens != after.completion_tokens:
            found.append(
                f"{arm}: {before.completion_tokens} completion tokens became "
                f"{after.completion_tokens}"
            )
    return found
