"""Eq. 5: P descends the squared differences of angles or cosines; unrolled, the energy is that of P - eta dL/dP."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import loops
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

import comhe
from comhe.energies import Energy
from comhe.projections import AnglePreserving

ENERGY = Energy(half_space=True)
SETTINGS = [
    {"target": target, "root": root, "weight_decay": decay}
    for target in ("cosine", "angle")
    for root in (False, True)
    for decay in (0.0, 0.05)
]
each_setting = pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))


def neurons_of(num_layers: int = 2) -> list[Tensor]:
    return [loops.linear(6 - index, 11, seed=index).weight.detach() for index in range(num_layers)]


def matrix_of(num_views: int = 1) -> Tensor:
    return torch.randn(num_views, 5, 11, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def objective_by_loop(matrix: Tensor, neurons: list[Tensor], target: str, root: bool) -> float:
    """Eq. 5 for one P, summed over the layers that share it."""

    def cosine(a: list[float], b: list[float]) -> float:
        return math.fsum(x * y for x, y in zip(loops.unit(a), loops.unit(b), strict=True))

    total = 0.0
    for layer in neurons:
        points = loops.rows(layer)
        projected = loops.apply(loops.rows(matrix), points)
        terms = []
        for i in range(len(points)):
            for j in range(len(points)):
                if i != j:
                    wanted, found = cosine(points[i], points[j]), cosine(projected[i], projected[j])
                    if target == "angle":
                        wanted, found = math.acos(wanted), math.acos(found)
                    terms.append((wanted - found) ** 2)
        total += math.sqrt(math.fsum(terms)) if root else math.fsum(terms)
    return total


def independent_objective(matrix: Tensor, neurons: list[Tensor], settings: dict) -> Tensor:
    """The same from textbook operations, for autograd: [C, dim, fan_in] -> [C], the weight decay included."""

    def measures(points: Tensor) -> Tensor:
        count = points.shape[-2]
        i, j = torch.tensor([(i, j) for i in range(count) for j in range(count) if i != j]).unbind(-1)
        cosines = torch.cosine_similarity(points[..., i, :], points[..., j, :], dim=-1)
        return cosines if settings["target"] == "cosine" else torch.acos(cosines)

    total = settings["weight_decay"] / 2 * matrix.square().sum(dim=(-2, -1))
    for layer in neurons:
        projected = torch.einsum("cki,ni->cnk", matrix, layer)
        squares = (measures(projected) - measures(layer)).square().sum(dim=-1)
        total = total + (squares.sqrt() if settings["root"] else squares)
    return total


def independent_step(matrix: Tensor, neurons: list[Tensor], settings: dict, step: float) -> Tensor:
    wanted = matrix.requires_grad_() if matrix.is_leaf else matrix
    (slope,) = torch.autograd.grad(independent_objective(wanted, neurons, settings).sum(), wanted, create_graph=True)
    return matrix - step * slope


@each_setting
def test_objective_is_eq_5(settings: dict) -> None:
    matrices, neurons = matrix_of(2), neurons_of()
    projection = AnglePreserving(5, 2, **settings)
    for value, matrix in zip(projection.objective(matrices, neurons), matrices, strict=True):
        assert loops.agrees(value, objective_by_loop(matrix, neurons, settings["target"], settings["root"]))
    narrow = projection.objective(matrices.float(), [layer.float() for layer in neurons])
    exact = projection.objective(matrices.float().double(), [layer.float().double() for layer in neurons])
    assert all(loops.agrees(value, other.item()) for value, other in zip(narrow, exact, strict=True))


@each_setting
def test_step_is_the_gradient_of_the_objective(settings: dict) -> None:
    matrices, neurons = matrix_of(2), neurons_of()
    projection = AnglePreserving(5, 2, step_size=0.2, **settings)
    (found,) = projection.advance((matrices,), neurons, ENERGY, torch.tensor(1.0))
    expected = independent_step(matrices.clone(), neurons, settings, 0.2)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    assert (found - matrices).norm() > 1e-3


@each_setting
@pytest.mark.parametrize("num_unrolled", [1, 2])
def test_unrolled_energy_is_that_of_the_moved_matrix(settings: dict, num_unrolled: int) -> None:
    """E(W, P - eta dL/dP) and its derivative in W, through P's own step."""
    model = nn.Sequential(loops.linear(11, 11), loops.linear(5, 11, seed=1))
    projection = AnglePreserving(5, num_views=2, step_size=0.2, num_unrolled=num_unrolled, **settings)
    reg = comhe.Regularizer(model, projection)
    matrix = loops.basis(reg)[0].clone()
    weights = [layer.weight for layer in model]
    without_decay = {**settings, "weight_decay": 0.0}  # which belongs to the steps between rounds
    for _ in range(num_unrolled):
        matrix = independent_step(matrix, weights, without_decay, 0.2)
    expected = sum(
        loops.energy(loops.apply(loops.rows(view), loops.rows(weight))) / len(matrix)
        for weight in weights
        for view in matrix
    )
    assert loops.agrees(reg(), expected)
    moved = sum(ENERGY(torch.einsum("cki,ni->cnk", matrix, weight)).mean() for weight in weights)
    wanted = torch.autograd.grad(moved, weights)
    for mine, other in zip(torch.autograd.grad(reg(), weights), wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


@each_setting
def test_unrolled_gradient_passes_gradcheck(settings: dict) -> None:
    projection = AnglePreserving(3, step_size=0.2, **settings)
    neurons = loops.linear(4, 5).weight.detach().requires_grad_()
    matrix = matrix_of()[:, :3, :5].clone().requires_grad_()

    def value(neurons: Tensor, matrix: Tensor) -> Tensor:
        basis = projection.refine((matrix,), [neurons], ENERGY, torch.tensor(1.0))
        return ENERGY(projection.views(neurons, basis)[0])

    assert gradcheck(value, (neurons, matrix), atol=1e-7, rtol=1e-6)


def test_alternating_takes_no_derivative_of_the_step() -> None:
    """The loss is the energy under P as it is; P moves between rounds, `num_steps` at a time."""
    model = loops.linear(6, 11)
    settings = {"target": "cosine", "root": False, "weight_decay": 0.0}
    projection = AnglePreserving(5, mode="alternating", advance_every=2, num_steps=3, step_size=0.2, **settings)
    reg = comhe.Regularizer(model, projection)
    start = loops.basis(reg)[0].clone()
    assert loops.agrees(reg(), loops.energy(loops.apply(loops.rows(start[0]), loops.rows(model.weight))))
    reg.advance()
    assert torch.equal(loops.basis(reg)[0], start)
    reg.advance()
    moved = start
    for _ in range(3):
        moved = independent_step(moved.detach().clone(), [model.weight.detach()], settings, 0.2)
    torch.testing.assert_close(loops.basis(reg)[0], moved.detach(), rtol=1e-11, atol=1e-12)


def test_learning_rate_is_the_step_size_when_none_is_given() -> None:
    model = loops.linear(6, 11)
    fixed = comhe.Regularizer(model, AnglePreserving(5, step_size=0.07))
    following = comhe.Regularizer(model, AnglePreserving(5, step_size=None), lr=0.07)
    assert torch.equal(fixed(), following())
    fixed.advance()
    following.advance()
    assert torch.equal(fixed(), following())
    following.set_lr(0.2)
    assert not torch.equal(fixed(), following())
    with pytest.raises(ValueError, match="learning rate"):
        comhe.Regularizer(model, AnglePreserving(5, step_size=None))()


@pytest.mark.parametrize("settings", [{}, {"target": "angle"}, {"root": True}], ids=str)
def test_default_step_lowers_the_objective(settings: dict) -> None:
    """Of a layer of ordinary size, step after step, from a fresh draw."""
    model = loops.linear(64, 288)
    projection = AnglePreserving(**settings)
    reg = comhe.Regularizer(model, projection)
    values = []
    for _ in range(6):
        values.append(projection.objective(loops.basis(reg)[0], [model.weight.detach()]).item())
        reg.advance()
    assert all(later < earlier for earlier, later in pairwise(values))
    # Moved only, not redrawn: the period is a thousand.
    assert reg.plan.families[0].redraw_every == 1000


def test_bad_settings_are_refused() -> None:
    for settings, message in (
        ({"mode": "both"}, "mode='both': choose 'alternating' or 'unrolled'"),
        ({"target": "sine"}, "target='sine': choose 'cosine' or 'angle'"),
        ({"step_size": 0.0}, "step_size=0.0: choose a positive number"),
        ({"step_size": math.nan}, "step_size=nan: choose a positive number"),
    ):
        with pytest.raises(ValueError, match=message):
            AnglePreserving(**settings)
    assert dataclasses.replace(AnglePreserving(), step_size=None).uses_lr
