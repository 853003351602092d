"""Every promise of the HTTP interface has a line in `docs/service-tests.md`, and every line a test
that exists."""

from __future__ import annotations

import ast

from tests.rules.sources import ROOT
from tests.rules.test_faults import Row, rows

PAGE = ROOT / "docs" / "service-tests.md"
SUBJECTS = frozenset(
    {
        "chat",
        "completions",
        "responses",
        "models",
        "tokenize",
        "detokenize",
        "other-routes",
        "messages",
        "count-tokens",
        "n",
        "log-probabilities",
        "parallel-calls",
        "streamed-arguments",
        "strict-tools",
        "required-tools",
        "structured-output",
        "reasoning",
        "effort",
        "stream-options",
        "usage",
        "prediction",
        "token-limits",
        "seeds",
        "priority",
        "request-ids",
        "content-parts",
        "images",
        "openapi",
        "knobs",
        "chat-template",
        "keys",
        "weights",
        "rates",
        "body-size",
        "context",
        "queue",
        "time-outs",
        "bad-bodies",
        "logs",
        "address",
        "cluster",
        "pickle",
        "rank-death",
        "engine-death",
        "ingress-death",
        "socket-loss",
        "memory",
        "disk",
        "slow-client",
        "not-finite",
        "quarantine",
        "drain",
        "live-settings",
        "scaling",
        "routing",
        "haproxy",
        "nodes",
        "metrics",
        "dashboard",
        "spans",
        "top",
        "page",
        "chaos",
        "http-benchmark",
        "clients",
        "lm-eval",
        "load-tool",
    }
)


def missing(row: Row) -> bool:
    """Whether a line's test does not exist; coroutines are tests, too."""
    path = ROOT / row.path
    if not path.is_file():
        return True
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return not any(isinstance(node, kinds) and node.name == row.test for node in tree)


def test_the_page_names_tests_that_exist():
    absent = [row for row in rows(PAGE.read_text(encoding="utf-8")) if missing(row)]
    assert not absent, "\n".join(f"{row.path} has no {row.test}" for row in absent)


def test_every_subject_has_a_line_and_no_line_is_unread():
    text = PAGE.read_text(encoding="utf-8")
    found = rows(text)
    assert {row.subject for row in found} == SUBJECTS
    assert len(found) == text.count("::test_")


def test_a_line_whose_test_is_missing_is_noticed():
    path = "tests/rules/test_service_tests.py"
    page = f"| chat | a | `{path}::test_none` |\n| chat | b | `tests/none.py::test_none` |\n"
    assert [missing(row) for row in rows(page)] == [True, True]
