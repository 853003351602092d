"""Requirements: every number that the repository cites has its line in docs/requirements.md."""

import re

from tests.rules.sources import ROOT, Violation, report, tracked_files
from tests.rules.test_documents import CITATION, CONTRACT

PAGE = "docs/requirements.md"
ROW = re.compile(r"^\| ([A-Z]\d*) \| (.+) \|$", re.MULTILINE)


def listed_requirements(text: str) -> list[str]:
    """Numbers of the page's table rows, in order."""
    return [number for number, _ in ROW.findall(text)]


def check_citations_are_listed(path: str, text: str, listed: set[str]) -> list[Violation]:
    return [
        Violation(path, number, f"{cited} has no line in {PAGE}")
        for number, line in enumerate(text.splitlines(), start=1)
        for group in CITATION.findall(line)
        for cited in re.findall(r"[A-Z]\d+", group)
        if cited not in listed
    ]


def test_page_lists_every_requirement_once():
    expected = [f"{letter}{n}" for letter, last in CONTRACT.items() for n in range(1, last + 1)]
    listed = listed_requirements((ROOT / PAGE).read_text(encoding="utf-8"))
    assert len(listed) == len(set(listed))
    assert sorted(expected) == sorted(number for number in listed if number != "V")


def test_cited_requirements_have_a_line():
    listed = set(listed_requirements((ROOT / PAGE).read_text(encoding="utf-8")))
    # The rules' own tests cite numbers that do not exist, as their negative controls.
    cited = [path for path in tracked_files() if path.endswith((".py", ".md", ".yaml"))]
    found = [
        violation
        for path in cited
        if not path.startswith("tests/rules/")
        for violation in check_citations_are_listed(
            path, (ROOT / path).read_text(encoding="utf-8"), listed
        )
    ]
    assert not found, report(found)


# Negative controls.


def test_listing_rule_catches_an_unlisted_number():
    listed = set(listed_requirements("| Number | x |\n| --- | --- |\n| S3 | defaults |\n"))
    assert listed == {"S3"}
    assert check_citations_are_listed("a.py", "# contract: S3, S4\n", listed)
    assert not check_citations_are_listed("a.py", "# contract: S3\n", listed)
