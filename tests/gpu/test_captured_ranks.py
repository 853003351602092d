"""Two captured ranks over NCCL: equal records, the texts of one rank, and ends that hold nobody
(contract: S6, A1, A4)."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch

from flare_ray.contracts.record import unpack_rows
from tests.gpu.captured import rank_of
from tests.gpu.rank_worker import Work, recorded, run_rank
from tests.support.mixed_rounds import GREEDY, play
from tests.support.scripted.harness import Driver
from tests.support.served_glm import served_glm

RANKS = 2
LIMIT_S = 150
FREED_LIMIT_S = 10.0
"""Contract A4."""
SLACK_BYTES = 64 << 20

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """(folder, plans, rows) of one captured rank."""
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} CUDA devices; torch sees {torch.cuda.device_count()}")
    folder = served_glm(tmp_path_factory.mktemp("micro") / "glm")
    driver = Driver(rank_of(folder))
    log = recorded(driver)
    play(driver, (1, 2, 4, 6), ((GREEDY,) * 4,))
    return folder, log, [reply.rows for (reply,) in driver.replies]


def start(work: Work):
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    workers = [
        context.Process(target=run_rank, args=(rank, work, pipes[rank][1])) for rank in range(RANKS)
    ]
    for worker in workers:
        worker.start()
    for _, sender in pipes:
        sender.close()
    return workers, [receiver for receiver, _ in pipes]


def end(workers) -> None:
    for worker in workers:
        worker.kill()
        worker.join()


def test_two_ranks_agree_and_say_what_one_says(log, free_port):
    folder, plans, rows = log
    workers, receivers = start(Work(folder, RANKS, free_port(), plans))
    try:
        assert all(receiver.poll(LIMIT_S) for receiver in receivers)
        first, second = (receiver.recv() for receiver in receivers)
    finally:
        end(workers)
    assert first[0] == second[0]
    tokens = [[record.tokens for record in unpack_rows(r)] for r in first[1]]
    assert tokens == [[record.tokens for record in unpack_rows(r)] for r in rows]


def test_survivor_of_a_killed_rank_is_killed_and_its_memory_is_free(log, free_port):
    folder, plans, _ = log
    before = [torch.cuda.mem_get_info(rank)[0] for rank in range(RANKS)]
    workers, receivers = start(Work(folder, RANKS, free_port(), plans, endless=True))
    try:
        assert all(receiver.poll(LIMIT_S) and receiver.recv() for receiver in receivers)
        workers[1].kill()
        time.sleep(1.0)
        started = time.monotonic()
        workers[0].kill()
        workers[0].join(FREED_LIMIT_S)
        assert not workers[0].is_alive()
    finally:
        end(workers)
    missing = SLACK_BYTES + 1
    while missing > SLACK_BYTES and time.monotonic() - started < FREED_LIMIT_S:
        missing = max(b - torch.cuda.mem_get_info(r)[0] for r, b in enumerate(before))
        time.sleep(0.1)
    assert missing <= SLACK_BYTES
