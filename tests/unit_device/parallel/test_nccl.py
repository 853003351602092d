"""The NCCL group on two GPUs: equal bits, sums as on the CPU for two ranks, graph replay."""

import io
import multiprocessing

import pytest
import torch

from tests.unit_device.parallel.workers import CASES_OF_SUMS, contribution, run_nccl_worker

RANKS = 2
LIMIT_S = 120

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def seen(free_port):
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} CUDA devices; torch sees {torch.cuda.device_count()}")
    context = multiprocessing.get_context("spawn")
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    workers = [
        context.Process(target=run_nccl_worker, args=(rank, RANKS, port, pipes[rank][1]))
        for rank in range(RANKS)
    ]
    for worker in workers:
        worker.start()
    for _, sender in pipes:
        sender.close()
    try:
        assert all(receiver.poll(LIMIT_S) for receiver, _ in pipes)
        yield [torch.load(io.BytesIO(receiver.recv_bytes())) for receiver, _ in pipes]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def test_both_ranks_hold_bit_identical_results(seen):
    for mine, other in zip(seen[0]["eager"], seen[1]["eager"], strict=True):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1], other[1])


def test_sum_of_two_and_concatenation_equal_the_cpu(seen):
    """Addition of two values has one order, so NCCL and the CPU agree to the bit."""
    for (shape, dtype), (total, joined) in zip(CASES_OF_SUMS, seen[0]["eager"][:-1], strict=True):
        first, second = (contribution(rank, shape, dtype) for rank in range(RANKS))
        assert torch.equal(total, first + second)
        assert torch.equal(joined, torch.cat([first, second], -1))


def test_captured_collectives_replay_with_new_inputs(seen):
    for rank in range(RANKS):
        total, joined = seen[rank]["replayed"]
        assert total.tolist() == [30.0] * 4
        assert joined.tolist() == [10.0] * 4 + [20.0] * 4
