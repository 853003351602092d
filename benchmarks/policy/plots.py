"""Pictures of the simulation as SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.policy.cells import Cell

WIDTH, HEIGHT = 64, 30
LEFT, TOP = 110, 70
WORST, BEST = 0.97, 1.03
"""Ratios at which the colour is full."""


def heat_map(title: str, cells: Sequence[Cell]) -> str:
    """Traces by concurrency: colour and number are goodput against the best fixed width, W the
    adaptive policy's commonest width. The largest capacity of each cell."""
    traces = list(dict.fromkeys(cell.trace for cell in cells))
    lanes = sorted({cell.lanes for cell in cells})
    places = {
        (cell.trace, cell.lanes): cell for cell in sorted(cells, key=lambda c: c.capacities[-1])
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11" '
        f'width="{LEFT + WIDTH * len(lanes) + 10}" height="{TOP + HEIGHT * len(traces) + 10}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}: adaptive over best fixed width</text>',
        '<text x="8" y="38">columns: requests together; W: the commonest width</text>',
    ]
    for column, count in enumerate(lanes):
        x = LEFT + column * WIDTH + WIDTH // 2
        parts.append(f'<text x="{x}" y="{TOP - 8}" text-anchor="middle">{count}</text>')
    for row, trace in enumerate(traces):
        y = TOP + row * HEIGHT
        parts.append(f'<text x="8" y="{y + 19}">{escape(trace)}</text>')
        for column, count in enumerate(lanes):
            cell = places.get((trace, count))
            if cell is not None:
                parts += _square(LEFT + column * WIDTH, y, cell)
    return "\n".join([*parts, "</svg>", ""])


def _square(x: int, y: int, cell: Cell) -> list[str]:
    label = f"{cell.vs_fixed:.3f} W{cell.common_width}"
    return [
        f'<rect x="{x}" y="{y}" width="{WIDTH - 2}" height="{HEIGHT - 2}" '
        f'fill="{_colour(cell.vs_fixed)}"/>',
        f'<text x="{x + WIDTH // 2 - 1}" y="{y + 18}" text-anchor="middle" font-size="9">'
        f"{label}</text>",
    ]


def _colour(ratio: float) -> str:
    """White at 1, red below, green above."""
    if ratio < 1.0:
        share = min((1.0 - ratio) / (1.0 - WORST), 1.0)
        return f"rgb(255,{round(255 - 110 * share)},{round(255 - 130 * share)})"
    share = min((ratio - 1.0) / (BEST - 1.0), 1.0)
    return f"rgb({round(255 - 120 * share)},{round(255 - 40 * share)},{round(255 - 120 * share)})"
