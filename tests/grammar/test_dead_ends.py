"""A vocabulary need not be able to write what a grammar demands: nobody's fault, and no 500."""

import numpy as np
import pytest
from scipy.stats import binomtest

from tests.support.fault_model import fixed
from tests.support.matrix.model import SCRIPT, TOKENS, WRONG, checkpoint, law
from tests.support.matrix.run import Engine

DEAD = "aZa|bb?"
"""Behind `a` only the text `Za` may follow, of which no token is the beginning; behind `b` all is
well."""
OFTEN_DEAD = "[b-h]{1,6}(aZa)?"
PROMPTS = "abcdefgh"


H = TOKENS.index("h")
MAY_DIE = {
    "prompt": [3, 0, 1],
    "guided_regex": "[a-g]([a-g]|hZa)",
    "temperature": 1.5,
    "top_p": 1.0,
    "max_tokens": 9,
    "reproducible": False,
}
SAMPLES = 800
ALPHA = 1e-3
"""Seeds are fixed. Cutting such drafts gave three quarters of what is expected."""


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Engines of fixed widths whose drafts are right about half the time."""
    engines = {}

    def engine(width: int) -> Engine:
        if width not in engines:
            path = checkpoint(tmp_path_factory.mktemp("learned"), SCRIPT)
            engines[width] = Engine(path, **fixed(width))
        return engines[width]

    yield engine
    for one in engines.values():
        one.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Of fixed widths; drafts are right by chance alone, `a` first."""
    path = checkpoint(tmp_path_factory.mktemp("micro"), WRONG)
    engines = {width: Engine(path, **fixed(width)) for width in (1, 4, 8)}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("stream", [False, True])
def test_text_that_no_token_can_go_on_is_400_and_names_the_grammar(engines, width, stream):
    asked = {"prompt": "abc", "guided_regex": DEAD, "max_tokens": 9, "stream": stream}
    answers = engines[width].post_all([{**asked, "seed": seed} for seed in range(12)])
    refused = [answer.error for answer in answers if answer.status != 200]
    assert all(answer.status in (200, 400) for answer in answers)
    assert all(answer.text[0] == "b" for answer in answers if answer.status == 200)
    assert 0 < len(refused) < len(answers)
    for error in refused:
        assert error["param"] == "response_format"
        assert "after 1 tokens no token is left" in error["message"]


def test_dead_end_behind_drafts_changes_no_text(engines):
    """Drafts lead into it where the text does not."""
    asked = {"guided_regex": OFTEN_DEAD, "temperature": 0, "max_tokens": 7}
    bodies = [{**asked, "prompt": prompt} for prompt in PROMPTS]
    narrow, *wide = (
        [(answer.status, answer.choices, answer.error) for answer in engine.post_all(bodies)]
        for engine in engines.values()
    )
    assert wide == [narrow, narrow]
    assert {status for status, _, _ in narrow} == {200, 400}


@pytest.mark.parametrize("width", [2, 4])
def test_drafts_that_lead_into_a_dead_end_are_as_likely_as_without_drafts(learned, width):
    """Such a draft that were cut, whatever it is, would be too rare (contract: S1)."""
    bodies = [{**MAY_DIE, "seed": seed} for seed in range(SAMPLES)]
    statuses = [answer.status for answer in learned(width).post_all(bodies)]
    assert set(statuses) == {200, 400}
    probability = 0.0
    first = law(MAY_DIE, MAY_DIE["prompt"], [])
    for token in np.flatnonzero(first):
        probability += first[token] * law(MAY_DIE, MAY_DIE["prompt"], [int(token)])[H]
    assert binomtest(statuses.count(400), SAMPLES, probability).pvalue > ALPHA
