"""Rounding of the demo's weights while it trains, captured: the eager one's values, and back."""

import pytest
import torch

from benchmarks.demo_training.network import DemoModel
from benchmarks.demo_training.shape import text_config
from benchmarks.demo_training.storage import StoredView, round_in_place

pytestmark = pytest.mark.gpu


def test_captured_rounding_is_the_eager_one():
    model = DemoModel(text_config()).cuda()
    names = [name for name, _ in model.named_parameters()]
    view = StoredView(model, names)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)  # other values than those of the capture
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with view.seen():
        seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    round_in_place(model, names)
    assert all(torch.equal(p, seen[name]) for name, p in model.named_parameters())
