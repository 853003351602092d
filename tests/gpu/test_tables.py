"""Tables in page-locked host memory, read by captured programs (contract: M8)."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.layers.tables import Fp8Rows, HostRows
from flare_ray.device.ops.row_gather.api import RowGather, StoredRows
from flare_ray.device.pinned import host_rows
from flare_ray.errors import ContractViolation
from tests.gpu.kernels import replayed

pytestmark = pytest.mark.gpu

ROWS, WIDTH, GROUP = 5000, 160, 32
CUDA = torch.device("cuda")


def locked(values: torch.Tensor) -> torch.Tensor:
    return host_rows(*values.shape, dtype=values.dtype, device=CUDA).copy_(values)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
def test_plain_rows_are_the_stored_ones(kept, given):
    values = torch.randn(ROWS, WIDTH).to(kept)
    numbers = torch.randint(0, ROWS, (96,), device=CUDA)
    gather = RowGather(StoredRows([locked(values)]), dtype=given, device=CUDA)
    got = gather(numbers)
    assert torch.equal(got.cpu(), values[numbers.cpu()].to(given))
    assert torch.equal(replayed(lambda: gather(numbers)), got)


def test_packed_rows_equal_those_on_the_device():
    values = torch.randn(ROWS, WIDTH).to(torch.float8_e4m3fn)
    exponents = torch.randint(110, 140, (ROWS, WIDTH // GROUP), dtype=torch.uint8)
    numbers = torch.randint(0, ROWS, (96,), device=CUDA)
    stored = StoredRows([locked(values)], [locked(exponents)])
    there = HostRows(RowGather(stored, dtype=torch.bfloat16, device=CUDA))
    here = Fp8Rows(values.cuda(), exponents.cuda(), 1.0, torch.bfloat16)
    assert torch.equal(there.take(numbers), here.take(numbers))


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
def test_packed_rows_with_one_scale_equal_those_on_the_device(given):
    values = torch.randn(ROWS, WIDTH).to(torch.float8_e4m3fn)
    numbers = torch.randint(0, ROWS, (96,), device=CUDA)
    there = RowGather(StoredRows([locked(values)], scale=0.0371), dtype=given, device=CUDA)
    here = Fp8Rows(values.cuda(), None, 0.0371, given)
    assert torch.equal(there(numbers), here.take(numbers))


def test_captured_programs_read_the_numbers_of_each_replay():
    values = torch.randn(ROWS, WIDTH)
    gather = RowGather(StoredRows([locked(values)]), dtype=torch.float32, device=CUDA)
    numbers = torch.zeros(16, dtype=torch.int64, device=CUDA)
    gather(numbers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gather(numbers)
    for seed in range(3):
        torch.manual_seed(seed)
        numbers.copy_(torch.randint(0, ROWS, (16,)))
        graph.replay()
        assert torch.equal(got.cpu(), values[numbers.cpu()])


def test_memory_that_is_not_locked_is_refused():
    with pytest.raises(ContractViolation, match="page-locked"):
        RowGather(StoredRows([torch.zeros(4, 8)]), dtype=torch.float32, device=CUDA)
