"""Unit tests decide about host code: none of them may start Ray or touch a GPU."""

import sys
from typing import NoReturn

import pytest

REFUSED_RAY = "a unit test may not start Ray: test the plain class, or mark it ray in tests/actors"
REFUSED_CUDA = "a unit test may not use CUDA: mark it gpu and put it in tests/gpu or tests/ops"


def _refuse_ray(*_args: object, **_kwargs: object) -> NoReturn:
    raise RuntimeError(REFUSED_RAY)


def _refuse_cuda(*_args: object, **_kwargs: object) -> NoReturn:
    raise RuntimeError(REFUSED_CUDA)


@pytest.fixture(autouse=True)
def forbid_ray_and_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``ray.init`` raise and hide every CUDA device for the duration of one test.

    Ray is imported here so that a test that imports it later finds the refusal too (a remote call
    starts Ray through the same ``ray.init``). Torch is not: hidden devices cover a late import.
    """
    import ray

    monkeypatch.setattr(ray, "init", _refuse_ray)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch = sys.modules.get("torch")
    if torch is not None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "_lazy_init", _refuse_cuda)
