"""Several ranks: one plan log gives equal records everywhere, and a rank that differs is noticed
(contract: S6)."""

import numpy as np
import pytest
import torch

from flare_ray.contracts.record import RECORD_FIELDS, Field, RoundReply
from flare_ray.device.parallel.groups import run_ranks
from flare_ray.device.speculation.record import stamp_checksums
from flare_ray.device.state.layout import KEYS
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Sampling, Setup, scripted_rank

SCRIPT = Script(vocab_size=16, order=2, seed=8, draft_noise=0.8)
SETUP = Setup(slots=3, context_tokens=256)


def recorded() -> Driver:
    """One rank's run, whose plans can be replayed."""
    driver = Driver(scripted_rank(SCRIPT, SETUP))
    opened = [
        driver.open((1, 2, slot), slot, budget=60, sampling=Sampling(1.0, 0, 0.95, seed=slot))
        for slot in range(3)
    ]
    requests = driver.prefill(opened, chunk=2)
    for width in (1, 4, 8, 3, 8):
        driver.round(requests, width)
    return driver


def replay(log, comm, *, spoil: bool = False) -> list[RoundReply]:
    rank = scripted_rank(SCRIPT, SETUP, comm)
    replies = []
    for count, (plan, masks) in enumerate(log):
        if spoil and comm.rank == comm.size - 1 and count == 3:
            with torch.inference_mode():
                rank.store.request.core[1, KEYS] += 1  # other random keys, on this rank only
        replies.append(rank.execute(plan, masks))
    rank.check_integrity()
    return replies


@pytest.mark.parametrize("size", [1, 2, 4])
def test_plan_log_replayed_on_any_degree_gives_the_same_records(size):
    driver = recorded()
    alone = [reply for (reply,) in driver.replies]
    ranks = run_ranks(size, lambda comm: replay(driver.log, comm))
    assert [reply.rows for reply in ranks[0]] == [reply.rows for reply in alone]
    for number, replies in enumerate(ranks):
        assert [reply.checksum for reply in replies] == [reply.checksum for reply in alone]
        assert all(reply.rank == number for reply in replies)
        assert all(bool(reply.rows) == (number == 0) for reply in replies)


def test_rank_with_another_random_key_is_noticed_by_its_checksum():
    driver = recorded()
    replies = run_ranks(2, lambda comm: replay(driver.log, comm, spoil=True))
    first, second = ([reply.checksum for reply in of_rank] for of_rank in replies)
    assert first[:3] == second[:3]
    assert first[3:] != second[3:]


@pytest.mark.parametrize("field", [Field.UID, Field.CONSUMED, Field.ACCEPTED, 16, 23])
def test_checksum_changes_with_every_field_and_with_the_order_of_lanes(field):
    rows = np.arange(3 * RECORD_FIELDS, dtype=np.int64).reshape(3, -1)
    before = stamp_checksums(rows)
    changed = rows.copy()
    changed[1, field] += 1
    assert stamp_checksums(changed) != before
    assert stamp_checksums(rows[::-1].copy()) != before
    assert stamp_checksums(rows) == before
