"""What operators are pointed at exists: metrics of the dashboard and of the incident table."""

import functools
import re
from dataclasses import dataclass

import pytest

from flare_ray.metrics import names
from tests.helm.rendering import CHART
from tests.rules.sources import ROOT

GUIDE = ROOT / "docs" / "operators" / "README.md"
DASHBOARD = CHART / "dashboards" / "flare-ray.json"
SUFFIXES = {
    names.Kind.COUNTER: ("_total",),
    names.Kind.GAUGE: ("",),
    names.Kind.HISTOGRAM: ("_bucket", "_sum", "_count"),
}


@dataclass(frozen=True)
class Incident:
    """A row of the guide's table."""

    symptom: str
    metric: str
    action: str


def incidents() -> list[Incident]:
    section = GUIDE.read_text().split("\n## Incidents\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    header, rule, *rest = [[cell.strip() for cell in row] for row in rows]
    assert header == ["Symptom", "Metric", "Do"]
    assert set(rule) == {"---"}
    return [Incident(*row) for row in rest]


@functools.cache
def written_words() -> frozenset[str]:
    """Identifiers of the package, besides where metrics are declared and where they are read."""
    files = [
        path
        for path in (ROOT / "flare_ray").rglob("*.py")
        if path.name != "names.py" and path.parent.name != "cli"
    ]
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text()))


def recorded() -> dict[str, names.Series]:
    """Exported name -> series, of those that some code writes; a declaration exports nothing."""
    return {
        series.name + suffix: series
        for constant, series in vars(names).items()
        if isinstance(series, names.Series) and constant in written_words()
        for suffix in SUFFIXES[series.kind]
    }


def test_dashboard_asks_only_for_recorded_metrics():
    asked = set(re.findall(r"\bflare_\w+", DASHBOARD.read_text())) - {"flare_ray"}
    assert asked
    assert asked <= recorded().keys()


@pytest.mark.parametrize("incident", incidents(), ids=lambda incident: incident.symptom[:40])
def test_incident_names_a_recorded_metric_and_an_action(incident):
    known = recorded()
    # A histogram stands for its quantiles, under its own name.
    known |= {series.name: series for series in known.values() if series.buckets}
    asked = re.findall(r"`(flare_\w*\w)(?:\{(\w+)=\"(\w+)\"\})?", incident.metric)
    named = [(name, label) for name, label, _ in asked]
    assert named, "no metric"
    for name, label in named:
        if name != "flare_":  # the prefix of them all
            assert name in known
            assert not label or label in known[name].labels
    assert incident.symptom
    assert incident.action


def test_incident_table_names_codes_that_requests_end_with():
    codes = re.findall(r'code="(\w+)"', "\n".join(incident.metric for incident in incidents()))
    assert codes
    assert set(codes) <= written_words()


def test_series_that_nothing_writes_counts_as_missing(monkeypatch):
    series = names.Series("flare_unwritten", names.Kind.GAUGE, "Declared alone.")
    monkeypatch.setattr(names, "DECLARED_ALONE", series, raising=False)
    assert series in names.declared()
    assert series.name not in recorded()
