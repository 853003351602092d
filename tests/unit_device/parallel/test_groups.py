"""Ranks as threads: equal bits, failures that reach everyone, no hanging."""

import threading
import time

import pytest
import torch

from flare_ray.device.parallel.groups import SingleGroup, local_groups, run_ranks
from flare_ray.errors import ContractViolation, RankFailure
from tests.unit_device.parallel.workers import CASES_OF_SUMS, collect, contribution

TIMEOUT_S = 0.5
PATIENCE_S = 5.0
"""A thread that has not ended by then hangs."""


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_all_ranks_hold_bit_identical_sums_in_rank_order(size):
    ranks = run_ranks(size, collect)
    for other in ranks[1:]:
        for (total, joined), (total2, joined2) in zip(ranks[0], other, strict=True):
            assert torch.equal(total, total2)
            assert torch.equal(joined, joined2)
    for (shape, dtype), (total, joined) in zip(CASES_OF_SUMS, ranks[0][:-1], strict=True):
        values = [contribution(rank, shape, dtype) for rank in range(size)]
        expected = values[0]
        for value in values[1:]:
            expected = expected + value
        assert torch.equal(total, expected)
        assert torch.equal(joined, torch.cat(values, -1))


def test_results_come_in_rank_order():
    assert run_ranks(4, lambda comm: (comm.rank, comm.size)) == [(r, 4) for r in range(4)]


def test_buffers_overwritten_after_a_collective_do_not_reach_slower_ranks():
    """Every rank reuses one buffer at once; a shared view would make late readers see the next."""

    def reuse(comm):
        buffer = torch.empty(2048)
        seen = []
        for step in range(200):
            buffer.fill_(step * 10 + comm.rank)
            total = comm.all_reduce(buffer)
            buffer.fill_(-1e9)
            if comm.rank == step % comm.size:
                time.sleep(0.0002)
            seen.append((float(total[0]), float(total[-1])))
        return seen

    for seen in run_ranks(3, reuse):
        assert seen == [(step * 30 + 3.0, step * 30 + 3.0) for step in range(200)]


def test_sum_is_the_callers_own():
    def change(comm):
        total = comm.all_reduce(torch.ones(4))
        total += comm.rank
        return total[0].item(), comm.all_reduce(torch.ones(4))[0].item()

    assert run_ranks(2, change) == [(2.0, 2.0), (3.0, 2.0)]


def test_failing_rank_breaks_the_others_out_and_its_error_is_raised():
    broken = []

    def work(comm):
        comm.all_reduce(torch.ones(1))
        if comm.rank == 1:
            raise ZeroDivisionError("rank 1's own error")
        try:
            comm.all_reduce(torch.ones(1))
        except RankFailure as error:
            broken.append((comm.rank, error.rank, str(error)))
            raise

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="rank 1's own error"):
        run_ranks(3, work, timeout_s=60)
    assert time.monotonic() - start < PATIENCE_S
    assert sorted(rank for rank, _, _ in broken) == [0, 2]
    assert all(blamed == 1 and "ZeroDivisionError" in text for _, blamed, text in broken)


def test_missing_rank_is_blamed_after_the_timeout():
    def work(comm):
        if comm.rank != 2:
            comm.all_gather(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"ranks \[2\] .* did not reach collective 1") as caught:
        run_ranks(3, work, timeout_s=TIMEOUT_S)
    assert caught.value.rank == 2
    assert TIMEOUT_S <= time.monotonic() - start < PATIENCE_S


def test_two_missing_ranks_leave_none_to_blame():
    def work(comm):
        if comm.rank == 0:
            comm.all_reduce(torch.ones(1))

    with pytest.raises(RankFailure) as caught:
        run_ranks(3, work, timeout_s=TIMEOUT_S)
    assert caught.value.rank == -1


def test_failure_is_sticky():
    groups = local_groups(2, timeout_s=TIMEOUT_S)
    groups[1].fail(ValueError("broken"))
    for _ in range(2):
        with pytest.raises(RankFailure, match="ValueError: broken"):
            groups[0].all_reduce(torch.ones(1))
    with pytest.raises(RankFailure, match="ValueError: broken"):
        groups[1].all_reduce(torch.ones(1))


def test_rank_that_leaves_is_named_to_those_who_still_expect_it():
    groups = local_groups(2, timeout_s=60)
    failures = []

    def wait():
        try:
            groups[0].all_reduce(torch.ones(1))
        except RankFailure as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    groups[1].close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert failures[0].rank == 1
    assert "has left the group" in str(failures[0])


@pytest.mark.parametrize(
    "calls",
    [
        (("all_reduce", torch.ones(2)), ("all_gather", torch.ones(2))),
        (("all_reduce", torch.ones(2)), ("all_reduce", torch.ones(3))),
        (("all_reduce", torch.ones(2)), ("all_reduce", torch.ones(2, dtype=torch.bfloat16))),
    ],
)
def test_ranks_that_disagree_about_a_collective_are_told(calls):
    def work(comm):
        name, value = calls[comm.rank]
        return getattr(comm, name)(value)

    with pytest.raises(ContractViolation, match="disagree about collective 1"):
        run_ranks(2, work, timeout_s=TIMEOUT_S)


def test_tensor_of_another_device_is_refused():
    group = local_groups(1)[0]
    with pytest.raises(ContractViolation, match="meta"):
        group.all_reduce(torch.ones(1, device="meta"))


def test_empty_group_is_refused():
    with pytest.raises(ContractViolation, match="got 0"):
        local_groups(0)


def test_single_group_hands_back_its_input():
    value = torch.ones(3)
    assert SingleGroup().all_reduce(value) is value
    assert SingleGroup().all_gather(value) is value


def test_inference_tensors_pass_between_threads():
    def work(comm):
        with torch.inference_mode():
            return comm.all_reduce(torch.ones(3) * (comm.rank + 1)).clone()

    assert all(total.tolist() == [3.0] * 3 for total in run_ranks(2, work))
