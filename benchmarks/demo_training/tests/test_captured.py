"""Captured training steps do what eager ones do."""

import pytest
import torch
from torch import Tensor, nn

from benchmarks.demo_training.captured import EAGER_CALLS, Captured

STEPS = EAGER_CALLS + 4
TOLERANCE = 1e-5


def trained(device: torch.device, *, captured: bool) -> tuple[list[float], Tensor]:
    """Losses of some steps on inputs of two shapes, and the weights after them."""
    torch.manual_seed(2)
    layer = nn.Linear(4, 3).to(device)
    grads = [torch.zeros_like(p) for p in layer.parameters()]
    for parameter, grad in zip(layer.parameters(), grads, strict=True):
        parameter.grad = grad
    rate = torch.tensor(0.1, device=device)

    def gradients(x: Tensor) -> tuple[Tensor, ...]:
        torch._foreach_zero_(grads)
        loss = layer(x).square().mean()
        loss.backward()
        return (loss.detach(),)

    def update() -> tuple[Tensor, ...]:
        with torch.no_grad():
            for p, grad in zip(layer.parameters(), grads, strict=True):
                p.sub_(grad * rate)
        return ()

    plain = torch.device("cpu")  # called every time
    steps = [Captured(f, device if captured else plain) for f in (gradients, update)]
    losses = []
    for number in range(2 * STEPS):
        x = torch.randn(5 + number % 2, 4).to(device)
        rate.fill_(0.1 / (1 + number))
        (loss,) = steps[0](x)
        steps[1]()
        losses.append(loss.item())
    return losses, layer.weight.detach().cpu()


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
def test_captured_steps_train_as_eager_ones_do(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    losses, weights = trained(torch.device(device), captured=True)
    expected, same = trained(torch.device(device), captured=False)
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    assert losses[-1] < losses[0]
    assert torch.allclose(weights, same, atol=TOLERANCE)
