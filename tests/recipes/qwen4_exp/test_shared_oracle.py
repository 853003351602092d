"""The same comparison on a checkpoint that another author's script generates, where it lies beside
the repository."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.parity.test_target import LOGITS_ATOL, largest_error
from tests.support.recipe_driver import RecipeDriver

SCRIPT = Path(__file__).resolve().parents[3].parent / "shared" / "oracles" / "qwen" / "make_tiny.py"
PROMPTS = ("short3", "len64", "eos_inside", "len131", "repeat230")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    if not SCRIPT.is_file():
        pytest.skip(f"no oracle script at {SCRIPT.name} beside the repository")
    folder = tmp_path_factory.mktemp("generated")
    subprocess.run([sys.executable, str(SCRIPT), str(folder)], check=True, capture_output=True)
    recorded = json.loads((folder / "oracle.json").read_text())["prompts"]
    return RecipeDriver(folder, slots=8), recorded, load_file(folder / "oracle.safetensors")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prefill_drafts_and_rounds_equal_the_recorded_oracle(generated, prompt):
    driver, recorded, oracle = generated
    tokens, greedy = recorded[prompt]["ids"], recorded[prompt]["greedy"]
    wanted, later = oracle[f"{prompt}.logits"], oracle[f"{prompt}.greedy_logits"]
    driver.poison()
    lane = driver.open(2, [9, 4, 31, 7])
    start = len(tokens)
    logits = torch.cat(
        [driver.prefill([lane], [tokens[at : at + 48]])[0] for at in range(0, start, 48)]
    )
    assert largest_error(logits, wanted) <= LOGITS_ATOL
    assert logits[-1].argmax() == greedy[0]
    sink = driver.propose([lane], greedy[:1], 4)
    assert largest_error(torch.cat(sink.logits), oracle[f"{prompt}.mtp_draft_logits"]) <= (
        LOGITS_ATOL
    )
    assert torch.cat(sink.tokens).tolist() == recorded[prompt]["mtp_greedy_drafts"]
    turn = 0
    while (done := lane.consumed - start) < len(greedy) - 1:
        emitted = min(turn % 8 + 1, len(greedy) - 1 - done)
        row = greedy[done : done + 8]
        row = row[:emitted] + [2 + (token + 77) % 490 for token in row[emitted:]]
        driver.propose([lane], [greedy[done]], 7)
        verified = driver.verify([lane], [row])
        got = verified.output.logits[0, :emitted]
        assert largest_error(got, later[done + 1 : done + 1 + emitted]) <= LOGITS_ATOL
        assert got.argmax(-1).tolist() == greedy[done + 1 : done + 1 + emitted]
        driver.commit(verified, [emitted])
        turn += 1


def test_teacher_forced_drafter_rows_equal_the_recorded_oracle(generated):
    driver, recorded, oracle = generated
    for prompt in ("len64", "eos_inside"):
        tokens = [*recorded[prompt]["ids"], recorded[prompt]["greedy"][0]]
        driver.poison()
        lane = driver.open(1, [9, 4, 31, 7])
        driver.prefill([lane], [tokens[:1]])
        for at in range(1, len(tokens) - 1):
            sink = driver.propose([lane], [tokens[at]], 1)
            row = oracle[f"{prompt}.mtp_logits"][at - 1]
            assert largest_error(sink.logits[0][0], row) <= LOGITS_ATOL
            driver.commit(driver.verify([lane], [[tokens[at]]]), [1])
