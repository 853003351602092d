"""Several ranks against the equations, and against each other bit for bit."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.parallel.groups import run_ranks
from flare_ray.recipes.declaration import resolve
from flare_ray.recipes.deepseek_v41.recipe import RECIPE
from tests.recipes.deepseek_v41.test_target import LOGITS_ATOL
from tests.recipes.parity.test_target import largest_error
from tests.recipes.parity.test_tensor_parallel import refuses_three_ranks
from tests.support.recipe_driver import RecipeDriver

EMITTED = (3, 8, 1, 6, 2)
START = 60


def script(tiny, comm):
    """Prefill in chunks, then rounds with wrong drafts; (logits, draft logits) of accepted rows."""
    torch.set_num_threads(1)
    driver = RecipeDriver(tiny.folder, comm, slots=2, num_pages=8)
    lane = driver.open(1, [5, 2, 7])
    tokens, logits, drafts = tiny.tokens, [], []
    for at in range(0, START, 27):
        logits.append(driver.prefill([lane], [tokens[at : min(at + 27, START)]])[0])
    for emitted in EMITTED:
        sink = driver.propose([lane], [tokens[lane.consumed]], 7)
        drafts.append(torch.cat((*sink.logits, torch.stack(sink.forecasts, 1)), dim=1)[0])
        verified = driver.verify([lane], [tiny.row(lane.consumed, 8, emitted)], padded=1)
        logits.append(verified.output.logits[0, :emitted].clone())
        driver.commit(verified, [emitted])
    return torch.cat(logits), torch.stack(drafts)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_equal_the_equations_and_each_other(tiny, size):
    results = run_ranks(size, lambda comm: script(tiny, comm))
    logits, drafts = results[0]
    assert largest_error(logits, tiny.oracle.logits[: len(logits)]) <= LOGITS_ATOL
    at, vocabulary = START, tiny.oracle.logits.shape[1]
    for emitted, got in zip(EMITTED, drafts, strict=True):
        wanted = tiny.reference.draft(tiny.oracle.features[:at], tiny.tokens[at], 7)
        assert largest_error(got[:-7].view(7, vocabulary), wanted.logits) <= LOGITS_ATOL
        at += emitted
    for other, more in results[1:]:
        assert torch.equal(other, logits)
        assert torch.equal(more, drafts)


def test_state_is_whole_on_every_rank(load_tiny):
    geometry = load_tiny("sparse").driver.geometry
    assert resolve(RECIPE.state)(geometry, 4) == resolve(RECIPE.state)(geometry, 1)


def test_a_degree_that_divides_nothing_is_refused_by_name(load_tiny):
    refuses_three_ranks(load_tiny("sparse").driver)
