"""What tests of operators on random values share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def inference(random_seed: int) -> Iterator[None]:
    """Random values of the test's own seed, without gradients."""
    torch.manual_seed(random_seed)
    with torch.inference_mode():
        yield
