"""Whole engines on a checkpoint without a drafter: copied drafts alone (contract: H2, H3)."""

from __future__ import annotations

import pytest

from tests.recipes.test_copied_drafts import ARMS, BUDGET, answers
from tests.support.engine_machine import DRAFTS, Engine
from tests.support.llama_tiny import UNDRAFTED, write_checkpoint


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    folder = tmp_path_factory.mktemp("undrafted")
    write_checkpoint(folder, "llama-odd", **UNDRAFTED)
    return Engine(folder, speculation={"learned_drafts": False, "request_drafts": True})


@pytest.mark.parametrize("depth", [1, 2])
def test_copies_alone_write_what_one_token_execution_writes(engine, depth):
    expected, _ = answers(engine, 1, draft_tokens=0)
    found, accepted = answers(engine, depth, draft_tokens=DRAFTS, **ARMS["alone"])
    assert found == expected
    assert accepted > BUDGET
