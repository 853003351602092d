"""`flare-ray policy explain`: why a width was chosen, from a decision log."""

from __future__ import annotations

from pathlib import Path

from flare_ray.contracts.shapes import GraphShape
from flare_ray.controller.verification.log import Chosen, Observed, Opened, read_log, replay
from flare_ray.controller.verification.policy import Decision
from flare_ray.errors import ConfigError

WHY = {
    "best": "the largest value over price",
    "kept": "as good as the best within what a change of program was measured to cost",
    "probe": "a probe: the exploration account pays what it is predicted to lose",
    "fixed": "the policy is fixed",
    "only": "nothing else was captured for this batch, or of use under the lanes' ceilings",
}


def explain(path: Path, number: int | None) -> str:
    """One choice, the last one unless numbered from 1, with what came of it.

    Raises:
        ConfigError: no such choice, or no decision log.
    """
    chosen: Chosen | None = None
    came: Observed | None = None
    count = widths = 0
    opened = Opened()
    for entry in read_log(path):
        if isinstance(entry, Opened):
            opened = entry
        elif isinstance(entry, Chosen):
            count += 1
            if number is None or count == number:
                chosen, came, widths = entry, None, count
        elif isinstance(entry, Observed) and chosen is not None and came is None:
            came = entry if entry.shape == chosen.decision.shape else None
    if chosen is None:
        raise ConfigError(
            f"{path} holds {count} choices, number {number or 'last'} is not among them"
        )
    return "\n".join(
        [
            f"choice {widths} of {count} ({_name(opened)})",
            *_compared(chosen.decision),
            *_lanes(chosen),
            *_outcome(chosen.decision, came),
        ]
    )


def check(path: Path) -> tuple[str, bool]:
    """Replay the log into a fresh policy; the verdict, and whether all choices are equal."""
    choices, different = replay(path)
    if different:
        return f"{different} of {choices} choices differ: another version wrote this log", False
    return f"{choices} choices, all made again alike", True


def _name(opened: Opened) -> str:
    if opened.fixed_width:
        return f"fixed width {opened.fixed_width}"
    target = f" {opened.inter_token_ns / 1e6:g} ms" if opened.inter_token_ns else ""
    measured = f"{len(opened.measured)} start-up measurements"
    return f"adaptive, objective {opened.objective}{target}, {measured}"


def _compared(decision: Decision) -> list[str]:
    lines = [f"width {decision.shape.verify_width}: {WHY[decision.reason]}"]
    if not decision.candidates:
        return lines
    slowest = "  ms a token, slowest" if decision.inter_token_ns else ""
    lines.append(f"  width  expected tokens  price ms  tokens a second{slowest}")
    best = max(v / p for v, p in zip(decision.values, decision.prices_ns, strict=True))
    paces = [f"{ns / 1e6:21.3f}" for ns in decision.inter_token_ns]
    for shape, value, price, pace in zip(
        decision.candidates,
        decision.values,
        decision.prices_ns,
        paces or [""] * len(decision.candidates),
        strict=True,
    ):
        mark = "<- chosen" if shape == decision.shape else ""
        mark += " (best)" if value / price == best else ""
        lines.append(
            f"  {_program(shape):>5}  {value:15.3f}  {price / 1e6:8.3f}  "
            f"{value / price * 1e9:15.1f}{pace}  {mark}".rstrip()
        )
    lines.append(
        f"exploration account {decision.account_ns / 1e6:.3f} ms, this probe "
        f"{decision.probe_ns / 1e6:.3f} ms, expected regret {decision.regret_ns / 1e6:.3f} ms"
    )
    return lines


def _program(shape: GraphShape) -> str:
    """Its width, and of a packed one its rows."""
    packed = shape.packed_capacity
    return f"{shape.verify_width}/{packed}" if packed else str(shape.verify_width)


def _lanes(chosen: Chosen) -> list[str]:
    ceilings = sorted(lane.ceiling for lane in chosen.cohort.lanes)
    return [f"{len(ceilings)} requests, ceilings {ceilings[0]} to {ceilings[-1]} drafts"]


def _outcome(decision: Decision, came: Observed | None) -> list[str]:
    if came is None:
        return ["no later round of this program is in the log"]
    emitted = sum(lane.emitted for lane in came.lanes)
    return [
        f"the next round of this program emitted {emitted} tokens "
        f"({decision.expected_emitted:.2f} expected) in {came.cost_ns / 1e6:.3f} ms "
        f"({decision.expected_ns / 1e6:.3f} expected)"
    ]
