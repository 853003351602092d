"""The same comparison on a checkpoint that another author's script generates, where it lies beside
the repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.parity.test_target import LOGITS_ATOL, largest_error
from tests.support.recipe_driver import RecipeDriver

SCRIPT = Path(__file__).resolve().parents[3].parent / "shared" / "oracles" / "glm" / "make_tiny.py"
PROMPTS = ("p1", "p3", "p4", "p17", "p64", "p65", "p150", "rep90")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    if not SCRIPT.is_file():
        pytest.skip(f"no oracle script at {SCRIPT.name} beside the repository")
    folder = tmp_path_factory.mktemp("generated")
    subprocess.run([sys.executable, str(SCRIPT), str(folder)], check=True, capture_output=True)
    return RecipeDriver(folder, slots=8), load_file(folder / "oracle.safetensors")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prefill_rounds_drafts_and_reabsorption_equal_the_recorded_oracle(generated, prompt):
    driver, oracle = generated
    tokens, greedy = oracle[f"{prompt}.prompt"].tolist(), oracle[f"{prompt}.greedy"].tolist()
    wanted, drafts = oracle[f"{prompt}.logits"], oracle[f"{prompt}.draft_logits"]
    rows = oracle[f"{prompt}.mtp_logits"]
    driver.poison()
    lane = driver.open(2, [9, 4, 31])
    start = len(tokens)
    logits = torch.cat(
        [driver.prefill([lane], [tokens[at : at + 48]])[0] for at in range(0, start, 48)]
    )
    assert largest_error(logits, wanted[:start]) <= LOGITS_ATOL
    sink = driver.propose([lane], greedy[:1], 5)
    assert largest_error(torch.cat(sink.logits), drafts) <= LOGITS_ATOL
    assert torch.cat(sink.tokens).tolist() == oracle[f"{prompt}.draft_tokens"].tolist()
    turn = 0
    while (done := lane.consumed - start) < len(greedy):
        emitted = min(turn % 8 + 1, len(greedy) - done)
        row = greedy[done : done + 8]
        row = row[:emitted] + [(token + 77) % 490 for token in row[emitted:]]
        sink = driver.propose([lane], [greedy[done]], 7)
        assert largest_error(sink.logits[0][0], rows[lane.consumed - 1]) <= LOGITS_ATOL
        verified = driver.verify([lane], [row])
        got = verified.output.logits[0, :emitted]
        at = lane.consumed
        assert largest_error(got, wanted[at : at + emitted]) <= LOGITS_ATOL
        assert got.argmax(-1).tolist() == wanted[at : at + emitted].argmax(-1).tolist()
        driver.commit(verified, [emitted])
        turn += 1
