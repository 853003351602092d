"""Several ranks against transformers' single process, and against each other bit for bit."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.parallel.groups import run_ranks
from flare_ray.errors import ConfigError
from flare_ray.recipes.declaration import BuildOptions, resolve
from tests.recipes.parity.test_rollback import candidate_row
from tests.recipes.parity.test_target import LOGITS_ATOL, largest_error
from tests.support.recipe_driver import RecipeDriver

EMITTED = (3, 8, 1, 6, 2)


def script(tiny, comm):
    """Prefill in chunks, then rounds with wrong drafts; (logits, draft logits) of accepted rows."""
    torch.set_num_threads(1)
    driver = RecipeDriver(tiny.folder, comm, slots=2, num_pages=8)
    lane = driver.open(1, [5, 2, 7])
    tokens, logits, drafts = tiny.tokens, [], []
    for at in range(0, 100, 45):
        logits.append(driver.prefill([lane], [tokens[at : min(at + 45, 100)]])[0])
    for emitted in EMITTED:
        sink = driver.propose([lane], [tokens[lane.consumed]], 3)
        drafts.append(sink.logits[0][0])
        row = candidate_row(tiny, lane.consumed, 8, emitted)
        verified = driver.verify([lane], [row], padded=1)
        logits.append(verified.output.logits[0, :emitted].clone())
        driver.commit(verified, [emitted])
    return torch.cat(logits), torch.stack(drafts)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_equal_oracle_and_each_other(tiny, size):
    results = run_ranks(size, lambda comm: script(tiny, comm))
    logits, drafts = results[0]
    assert largest_error(logits, tiny.oracle.logits[: len(logits)]) <= LOGITS_ATOL
    at = [100 + sum(EMITTED[:i]) - 1 for i in range(len(EMITTED))]
    assert largest_error(drafts, tiny.oracle.mtp_logits[at]) <= LOGITS_ATOL
    for other, more in results[1:]:
        assert torch.equal(other, logits)
        assert torch.equal(more, drafts)


def refuses_three_ranks(driver: RecipeDriver) -> None:
    """Neither model of a recipe whose heads are four is built for a rank of three."""

    class Three:
        rank, size = 0, 3

    options = BuildOptions(device="cpu", dtype="float32", prefill_tokens=8, max_width=8)
    for builder in (driver.recipe.target, driver.recipe.drafter):
        with pytest.raises(ConfigError, match=r"num_attention_heads 4.*tensor_parallel_size"):
            resolve(builder)(driver.geometry, None, Three(), options)


@pytest.mark.parametrize("name", ["wide", "qwen-fused"])
def test_a_degree_that_divides_nothing_is_refused_by_name(load_tiny, name):
    driver = load_tiny(name).driver
    refuses_three_ranks(driver)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        resolve(driver.recipe.state)(driver.geometry, 3)
