"""The guard of the unit tests: it must really refuse, or the promise of the folder is empty."""

import pytest

from tests.unit.conftest import REFUSED_RAY


def test_ray_init_is_refused():
    import ray

    with pytest.raises(RuntimeError, match=REFUSED_RAY):
        ray.init()


def test_remote_call_is_refused_because_it_would_start_ray():
    import ray

    with pytest.raises(RuntimeError, match=REFUSED_RAY):
        ray.remote(lambda: 1).remote()


def test_cuda_device_is_refused():
    import torch

    assert not torch.cuda.is_available()
    # AssertionError is torch's own answer on a build without CUDA.
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
        torch.zeros(1, device="cuda")
