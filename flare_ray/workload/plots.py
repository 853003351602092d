"""The report's pictures as SVG text, by matplotlib (extra `report`)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flare_ray.errors import ConfigError
from flare_ray.workload.records import Observation
from flare_ray.workload.summary import ALL, Run, best_of, cell_of, depths_of, gaps_ms, ratio_between
from flare_ray.workload.tables import roles_of

SIZE_IN = (8.0, 4.2)


def plots_of(runs: Sequence[Run]) -> dict[str, str]:
    """SVG by title; the first run is the report's own, others add points to the frontier.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    run = runs[0]
    found = {"Throughput and latency": _frontier(runs), "Tails": _tails(run)}
    if roles_of(run) is not None:
        found["Adaptive by category"] = _claims(run)
    if any(depths_of(run, arm).accepted for arm in run.arm_names):
        found["Accepted drafts by depth"] = _depths(run)
    return found


def _figure(columns: int = 1) -> tuple[Any, Any]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "reports need matplotlib: pip install 'flare-ray[report]', or use --no-plots"
        ) from error
    # Equal data give equal bytes.
    matplotlib.rcParams["svg.hashsalt"] = "flare"
    # Letters as text, not as outlines: a tenth of the size, and searchable.
    matplotlib.rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=SIZE_IN, layout="constrained")
    return figure, figure.subplots(1, columns)


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def _frontier(runs: Sequence[Run]) -> str:
    figure, axes = _figure()
    arms = list(dict.fromkeys(arm for run in runs for arm in run.arm_names))
    for arm in arms:
        cells = [cell_of(run, arm) for run in runs if arm in run.arm_names]
        points = sorted((c.e2e_ms.get("p50", 0.0), c.tokens_per_s) for c in cells if c.e2e_ms)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=arm)
    axes.set_xlabel("whole request, p50, ms")
    axes.set_ylabel("completion tokens a second")
    axes.legend(fontsize=8)
    return _svg(figure)


def _tails(run: Run) -> str:
    figure, panels = _figure(3)
    measures: dict[str, Callable[[Observation], list[float]]] = {
        "first output": lambda one: [one.first_s * 1e3],
        "gap": gaps_ms,
        "whole request": lambda one: [one.total_s * 1e3],
    }
    for axes, (title, of_one) in zip(panels, measures.items(), strict=True):
        for arm in run.arm_names:
            values = [value for one in run.of(arm) if not one.error for value in of_one(one)]
            if values:
                shares = np.linspace(0, 1, 61)
                axes.plot(np.quantile(values, shares), shares, label=arm, linewidth=1)
        axes.set_xscale("log")
        axes.set_xlabel(f"{title}, ms")
    panels[0].set_ylabel("share of observations")
    panels[-1].legend(fontsize=7)
    return _svg(figure)


def _claims(run: Run) -> str:
    figure, axes = _figure()
    roles = roles_of(run)
    assert roles is not None
    categories = [ALL, *run.categories]
    for shift, kind in ((-0.15, "best fixed"), (0.15, "off")):
        for place, category in enumerate(categories):
            best = best_of(run, roles.fixed, category, measure="decode")
            other = best if kind == "best fixed" else roles.off
            ratio = ratio_between(run, roles.ours, other, category, measure="decode")
            if ratio is None:
                continue
            reach = [[max(0.0, ratio.ratio - ratio.lower)], [max(0.0, ratio.upper - ratio.ratio)]]
            axes.errorbar(
                [place + shift],
                [ratio.ratio],
                yerr=reach,
                marker="o",
                capsize=3,
                color="tab:blue" if kind == "off" else "tab:orange",
                label=f"against {kind}" if place == 0 else None,
            )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(categories)), categories, rotation=20, fontsize=8)
    axes.set_ylabel("speed of adaptive over the other, decode")
    axes.legend(fontsize=8)
    return _svg(figure)


def _depths(run: Run) -> str:
    figure, axes = _figure()
    deepest = max(run.arm_names, key=lambda arm: len(depths_of(run, arm).accepted))
    for category in run.categories:
        depths = depths_of(run, deepest, category)
        shares = [
            a / v if v else 0.0 for a, v in zip(depths.accepted, depths.verified, strict=True)
        ]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=category)
    axes.set_xlabel(f"depth (arm {deepest})")
    axes.set_ylabel("accepted over verified lanes")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)
    return _svg(figure)
