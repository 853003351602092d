"""Documents: links lead to files, cited requirements exist."""

import re

import pytest

from tests.rules.sources import ROOT, Source, Violation, python_sources, report, tracked_files

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
# Numbered requirements: letter -> highest number.
CONTRACT = {
    **{"R": 10, "T": 7, "S": 9, "M": 8, "G": 8, "C": 7},
    **{"H": 3, "K": 4, "A": 6, "B": 6, "X": 2},
}
CITATION = re.compile(r"contract:\s*((?:[A-Z]\d+(?:\s*(?:,|and)\s*)?)+)")


def check_links(path: str, text: str) -> list[Violation]:
    """Relative links of a Markdown file that name no existing file."""
    folder = (ROOT / path).parent
    return [
        Violation(path, number, f"link to {target} leads nowhere")
        for number, line in enumerate(text.splitlines(), start=1)
        for target in LINK.findall(line)
        if "://" not in target and not (folder / target).exists()
    ]


def check_citations(source: Source) -> list[Violation]:
    """``contract: S3`` names a requirement that exists."""
    return [
        Violation(source.path, number, f"no requirement {cited}")
        for number, line in enumerate(source.text.splitlines(), start=1)
        for group in CITATION.findall(line)
        for cited in re.findall(r"[A-Z]\d+", group)
        if not 1 <= int(cited[1:]) <= CONTRACT.get(cited[0], 0)
    ]


def test_links_of_documents_lead_somewhere():
    documents = [path for path in tracked_files() if path.endswith(".md")]
    found = [
        violation
        for path in documents
        for violation in check_links(path, (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not found, report(found)


def test_citations_name_existing_requirements():
    sources = python_sources("flare_ray", "benchmarks")
    found = [violation for source in sources for violation in check_citations(source)]
    assert not found, report(found)


# Negative controls.


def test_link_rule_catches_a_dead_link():
    assert check_links("README.md", "see [x](absent/file.md#part)\n")
    assert not check_links("README.md", "see [x](LICENSE) and [y](https://example.org/a)\n")


@pytest.mark.parametrize("text", ["# contract: S10\n", "# contract: T2, Q1\n", "# contract: R0\n"])
def test_citation_rule_catches_unknown_requirement(text):
    assert check_citations(Source.parse("flare_ray/x.py", text))


def test_citation_rule_accepts_known_requirements():
    assert not check_citations(Source.parse("flare_ray/x.py", "# contract: S3, T7 and R10\n"))
