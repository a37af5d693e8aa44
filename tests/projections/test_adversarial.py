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


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_several_sets_are_ascended_as_the_rule_adds_them_up(reduction: str) -> None:
    """P's step is along the derivative of the rule's own value: the mean over groups of a convolution, or their sum."""
    model = nn.Conv2d(12, 8, 3, groups=2, bias=False).double()
    projection = Adversarial(5, num_views=2, step_size=0.3)
    neurons = model.weight.detach().view(2, 4, 54)
    matrix = torch.randn(2, 5, 54, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    rule = comhe.Rule(projection=projection, reduction=reduction)
    wide = matrix.clone().requires_grad_()
    # Over views the rule takes the mean, each of which has a matrix of its own that ascends by itself.
    total = 2 * rule.value(projection.views(neurons, (wide,))[0], torch.float64)
    (slope,) = torch.autograd.grad(total, wide)
    found = projection.gradient(matrix, [neurons], rule.energy)
    torch.testing.assert_close(-found, slope, rtol=1e-11, atol=0)


@pytest.mark.parametrize("ascend_full_space", [False, True])
def test_close_neurons_keep_their_slope_in_float32(ascend_full_space: bool) -> None:
    """G' W of a pair 1e-3 apart is a difference of two large numbers: in float32 it lost three digits and more."""
    neurons = loops.linear(8, 11, torch.float32).weight.detach()
    aside = torch.randn(2, 11, generator=torch.Generator().manual_seed(1))
    neurons[1] = 2 * neurons[0] + 1e-3 * neurons[0].norm() * aside[0]
    neurons[3] = -3 * neurons[2] + 1e-3 * neurons[2].norm() * aside[1]
    matrix = torch.randn(1, 5, 11, generator=torch.Generator().manual_seed(4))
    projection = Adversarial(5, ascend_full_space=ascend_full_space)
    found = projection.gradient(matrix, [neurons], HALF)
    expected = projection.gradient(matrix.double(), [neurons.double()], HALF)
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_of_the_weights_does_not_matter_in_float32(scale: float) -> None:
    """The slope at the projected points is 1 / scale, its product with the weights is not."""
    neurons = loops.linear(8, 11, torch.float32).weight.detach()
    matrix = torch.randn(1, 5, 11, generator=torch.Generator().manual_seed(4))
    expected = Adversarial(5).gradient(matrix, [neurons], HALF)
    found = Adversarial(5).gradient(matrix, [scale * neurons], HALF)
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_neurons_keep_up_with_the_default_step() -> None:
    """By turns, at a rate of 0.1: the loss does not run away as it does where P moves faster."""

    def largest(step_size: float) -> float:
        projection, rate = Adversarial(step_size=step_size), torch.tensor(0.1)
        generator = torch.Generator().manual_seed(2)
        weights = 0.06 * (torch.randn(64, 288, generator=generator) + 0.5 * torch.randn(288, generator=generator))
        basis, values = (torch.randn(1, 30, 288, generator=generator),), []
        for _ in range(60):
            basis = projection.advance(basis, [weights], HALF, rate)
            leaf = weights.clone().requires_grad_()
            (view,) = projection.views(leaf, projection.refine(basis, [leaf], HALF, rate))
            values.append(HALF(view).mean())
            weights = weights - 0.1 * torch.autograd.grad(values[-1], leaf)[0]
        return max(value.item() / values[0].item() for value in values)

    assert largest(Adversarial().step_size) < 1.02
    assert largest(100.0) > 2
