"""The Grafana dashboard, from the names that the project exports: no metric is spelled here.

Every series of an engine carries `engine` and `model_name`, by which the dashboard's two variables
select. Counters are exported with `_total`.
"""

from __future__ import annotations

from typing import Any

from flare_ray.metrics import names
from flare_ray.metrics.names import Kind, Series

SELECT = 'model_name=~"$model",engine=~"$engine"'
RATE = "$__rate_interval"
COLUMNS = 2
WIDTH = 12
HEIGHT = 8
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def series(metric: Series, select: str = SELECT) -> str:
    """The metric's exported name with the dashboard's selection."""
    suffix = "_total" if metric.kind is Kind.COUNTER else ""
    return f"{metric.name}{suffix}{{{select}}}"


def rate(metric: Series, by: str = "") -> str:
    """Sum of a counter's rate."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({series(metric)}[{RATE}]))"


def quantile(metric: Series, q: float) -> str:
    """A quantile over all engines."""
    buckets = f"{metric.name}_bucket{{{SELECT}}}"
    return f"histogram_quantile({q}, sum by (le) (rate({buckets}[{RATE}])))"


def latency(title: str, metric: Series) -> tuple[str, str, list[tuple[str, str]]]:
    """A panel of three quantiles."""
    return title, "s", [(quantile(metric, q), f"p{q * 100:.0f}") for q in (0.5, 0.9, 0.99)]


def panels() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Title, unit, and (query, legend) pairs, in reading order."""
    offered, accepted = names.SPEC_DRAFT_TOKENS, names.SPEC_ACCEPTED_TOKENS
    return [
        (
            "Requests",
            "short",
            [
                (f"sum ({series(names.REQUESTS_RUNNING)})", "running"),
                (f"sum ({series(names.REQUESTS_WAITING)})", "waiting"),
                (f"sum ({series(names.REQUESTS_PREEMPTED)})", "of them preempted"),
            ],
        ),
        (
            "Tokens per second",
            "short",
            [
                (rate(names.GENERATION_TOKENS), "generated"),
                (rate(names.PROMPT_TOKENS), "prompt"),
            ],
        ),
        latency("Time to first token", names.TIME_TO_FIRST_TOKEN),
        latency("Time per output token", names.TIME_PER_OUTPUT_TOKEN),
        latency("Wait for a slot", names.QUEUE_TIME),
        latency("End to end", names.END_TO_END),
        ("Failures", "reqps", [(rate(names.REQUESTS_FAILED, "code"), "{{code}}")]),
        (
            "Engines",
            "short",
            [
                (f"count ({series(names.ENGINE_START)})", "reporting"),
                (f"sum ({series(names.ENGINE_FATAL)})", "failed"),
            ],
        ),
        ("Requests by routing", "reqps", [(rate(names.ROUTED_REQUESTS, "choice"), "{{choice}}")]),
        (
            "Pages in use",
            "percentunit",
            [(f"max by (engine) ({series(names.CACHE_USAGE)})", "{{engine}}")],
        ),
        (
            "Preemptions",
            "ops",
            [
                (rate(names.PREEMPTIONS, "kind"), "{{kind}}"),
                (rate(names.RECOMPUTED_TOKENS), "tokens computed again"),
            ],
        ),
        (
            "Accepted of offered drafts",
            "percentunit",
            [
                (f"{rate(accepted)} / {rate(offered)}", "accepted / offered"),
            ],
        ),
        (
            "Tokens per lane and round",
            "short",
            [
                (f"{rate(names.SPEC_EMITTED)} / {rate(names.SPEC_LANE_ROUNDS)}", "emitted"),
            ],
        ),
        (
            "Accepted by depth",
            "short",
            [
                (rate(names.SPEC_ACCEPTED_PER_POSITION, "position"), "depth {{position}}"),
            ],
        ),
        (
            "Rounds by width",
            "ops",
            [(rate(names.ROUNDS, "verify_width"), "width {{verify_width}}")],
        ),
        latency("Round", names.ROUND_SECONDS),
        ("Controller's CPU", "percentunit", [(rate(names.CONTROLLER_CPU, "engine"), "{{engine}}")]),
    ]


def dashboard() -> dict[str, Any]:
    """The document that Grafana imports."""
    return {
        "title": "flare_ray",
        "uid": "flare-ray",
        "schemaVersion": 39,
        "tags": ["flare-ray"],
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": [_panel(index, *panel) for index, panel in enumerate(panels())],
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}
    start = names.ENGINE_START.name
    labels = {
        "model": ("model_name", start),
        "engine": ("engine", f'{start}{{model_name=~"$model"}}'),
    }
    return [source] + [
        {
            "name": name,
            "type": "query",
            "datasource": DATASOURCE,
            "query": f"label_values({of}, {label})",
            "includeAll": True,
            "multi": True,
            "refresh": 2,
            "current": {"text": "All", "value": "$__all"},
        }
        for name, (label, of) in labels.items()
    ]


def _panel(index: int, title: str, unit: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    row, column = divmod(index, COLUMNS)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "datasource": DATASOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": row * HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "expr": query,
                "legendFormat": legend,
                "datasource": DATASOURCE,
            }
            for i, (query, legend) in enumerate(queries)
        ],
    }
