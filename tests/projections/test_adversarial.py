"""Eq. 7: P ascends the energy that the neurons descend; unrolled, the energy is that of P + eta dE/dP."""

from __future__ import annotations

from itertools import pairwise

import loops
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

import comhe
from comhe.energies import Energy
from comhe.projections import Adversarial

HALF = Energy(half_space=True)


def independent_energy(points: Tensor, half_space: bool) -> Tensor:
    """The mean of 1/d^2 over ordered pairs from textbook operations, [..., N, K] -> [...]."""
    unit = nn.functional.normalize(points, dim=-1)
    if half_space:
        unit = torch.cat([unit, -unit], dim=-2)
    count = unit.shape[-2]
    i, j = torch.tensor([(i, j) for i in range(count) for j in range(count) if i != j]).unbind(-1)
    return (unit[..., i, :] - unit[..., j, :]).square().sum(dim=-1).reciprocal().mean(dim=-1)


def project(matrix: Tensor, neurons: Tensor) -> Tensor:
    return torch.einsum("cki,ni->cnk", matrix, neurons)


def ascended(matrix: Tensor, neurons: list[Tensor], step: float, half_space: bool, decay: float = 0.0) -> Tensor:
    matrix = matrix.requires_grad_() if matrix.is_leaf else matrix
    total = sum(independent_energy(project(matrix, layer), half_space).sum() for layer in neurons)
    total = total - decay / 2 * matrix.square().sum()
    (slope,) = torch.autograd.grad(total, matrix, create_graph=True)
    return matrix + step * slope


@pytest.mark.parametrize("ascend_full_space", [False, True])
@pytest.mark.parametrize("num_unrolled", [1, 2])
def test_unrolled_energy_is_that_of_the_ascended_matrix(num_unrolled: int, ascend_full_space: bool) -> None:
    """E(W, P + eta dE/dP) and its derivative in W, through P's own step; P may ascend the full-space energy."""
    model = nn.Sequential(loops.linear(11, 11), loops.linear(5, 11, seed=1))
    # Weight decay belongs to the steps between rounds.
    settings = {"ascend_full_space": ascend_full_space, "weight_decay": 0.05, "num_unrolled": num_unrolled}
    projection = Adversarial(5, num_views=2, step_size=0.3, **settings)
    reg = comhe.Regularizer(model, projection)
    matrix = loops.basis(reg)[0].clone()
    weights = [layer.weight for layer in model]
    for _ in range(num_unrolled):
        matrix = ascended(matrix, weights, 0.3, not ascend_full_space)
    expected = sum(
        loops.energy(loops.apply(loops.rows(view), loops.rows(weight))) / len(matrix)
        for weight in weights
        for view in matrix
    )
    assert loops.agrees(reg(), expected)
    wanted = torch.autograd.grad(sum(independent_energy(project(matrix, w), True).mean() for w in weights), weights)
    for mine, other in zip(torch.autograd.grad(reg(), weights), wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("ascend_full_space", [False, True])
def test_advance_ascends_so_many_steps(ascend_full_space: bool, decay: float) -> None:
    neurons = [loops.linear(6, 11).weight.detach(), loops.linear(5, 11, seed=1).weight.detach()]
    settings = {"ascend_full_space": ascend_full_space, "weight_decay": decay, "num_steps": 3}
    projection = Adversarial(5, num_views=2, step_size=0.3, **settings)
    start = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    (found,) = projection.advance((start,), neurons, HALF, torch.tensor(1.0))
    expected = start.clone()
    for _ in range(3):
        expected = ascended(expected.detach().clone(), neurons, 0.3, not ascend_full_space, decay)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-11, atol=1e-12)


def test_unrolled_gradient_passes_gradcheck() -> None:
    projection = Adversarial(3, step_size=0.3)
    neurons = loops.linear(4, 5).weight.detach().requires_grad_()
    matrix = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64).requires_grad_()

    def value(neurons: Tensor, matrix: Tensor) -> Tensor:
        basis = projection.refine((matrix,), [neurons], HALF, torch.tensor(1.0))
        return HALF(projection.views(neurons, basis)[0])

    assert gradcheck(value, (neurons, matrix), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("half_space", [False, True])
def test_ascent_raises_the_energy(half_space: bool) -> None:
    """By the squared length of the gradient, to first order; and every default step at an ordinary size."""
    energy = Energy(half_space=half_space)
    neurons = loops.linear(64, 288).weight.detach()
    start = torch.randn(1, 30, 288, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def value(matrix: Tensor) -> Tensor:
        return energy(project(matrix, neurons))[0]

    small = Adversarial(step_size=1e-2).advance((start,), [neurons], energy, torch.tensor(1.0))[0]
    slope = (small - start) / 1e-2
    torch.testing.assert_close(value(small) - value(start), 1e-2 * slope.square().sum(), rtol=1e-2, atol=0)
    matrix, values = start, [value(start)]
    for _ in range(5):
        (matrix,) = Adversarial().advance((matrix,), [neurons], energy, torch.tensor(1.0))
        values.append(value(matrix))
    assert all(later > earlier for earlier, later in pairwise(values))


def test_unrolled_loss_is_above_that_of_the_drawn_matrix() -> None:
    model = loops.linear(64, 288)
    fixed = comhe.Regularizer(model, Adversarial(mode="alternating"))
    unrolled = comhe.Regularizer(model, Adversarial())
    assert torch.equal(loops.basis(fixed)[0], loops.basis(unrolled)[0])
    assert unrolled() > fixed()
