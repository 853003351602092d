"""Words: family names stay with their recipe, and files speak of the project alone."""

import re
from pathlib import PurePosixPath

import pytest

from tests.rules.sources import ROOT, Violation, report, tracked_files

# Families of models the package serves. An engine that names one has learned what it must not know.
FAMILY = re.compile(r"glm|deep_?seek|qwen|llama", re.IGNORECASE)
FAMILY_FREE = "flare_ray/"
FAMILY_ALLOWED = re.compile(r"^flare_ray/recipes/(?:registry\.py$|[^/]+/)")

# Spelled in pieces so that this file does not contain them.
MACHINE_WORDS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?<![\w.~<-])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me/\w+|opt/(?:whe" + r"els|py" + r"pi))\b",
        r"\bpy" + r"pi\.org|python" + r"hosted|registry\.np" + r"mjs|deb\.deb" + r"ian",
        r"\bwork" + r"place\b|\bbrief" + r"\.md\b|\bissues" + r" show\b|\.libr" + r"ary/",
    )
)
TEXT_SUFFIXES = {
    *(".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".sh", ".cfg", ".ini"),
    *(".jinja", ".tpl", ".gitignore", ""),
}
# Training data and vocabularies are other people's words; licence texts are verbatim.
VERBATIM = re.compile(r"(^LICENSE$|/tokenizer[^/]*\.json$|/data/)")


def check_family(path: str, text: str) -> list[Violation]:
    """Name, text and comments of a package file outside the recipe folders."""
    if not path.startswith(FAMILY_FREE) or FAMILY_ALLOWED.match(path):
        return []
    found = [
        Violation(path, number, f"family name {match.group()!r}")
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := FAMILY.search(line))
    ]
    if FAMILY.search(path):
        found.append(Violation(path, 1, "family name in the file's path"))
    return found


def check_machine_words(path: str, text: str) -> list[Violation]:
    return [
        Violation(path, number, f"{match.group()!r} is not the project's business")
        for number, line in enumerate(text.splitlines(), start=1)
        for pattern in MACHINE_WORDS
        if (match := pattern.search(line))
    ]


def is_text(path: str) -> bool:
    return PurePosixPath(path).suffix in TEXT_SUFFIXES and not VERBATIM.search(path)


def _all(check) -> list[Violation]:
    return [
        violation
        for path in tracked_files()
        if is_text(path)
        for violation in check(path, (ROOT / path).read_text(encoding="utf-8"))
    ]


def test_family_names_stay_in_recipes_and_registry():
    found = _all(check_family)
    assert not found, report(found)


def test_files_speak_of_the_project_alone():
    found = _all(check_machine_words)
    assert not found, report(found)


def test_tracked_files_are_found():
    assert "pyproject.toml" in tracked_files()


# Negative controls.


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("flare_ray/device/ops/kda/api.py", '"""As in GLM."""\n'),
        ("flare_ray/controller/loop.py", "# DeepSeek keeps a window\n"),
        ("flare_ray/frontend/parsers/x.py", "def parse_qwen3(): ...\n"),
        ("flare_ray/frontend/templates/glm.jinja", "{{ x }}\n"),
        ("flare_ray/recipes/declaration.py", 'NAME = "deep_seek"\n'),
    ],
)
def test_family_rule_catches_offender(path, text):
    assert check_family(path, text)


@pytest.mark.parametrize(
    "path",
    ["flare_ray/recipes/registry.py", "flare_ray/recipes/glm5_next/recipe.py", "README.md"],
)
def test_family_rule_allows_recipes_registry_and_documents(path):
    assert not check_family(path, "GLM\n")


@pytest.mark.parametrize(
    "text",
    [
        "see /wo" + "rk/x\n",
        'open("/ro' + 'ot/a")\n',
        "cd /ho" + "me/someone\n",
        "https://py" + "pi.org/simple\n",
        "as the brief" + ".md says\n",
    ],
)
def test_machine_word_rule_catches_offender(text):
    assert check_machine_words("README.md", text)


@pytest.mark.parametrize("text", ["a/work/tree\n", "workload/run.py\n", "the root of the tree\n"])
def test_machine_word_rule_allows_ordinary_words(text):
    assert not check_machine_words("README.md", text)
