"""Generators: reproducible, correct answers, no foreign licence."""

import itertools
import json
import random
import re

import pytest

from benchmarks.demo_training.corpus import FOREIGN_LICENCE
from benchmarks.demo_training.generators import CATEGORIES, CONVERSATIONS, example
from flare_ray.workload.generators.corpus import Corpus, Gloss
from flare_ray.workload.generators.edits import edit_code
from flare_ray.workload.generators.recall import recall
from flare_ray.workload.generators.records import json_records
from flare_ray.workload.generators.sums import math

FUNCTION = (
    "def scale(values, factor):\n    result = []\n    for value in values:\n"
    "        result.append(value * 3)\n    return result"
)


@pytest.fixture
def corpus():
    """A corpus small enough to read."""
    common = [Gloss("n", w, f"the meaning of {w}") for w in ("house", "river", "engine", "letter")]
    common += [Gloss("v", w, f"to {w}") for w in ("carry", "build")]
    text = "\n".join(f"line {i} of the text" for i in range(1200))
    return Corpus(common, common[:1], [text], [text], [text], [FUNCTION])


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("long_context", [False, True])
def test_same_seed_gives_the_same_text(corpus, category, long_context):
    corpus.long_context = long_context
    first = [example(category, random.Random(i), corpus) for i in range(5)]
    assert first == [example(category, random.Random(i), corpus) for i in range(5)]
    assert len(set(first)) > 1


@pytest.mark.parametrize("category", CONVERSATIONS)
def test_conversation_alternates_and_ends_with_the_assistant(corpus, category):
    for seed in range(20):
        messages = CONVERSATIONS[category](random.Random(seed), corpus).messages
        roles = [m["role"] for m in messages]
        assert roles[0] == "user" and roles[-1] == "assistant"
        assert all(a != b or a == "tool" for a, b in itertools.pairwise(roles))


def test_json_answers_parse(corpus):
    for seed in range(60):
        for message in json_records(random.Random(seed), corpus).messages[1::2]:
            json.loads(message["content"])


def test_sums_are_right(corpus):
    checked = 0
    for seed in range(200):
        for message in math(random.Random(seed), corpus).messages[1::2]:
            found = re.fullmatch(r"([-\d +*()]+) = (-?\d+)\.", message["content"])
            if found:
                assert eval(found.group(1)) == int(found.group(2))
                checked += 1
    assert checked > 50


def test_recall_answer_stands_in_the_first_message(corpus):
    for seed in range(40):
        messages = recall(random.Random(seed), corpus).messages
        ((key, value),) = re.findall(r"code of (\S+) is (\d+)\.", messages[-1]["content"])
        assert re.search(rf"{key}(:| is) {value}\b", messages[0]["content"])


def test_edited_function_differs_from_the_one_shown(corpus):
    for seed in range(40):
        question, answer = edit_code(random.Random(seed), corpus).messages
        if question["content"].count("```python"):
            assert FUNCTION in question["content"]
            assert f"```python\n{FUNCTION}\n```" != answer["content"]


@pytest.mark.parametrize(
    "text",
    ["under the GNU General Public License", "SPDX: GPL-3", "Mozilla Public License", "CC BY-SA"],
)
def test_foreign_licence_is_recognised(text):
    assert FOREIGN_LICENCE.search(text)


@pytest.mark.parametrize("text", ["MIT License", "BSD-3-Clause", "Apache-2.0", "GPLFOO"])
def test_permissive_licence_is_not_taken_for_a_foreign_one(text):
    assert not FOREIGN_LICENCE.search(text)
