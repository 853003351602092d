"""Orthogonalised momentum: size and direction of updates, stacked matrices, convergence."""

import pytest
import torch
from torch import nn

from benchmarks.demo_training.muon import UPDATE_RMS, HiddenMatrix, Muon, orthogonalised

SINGULAR_VALUES = (0.6, 1.3)
"""Five iterations of this polynomial leave singular values in this range."""


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 16, 64)])
def test_orthogonalised_keeps_directions_and_levels_their_sizes(shape):
    torch.manual_seed(1)
    matrices = torch.randn(shape) * 1e-3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    kept = left.transpose(1, 2) @ orthogonalised(matrices) @ right.transpose(1, 2)
    values = torch.linalg.svdvals(orthogonalised(matrices))
    assert values.min() > SINGULAR_VALUES[0] and values.max() < SINGULAR_VALUES[1]
    torch.testing.assert_close(
        kept, torch.diag_embed(kept.diagonal(dim1=1, dim2=2)), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("shape", [(32, 64), (64, 32), (4, 16, 32)])
def test_update_has_the_size_of_adams(shape):
    torch.manual_seed(2)
    parameter = nn.Parameter(torch.zeros(shape))
    count = shape[0] if len(shape) == 3 else 1
    optimizer = Muon([HiddenMatrix(parameter, count)], 0.01)
    parameter.grad = torch.randn(shape)
    optimizer.step()
    rms = parameter.detach().pow(2).mean().sqrt().item()
    assert rms == pytest.approx(0.01 * UPDATE_RMS, rel=0.25)
    assert (parameter.detach() * parameter.grad).sum() < 0


def test_stacked_matrices_are_updated_as_each_would_be_alone():
    torch.manual_seed(3)
    weights, gradients = torch.randn(4 * 16, 32), torch.randn(4 * 16, 32)

    def updated(parts):
        out = []
        for weight, gradient in parts:
            parameter = nn.Parameter(weight.clone())
            optimizer = Muon([HiddenMatrix(parameter, len(weight) // 16)], 0.1, weight_decay=0.1)
            parameter.grad = gradient
            optimizer.step()
            out.append(parameter.detach())
        return torch.cat(out)

    together = updated([(weights, gradients)])
    alone = updated(zip(weights.split(16), gradients.split(16), strict=True))
    torch.testing.assert_close(together, alone)


def test_converges_on_a_badly_scaled_quadratic():
    torch.manual_seed(4)
    wanted, scale = torch.randn(16, 24), torch.logspace(0, -3, 24)
    parameter = nn.Parameter(torch.zeros(16, 24))
    optimizer = Muon([HiddenMatrix(parameter)], 0.0)
    losses = []
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.2 * (1 - step / 300)
        parameter.grad = (parameter.detach() - wanted) * scale
        optimizer.step()
        losses.append((parameter.detach() - wanted).norm().item())
    assert losses[-1] < 0.2 * losses[0]
