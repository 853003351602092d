"""One self-contained page, as HTML and as Markdown: tables, pictures, environment, commit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flare_ray.workload.compare import Change, Comparison
from flare_ray.workload.summary import Run
from flare_ray.workload.tables import Table, shown, tables_of

TITLE = "What speculation is worth"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 14px/1.45 sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 0.5em 0 2em }
th, td { border: 1px solid #ccc; padding: 0.2em 0.6em; text-align: left; vertical-align: top }
th { background: #eee } svg { max-width: 100%; height: auto }
</style></head><body><h1>{{ title }}</h1>
{% for name, svg in plots.items() %}<h2>{{ name }}</h2>{{ svg | safe }}{% endfor %}
{% for table in tables %}<h2>{{ table.title }}</h2>{% if table.note %}<p>{{ table.note }}</p>
{% endif %}<table><tr>{% for cell in table.headings %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>{% endfor %}</body></html>
"""


def markdown(tables: Sequence[Table], *, title: str = TITLE) -> str:
    """The tables as one document."""
    return f"# {title}\n\n" + "\n".join(table.markdown for table in tables)


def html(tables: Sequence[Table], plots: dict[str, str], *, title: str = TITLE) -> str:
    """The page; it loads nothing."""
    from jinja2 import Environment

    template = Environment(autoescape=True).from_string(PAGE)
    return template.render(title=title, tables=tables, plots=plots)


def write_report(runs: Sequence[Run], out: Path, *, with_plots: bool = True) -> list[Path]:
    """Write `report.md` and `report.html`; the first run is the report's own, others of the same
    workload add points to the frontier.

    Raises:
        ConfigError: pictures are wanted and matplotlib is not installed.
    """
    tables = tables_of(runs[0])
    plots: dict[str, str] = {}
    if with_plots:
        from flare_ray.workload.plots import plots_of

        plots = plots_of(runs)
    out.mkdir(parents=True, exist_ok=True)
    written = {"report.md": markdown(tables), "report.html": html(tables, plots)}
    for name, text in written.items():
        (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in written]


def comparison_table(found: Comparison) -> Table:
    """Changes between two runs, slowest first, then what else differs."""
    rows = [
        (_mark(change), change.arm, change.category, *shown(change.ratio))
        for change in found.changes
    ]
    rows += [("wrong", line, "", "", "", "") for line in found.verdicts]
    rows += [("work", line, "", "", "", "") for line in (*found.failed, *found.work)]
    return Table(
        "Changes, regressions first",
        ("what", "arm", "category", "new over old", "interval", "sessions"),
        tuple(rows),
        "Intervals hold for all rows together with 95 %.",
    )


def _mark(change: Change) -> str:
    return "slower" if change.is_regression else ""
