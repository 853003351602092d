"""The gloo group with real processes: equal bits, clean ends, death and hanging bounded in time."""

import io
import multiprocessing
import socket

import pytest
import torch

from flare_ray.device.parallel.distributed import Rendezvous, connect
from flare_ray.device.parallel.groups import SingleGroup
from flare_ray.errors import ConfigError, RankFailure
from tests.unit_device.parallel.workers import (
    CASES_OF_SUMS,
    HANG_TIMEOUT_S,
    HOST,
    KILL_TIMEOUT_S,
    RANKS,
    SLEEPER,
    VICTIM,
    Ports,
    contribution,
    run_worker,
)

START_LIMIT_S = 90
"""Importing torch in four processes on a loaded two-core machine."""


@pytest.fixture(scope="module")
def seen(free_port):
    """What every rank saw in every scenario; None for the rank that was killed."""
    context = multiprocessing.get_context("spawn")
    ports = Ports(*(free_port() for _ in range(5)))
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    workers = [
        context.Process(target=run_worker, args=(rank, ports, pipes[rank][1]), daemon=True)
        for rank in range(RANKS)
    ]
    for worker in workers:
        worker.start()
    for _, sender in pipes:
        sender.close()
    try:
        yield [_receive(receiver) for receiver, _ in pipes]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _receive(receiver):
    if not receiver.poll(START_LIMIT_S):
        return "no answer"
    try:
        return torch.load(io.BytesIO(receiver.recv_bytes()))
    except EOFError:
        return None


def groups_of(seen):
    return [
        *[(name, [seen[0][name], seen[1][name]]) for name in ("pair", "pair_again")],
        ("four", [seen[r]["four"] for r in range(RANKS) if r != VICTIM]),
    ]


def test_every_survivor_reports_and_the_victim_does_not(seen):
    assert seen[VICTIM] is None
    assert all(isinstance(seen[r], dict) for r in range(RANKS) if r != VICTIM), seen


def test_all_ranks_hold_bit_identical_results(seen):
    for name, ranks in groups_of(seen):
        for other in ranks[1:]:
            for (total, joined), (total2, joined2) in zip(ranks[0], other, strict=True):
                assert torch.equal(total, total2), name
                assert torch.equal(joined, joined2), name


@pytest.mark.parametrize(("name", "size"), [("pair", 2), ("pair_again", 2), ("four", RANKS)])
def test_sums_are_in_rank_order_and_gathers_join_the_last_dimension(seen, name, size):
    for (shape, dtype), (total, joined) in zip(CASES_OF_SUMS, seen[0][name][:-1], strict=True):
        values = [contribution(rank, shape, dtype) for rank in range(size)]
        expected = values[0]
        for value in values[1:]:
            expected = expected + value
        assert torch.equal(total, expected)
        assert torch.equal(joined, torch.cat(values, -1))


def test_order_of_the_sum_would_show_in_these_values():
    values = [contribution(rank, (3, 8), torch.float32) for rank in range(RANKS)]
    forwards = values[0] + values[1] + values[2] + values[3]
    backwards = values[3] + values[2] + values[1] + values[0]
    assert not torch.equal(forwards, backwards)


def test_strided_input_is_exchanged_as_it_looks(seen):
    values = [contribution(rank, (4, 6), torch.float32).T for rank in range(RANKS)]
    total, joined = seen[0]["four"][-1]
    assert torch.equal(total, values[0] + values[1] + values[2] + values[3])
    assert torch.equal(joined, torch.cat(values, -1))


def test_killed_rank_fails_every_survivor_long_before_the_timeout(seen):
    for rank in range(RANKS):
        if rank != VICTIM:
            outcome = seen[rank]["killed"]
            assert outcome["raised"], outcome
            assert outcome["elapsed_s"] < KILL_TIMEOUT_S / 3, outcome
            assert f"rank {rank} of {RANKS}" in outcome["text"]
            assert outcome["sticky"]


def test_hung_rank_fails_the_others_within_the_timeout(seen):
    for rank in [r for r in range(RANKS) if r not in (VICTIM, SLEEPER)]:
        outcome = seen[rank]["hung"]
        assert outcome["raised"], outcome
        assert outcome["elapsed_s"] < 4 * HANG_TIMEOUT_S, outcome


def test_rank_that_hung_fails_when_it_comes_back(seen):
    outcome = seen[SLEEPER]["hung"]
    assert outcome["raised"], outcome
    assert outcome["sticky"]


def test_peers_that_never_come_give_a_failure_naming_the_address(free_port):
    port = free_port()
    with pytest.raises(RankFailure, match=f"rank 0 of 2 at {HOST}:{port} failed in joining"):
        connect(Rendezvous(HOST, port, 0, 2, join_timeout_s=0.5), device="cpu")


def test_absent_rank_zero_gives_a_failure(free_port):
    with pytest.raises(RankFailure, match="rank 1 of 2"):
        connect(Rendezvous(HOST, free_port(), 1, 2, join_timeout_s=0.5), device="cpu")


def test_taken_port_gives_a_failure_naming_it():
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RankFailure, match=str(port)):
            connect(Rendezvous(HOST, port, 0, 2, join_timeout_s=0.5), device="cpu")


def test_group_of_one_needs_no_rendezvous():
    group = connect(Rendezvous(HOST, 1, 0, 1), device="cpu")
    assert isinstance(group, SingleGroup)
    value = torch.ones(3)
    assert group.all_reduce(value) is value
    assert group.all_gather(value) is value


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_rank_outside_its_group_is_refused(rank, size):
    with pytest.raises(ConfigError, match="not in a group"):
        connect(Rendezvous(HOST, 1, rank, size), device="cpu")


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_device_without_collectives_is_refused(device):
    with pytest.raises(ConfigError, match=device):
        connect(Rendezvous(HOST, 1, 0, 2), device=device)
