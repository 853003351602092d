"""`flare-ray top`: a running service at a glance, from two readings of its /metrics."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flare_ray.errors import ConfigError
from flare_ray.metrics import names
from flare_ray.metrics.exposition import Exposition
from flare_ray.metrics.names import Series

TIMEOUT_S = 5.0
NONE = "-"
_LATENCIES = {
    "time to first token": names.TIME_TO_FIRST_TOKEN,
    "between tokens": names.INTER_TOKEN_LATENCY,
    "in the queue": names.QUEUE_TIME,
    "whole request": names.END_TO_END,
}


class Section(NamedTuple):
    """A titled table: names and their values."""

    title: str
    rows: Sequence[tuple[str, str]]


def read(url: str) -> Exposition:
    """The service's metrics.

    Raises:
        ConfigError: nothing answers there, or not with metrics.
    """
    address = f"{url.rstrip('/')}/metrics"
    try:
        answer = httpx.get(address, timeout=TIMEOUT_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"{address} does not answer ({error}); give --url") from error
    if answer.status_code != httpx.codes.OK:
        raise ConfigError(f"{address} answered {answer.status_code}: {answer.text[:200]}")
    try:
        return Exposition.parse(answer.text)
    except ValueError as error:
        raise ConfigError(f"{address} is no Prometheus text: {error}") from error


def sections(before: Exposition, now: Exposition, seconds: float) -> list[Section]:
    """What is shown: present sizes, and rates, shares and latencies since the earlier reading."""
    grown = now.since(before)
    return [
        Section("Requests", _requests(now, grown)),
        Section("Tokens", _tokens(grown, seconds)),
        Section("Drafts", _drafts(grown)),
        Section("Memory", _memory(now, grown)),
        Section("Latency, 50 % and 99 % within", _latencies(grown)),
    ]


def _requests(now: Exposition, grown: Exposition) -> list[tuple[str, str]]:
    failed = grown.by_label(names.REQUESTS_FAILED, names.REQUESTS_FAILED.labels[0])
    causes = ", ".join(f"{code} {count:.0f}" for code, count in sorted(failed.items()))
    return [
        ("running", f"{now.value(names.REQUESTS_RUNNING):.0f}"),
        ("waiting", f"{now.value(names.REQUESTS_WAITING):.0f}"),
        ("finished since", f"{grown.value(names.REQUESTS_FINISHED):.0f}"),
        ("failed since", causes or "0"),
        ("engines failed for good", f"{now.value(names.ENGINE_FATAL):.0f}"),
    ]


def _tokens(grown: Exposition, seconds: float) -> list[tuple[str, str]]:
    return [
        ("generated a second", f"{grown.value(names.GENERATION_TOKENS) / seconds:.1f}"),
        ("of prompts a second", f"{grown.value(names.PROMPT_TOKENS) / seconds:.1f}"),
        ("rounds a second", f"{grown.value(names.ROUNDS) / seconds:.1f}"),
        ("preemptions since", f"{grown.value(names.PREEMPTIONS):.0f}"),
    ]


def _drafts(grown: Exposition) -> list[tuple[str, str]]:
    offered, accepted = names.SPEC_DRAFT_TOKENS, names.SPEC_ACCEPTED_TOKENS
    lanes = grown.value(names.SPEC_LANE_ROUNDS)
    rows = [
        ("accepted of offered", _share(grown.value(accepted), grown.value(offered))),
        (
            "copies accepted of offered",
            _share(
                grown.value(names.SPEC_COPIED_ACCEPTED_TOKENS),
                grown.value(names.SPEC_COPIED_TOKENS),
            ),
        ),
        ("tokens a lane and round", _ratio(grown.value(names.SPEC_EMITTED), lanes)),
    ]
    widths = grown.by_label(names.SPEC_LANE_ROUNDS, names.SPEC_LANE_ROUNDS.labels[0])
    shares = [f"{width}: {_share(widths[width], lanes)}" for width in sorted(widths, key=int)]
    rows.append(("widths", ", ".join(shares) or NONE))
    position = names.SPEC_ACCEPTED_PER_POSITION
    depths = grown.by_label(position, position.labels[0])
    rounds = grown.value(names.SPEC_DRAFTS)
    survival = [_share(depths[depth], rounds) for depth in sorted(depths, key=int)]
    rows.append(("passed by depth", " ".join(survival) or NONE))
    return rows


def _memory(now: Exposition, grown: Exposition) -> list[tuple[str, str]]:
    total, free = now.value(names.PAGES_TOTAL), now.value(names.PAGES_FREE)
    hits, queries = grown.value(names.PREFIX_HITS), grown.value(names.PREFIX_QUERIES)
    return [
        ("pages in use", f"{total - free:.0f} of {total:.0f} ({_share(total - free, total)})"),
        ("prompt tokens from the cache", _share(hits, queries)),
        ("snapshots held", f"{now.value(names.SNAPSHOTS_HELD):.0f}"),
    ]


def _latencies(grown: Exposition) -> list[tuple[str, str]]:
    return [
        (name, f"{_time(grown, series, 0.5)}  {_time(grown, series, 0.99)}")
        for name, series in _LATENCIES.items()
    ]


def _time(grown: Exposition, series: Series, share: float) -> str:
    bound = grown.quantile(series, share)
    if bound is None:
        return NONE
    return "> last bucket" if math.isinf(bound) else f"{bound * 1000:.4g} ms"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else NONE


def _ratio(part: float, whole: float) -> str:
    return f"{part / whole:.2f}" if whole else NONE


def view(found: Sequence[Section]) -> Group:
    """The sections as tables."""
    tables = []
    for section in found:
        table = Table(title=section.title, title_justify="left", show_header=False, width=72)
        table.add_column(width=30)
        table.add_column()
        for row in section.rows:
            table.add_row(*row)
        tables.append(table)
    return Group(*tables)


def watch(url: str, *, interval_s: float, once: bool = False) -> None:
    """Show the service until interrupted.

    Raises:
        ConfigError: as `read`, at the first reading or with `once`; later ones are shown.
    """
    console = Console()
    before, before_s = read(url), time.monotonic()
    if once:
        time.sleep(interval_s)
        console.print(view(sections(before, read(url), time.monotonic() - before_s)))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                now, now_s = read(url), time.monotonic()
            except ConfigError as error:
                # What answered there is no markup.
                live.update(Text(str(error)), refresh=True)
                continue
            live.update(view(sections(before, now, now_s - before_s)), refresh=True)
            before, before_s = now, now_s
