"""Locked host memory: pages of its own, let go with its last view."""

import gc
import mmap

import torch

from flare_ray.device.pinned import host_rows


class Runtime:
    """Stands for the CUDA runtime; notes what is locked."""

    def __init__(self) -> None:
        self.locked: set[int] = set()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == 0
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.locked.remove(address)


def test_locked_memory_is_let_go_with_its_last_view(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    made = host_rows(50, 7, dtype=torch.bfloat16, device=torch.device("cuda"))
    view = made.fill_(3.0)[3:4]
    del made
    gc.collect()
    assert len(runtime.locked) == 1 and bool((view == 3).all())
    del view
    gc.collect()
    assert not runtime.locked
