"""A projection trained with the network by the gradient of the energy itself."""

from __future__ import annotations

import statistics

import loops
import pytest
import torch

import comhe
from comhe.projections import Gaussian, Learned


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_views", [1, 3])
def test_equals_the_loop(num_views: int, dtype: torch.dtype) -> None:
    model = loops.linear(6, 11, dtype)
    reg = comhe.Regularizer(model, Learned(5, num_views))
    (matrices,) = loops.basis(reg)
    neurons = loops.rows(model.weight)
    each = [loops.energy(loops.apply(loops.rows(matrix), neurons)) for matrix in matrices]
    assert loops.agrees(reg(), statistics.fmean(each))


def test_bases_are_parameters_that_start_as_a_gaussian_projection() -> None:
    model = loops.linear(6, 11)
    reg = comhe.Regularizer(model, Learned(5))
    (basis,) = reg.parameters()
    assert basis.requires_grad
    other = comhe.Regularizer(model, Gaussian(5, 1))
    assert torch.equal(basis, loops.basis(other)[0])
    assert not list(other.parameters())


def test_trained_bases_lower_the_energy_by_themselves() -> None:
    """Of neurons that stay: the projection learns to spread them, the paper's negative result."""
    model = loops.linear(12, 20)
    reg = comhe.Regularizer(model, Learned(5))
    weights = model.weight.detach().clone()
    optimizer = torch.optim.SGD(reg.parameters(), lr=10.0)
    values = []
    for _ in range(20):
        optimizer.zero_grad()
        values.append(reg())
        values[-1].backward()
        optimizer.step()
        reg.advance()
    assert values[-1] < 0.9 * values[0]
    assert torch.equal(model.weight, weights)


def test_bases_are_redrawn_only_on_request() -> None:
    model = loops.linear(6, 11)
    kept, redrawn = comhe.Regularizer(model, Learned(5)), comhe.Regularizer(model, Learned(5), redraw_every=2)
    start = loops.basis(kept)[0].clone()
    for round_ in range(1, 5):
        kept.advance()
        redrawn.advance()
        assert torch.equal(loops.basis(kept)[0], start)
        assert torch.equal(loops.basis(redrawn)[0], start) is (round_ < 2)
    assert redrawn.round == 4
