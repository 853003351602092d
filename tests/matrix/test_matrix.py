"""Every combination of sampling features is exact, or refused by name (contract: S1-S9, K1-K4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.support.grammar_engine import DirectCompiler
from tests.support.matrix import page
from tests.support.matrix.cells import Cell, covering, every_cell, refusal
from tests.support.matrix.judge import (
    ALPHA,
    MIN_LAW_TOKENS,
    MIN_MODE_TOKENS,
    law,
    p_values,
    problem,
)
from tests.support.matrix.run import Answer, fix_unseeded_requests, run_cells

pytestmark = pytest.mark.timeout(1200)

SAMPLED_CELLS = 330
"""Cells of the default run beside those that hold every pair of values."""


@pytest.fixture(scope="module")
def patch():
    """Seeds that can be repeated; two grammars need no process to be compiled in."""
    pytest.importorskip("xgrammar", reason="the extra `grammar` is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flare_ray.actors.grammar.service.CompileProcess", DirectCompiler)
        fix_unseeded_requests(patch)
        yield patch


@pytest.fixture(scope="module")
def answers(patch, tmp_path_factory) -> dict[Cell, Answer]:
    cells = covering(every_cell(), SAMPLED_CELLS, seed=3)
    return run_cells(cells, tmp_path_factory.mktemp("matrix"))


def report(problems: Sequence[str]) -> str:
    return f"{len(problems)} cells:\n" + "\n".join(problems[:5])


def check(answers: dict[Cell, Answer]) -> None:
    problems = []
    for cell, answer in answers.items():
        reason = refusal(cell)
        if reason:
            named = answer.status == 400 and answer.error["param"] in reason
            found = "" if named else f"status {answer.status}, expected a refusal: {reason}"
        else:
            found = problem(cell, answer)
        if found:
            problems.append(f"{cell}: {found}")
    assert not problems, report(problems)


def check_reproducible(answers: dict[Cell, Answer]) -> int:
    """Seeded cells answer as width one does; returns how many were compared."""
    compared = 0
    for cell, answer in answers.items():
        alone = answers.get(cell.with_drafter("off"))
        if alone is None or cell.drafter == "off" or cell.value("seed") != "given":
            continue
        assert answer.choices == alone.choices, str(cell)
        compared += 1
    return compared


def mode_of(cell: Cell) -> tuple[str, str]:
    return cell.drafter, cell.value("seed")


def test_cells_are_exact_or_refused_by_name(answers):
    check(answers)


def test_sampled_cells_follow_the_exact_law(answers):
    found = p_values(answers, lambda cell: cell.drafter)
    assert all(p > ALPHA for p, _ in found.values()), found


@pytest.mark.parametrize(
    "left_out", ["logit_bias", "repetition_penalty", "min_p", "guided_regex", "response_format"]
)
def test_a_law_without_one_of_the_parameters_is_noticed(answers, left_out):
    """The control: an engine that ignores the parameter would fail at the same level."""

    def without(fields, prompt, output) -> np.ndarray:
        return law({k: v for k, v in fields.items() if k != left_out}, prompt, output)

    found = p_values(answers, lambda cell: left_out in cell.body(), without)
    assert found[True][0] < ALPHA < found[False][0]


def test_reproducible_cells_equal_width_one_execution(patch, tmp_path):
    cells = [c for c in every_cell() if c.value("seed") == "given" and c.sampled]
    some = covering([cell for cell in cells if cell.drafter == "off"], 10, seed=4)
    drafters = sorted({cell.drafter for cell in cells})
    answers = run_cells([c.with_drafter(d) for c in some for d in drafters], tmp_path)
    check(answers)
    assert check_reproducible(answers) == len(some) * (len(drafters) - 1)


@pytest.mark.slow
def test_every_cell_of_the_product(patch, tmp_path):
    """All cells, each law by itself."""
    answers = run_cells(every_cell(), tmp_path)
    check(answers)
    assert check_reproducible(answers) > 0
    for key, least in ((lambda cell: cell.law_key, MIN_LAW_TOKENS), (mode_of, MIN_MODE_TOKENS)):
        found = p_values(answers, key)
        assert min(p for p, _ in found.values()) > ALPHA, found
        assert min(tokens for _, tokens in found.values()) >= least, found


def test_refused_cells_are_few_and_none_is_of_openais_own_parameters():
    cells = every_cell()
    refused = [cell for cell in cells if refusal(cell)]
    assert len(refused) <= page.MAX_REFUSED_RATIO * len(cells)


def test_page_of_the_matrix_is_up_to_date():
    assert page.PAGE.read_text(encoding="utf-8") == page.render(), (
        "run python -m tests.support.matrix.page"
    )
