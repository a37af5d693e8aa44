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
# Steps that move P visibly at the sizes below: the mean over pairs has a smaller slope than the root of their sum.
STEPS = {False: 5.0, True: 0.2}
each_setting = pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))


def neurons_of(num_layers: int = 2) -> list[Tensor]:
    return [loops.linear(6 - index, 11, seed=index).weight.detach() for index in range(num_layers)]


def matrix_of(num_views: int = 1) -> Tensor:
    return torch.randn(num_views, 5, 11, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def objective_by_loop(matrix: Tensor, neurons: list[Tensor], target: str, root: bool) -> float:
    """Eq. 5 for one P, a mean over pairs and over the layers that share it; its root is a sum over both."""

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
        total += math.sqrt(math.fsum(terms)) if root else math.fsum(terms) / len(terms) / len(neurons)
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
        squares = (measures(projected) - measures(layer)).square()
        total = total + (squares.sum(dim=-1).sqrt() if settings["root"] else squares.mean(dim=-1) / len(neurons))
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
    step = STEPS[settings["root"]]
    projection = AnglePreserving(5, 2, step_size=step, **settings)
    (found,) = projection.advance((matrices,), neurons, ENERGY, torch.tensor(1.0))
    expected = independent_step(matrices.clone(), neurons, settings, step)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    assert (found - matrices).norm() > 1e-3


@each_setting
@pytest.mark.parametrize("num_unrolled", [1, 2])
def test_unrolled_energy_is_that_of_the_moved_matrix(settings: dict, num_unrolled: int) -> None:
    """E(W, P - eta dL/dP) and its derivative in W, through P's own step."""
    model = nn.Sequential(loops.linear(11, 11), loops.linear(5, 11, seed=1))
    step = STEPS[settings["root"]]
    projection = AnglePreserving(5, num_views=2, step_size=step, num_unrolled=num_unrolled, **settings)
    reg = comhe.Regularizer(model, projection)
    matrix = loops.basis(reg)[0].clone()
    weights = [layer.weight for layer in model]
    without_decay = {**settings, "weight_decay": 0.0}  # which belongs to the steps between rounds
    for _ in range(num_unrolled):
        matrix = independent_step(matrix, weights, without_decay, step)
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
    projection = AnglePreserving(3, step_size=STEPS[settings["root"]], **settings)
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
    projection = AnglePreserving(5, mode="alternating", advance_every=2, num_steps=3, step_size=5.0, **settings)
    reg = comhe.Regularizer(model, projection)
    start = loops.basis(reg)[0].clone()
    assert loops.agrees(reg(), loops.energy(loops.apply(loops.rows(start[0]), loops.rows(model.weight))))
    reg.advance()
    assert torch.equal(loops.basis(reg)[0], start)
    reg.advance()
    moved = start
    for _ in range(3):
        moved = independent_step(moved.detach().clone(), [model.weight.detach()], settings, 5.0)
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


LARGE = [pytest.param(*size, marks=pytest.mark.slow) for size in ((1024, 1024), (2048, 512), (4096, 64))]


@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("settings", [{}, {"target": "angle"}], ids=str)
@pytest.mark.parametrize(("num_neurons", "fan_in"), [(16, 64), (64, 288), (300, 100), *LARGE])
def test_default_step_lowers_the_objective(num_neurons: int, fan_in: int, settings: dict, shift: float) -> None:
    """Of a layer of any size, step after step from a fresh draw, for neurons that have a mean direction too."""
    assert falls(num_neurons, fan_in, shift, AnglePreserving(**settings))


def test_a_step_of_a_tenth_lowers_the_root() -> None:
    assert falls(64, 288, 0.0, AnglePreserving(root=True, step_size=0.1))


def falls(num_neurons: int, fan_in: int, shift: float, projection: AnglePreserving) -> bool:
    generator = torch.Generator().manual_seed(0)
    neurons = torch.randn(num_neurons, fan_in, generator=generator) + shift * torch.randn(fan_in, generator=generator)
    matrix = torch.randn(1, 30, fan_in, generator=generator)
    values = [projection.objective(matrix, [neurons]).item()]
    for _ in range(5):
        (matrix,) = projection.advance((matrix,), [neurons], ENERGY, torch.tensor(1.0))
        values.append(projection.objective(matrix, [neurons]).item())
    return all(later < earlier for earlier, later in pairwise(values))


def test_it_is_moved_and_not_redrawn() -> None:
    reg = comhe.Regularizer(loops.linear(64, 288), AnglePreserving())
    assert reg.plan.families[0].redraw_every == 1000


@pytest.mark.parametrize("root", [False, True])
def test_the_step_is_that_of_one_layer_when_all_are_alike(root: bool) -> None:
    """The mean over sets and layers: a step size serves any number of them. The root adds up over layers."""
    layer, matrix = neurons_of(1)[0], matrix_of()
    projection = AnglePreserving(5, root=root)
    alone = projection.gradient(matrix, [layer], ENERGY)
    for several, factor in (
        ([torch.stack([layer] * 3)], 1),
        ([layer] * 3, 3 if root else 1),
    ):
        torch.testing.assert_close(projection.gradient(matrix, several, ENERGY), factor * alone, rtol=1e-12, atol=0)
        once = projection.objective(matrix, [layer])
        torch.testing.assert_close(projection.objective(matrix, several), factor * once, rtol=1e-12, atol=0)


# Close neurons.


def cluster(antipodes: bool, dtype: torch.dtype) -> Tensor:
    """Eight neurons about 1e-3 apart, of different lengths, or every other one of them turned round."""
    generator = torch.Generator().manual_seed(3)
    center = torch.randn(1, 11, generator=generator, dtype=torch.float64)
    neurons = center + 7e-4 * torch.randn(8, 11, generator=generator, dtype=torch.float64)
    lengths = torch.linspace(1, 3, 8, dtype=torch.float64).unsqueeze(-1)
    signs = torch.tensor([1.0, -1.0] * 4 if antipodes else [1.0] * 8, dtype=torch.float64).unsqueeze(-1)
    return (signs * lengths * neurons).to(dtype)


def objective_from_differences(matrix: Tensor, neurons: Tensor, target: str) -> Tensor:
    """Eq. 5 without a cosine: from |u_i -+ u_j|^2, the smaller of the two."""
    i, j = torch.tensor([(i, j) for i in range(len(neurons)) for j in range(len(neurons)) if i != j]).unbind(-1)

    def chords(points: Tensor) -> tuple[Tensor, Tensor]:
        unit = points / points.norm(dim=-1, keepdim=True)
        return tuple((unit[..., i, :] - s * unit[..., j, :]).square().sum(dim=-1) for s in (1, -1))

    (near, far), (near_p, far_p) = chords(neurons), chords(torch.einsum("cki,ni->cnk", matrix, neurons))
    if target == "cosine":
        error = torch.where(near < far, near - near_p, far_p - far) / 2
    else:
        acute, acute_p = (
            2 * torch.atan2(torch.minimum(*x).sqrt(), torch.maximum(*x).sqrt()) for x in ((near, far), (near_p, far_p))
        )
        error = acute_p - acute  # pi less both, for opposites: the square is the same
    return error.square().mean(dim=-1)


@pytest.mark.parametrize("antipodes", [False, True])
@pytest.mark.parametrize("target", ["cosine", "angle"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cluster_keeps_its_digits(dtype: torch.dtype, target: str, antipodes: bool) -> None:
    """Cosines of pairs 1e-3 apart differ by 1e-7: taken from a product in float32 they would be noise."""
    neurons, matrix = cluster(antipodes, dtype), matrix_of(2).to(dtype)
    projection = AnglePreserving(5, target=target)
    wide = matrix.double().requires_grad_()
    expected = objective_from_differences(wide, neurons.double(), target)
    (slope,) = torch.autograd.grad(expected.sum(), wide)
    # A unit vector's rounding of 1e-16 is 1e-13 of a distance of 1e-3, a squared chord's in float32 6e-8 of it.
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    value = projection.objective(matrix, [neurons])
    torch.testing.assert_close(value.double(), expected.detach(), rtol=tolerance, atol=0)
    # Forces are good to 1e-13, and as neurons of a cluster share a direction, all but 1e-3 of their sum cancels.
    tolerance = 5e-10 if dtype == torch.float64 else 1e-5
    found = projection.gradient(matrix, [neurons], ENERGY)
    assert found.dtype == dtype
    assert (found.double() - slope).norm() < tolerance * slope.norm()


@pytest.mark.parametrize("antipodes", [False, True])
@pytest.mark.parametrize("target", ["cosine", "angle"])
def test_a_cluster_can_be_unrolled_through(target: str, antipodes: bool) -> None:
    """The moved matrix, and what the neurons feel of its move, in float32 as in float64."""
    neurons, matrix = cluster(antipodes, torch.float32), matrix_of().float()
    # Steps that move P by about a hundredth of itself: errors of cosines are 1e-7 here, those of angles 1e-3.
    projection = AnglePreserving(5, target=target, step_size=3e11 if target == "cosine" else 3e5)
    slopes = []
    for dtype in (torch.float32, torch.float64):
        leaf, start = neurons.to(dtype).requires_grad_(), matrix.to(dtype)
        (moved,) = projection.refine((start,), [leaf], ENERGY, torch.tensor(1.0))
        (slope,) = torch.autograd.grad(moved, leaf, torch.ones_like(moved))
        slopes.append((moved.detach().double(), slope.double()))
    (moved, slope), (expected, of_expected) = slopes
    assert (expected - matrix).norm() > 1e-3 * matrix.norm()
    assert (moved - expected).norm() < 1e-5 * (expected - matrix).norm()
    assert (slope - of_expected).norm() < 1e-5 * of_expected.norm()


@pytest.mark.parametrize("target", ["cosine", "angle"])
def test_duplicates_opposites_and_zero_neurons_stay_finite(target: str) -> None:
    for dtype in (torch.float32, torch.float64):
        neurons = neurons_of(1)[0].to(dtype)
        edges = torch.cat([neurons, neurons[:1], -2 * neurons[1:2], torch.zeros_like(neurons[:2])]).requires_grad_()
        projection, matrix = AnglePreserving(5, target=target), matrix_of().to(dtype)
        (moved,) = projection.refine((matrix,), [edges], ENERGY, torch.tensor(1.0))
        (slope,) = torch.autograd.grad(moved.sum(), edges)
        assert moved.isfinite().all()
        assert slope.isfinite().all()
        assert not slope[-2:].any()


def test_bad_settings_are_refused() -> None:
    for settings, message in (
        ({"mode": "both"}, "mode='both': choose 'alternating' or 'unrolled'"),
        ({"target": "sine"}, "target='sine': choose 'cosine' or 'angle'"),
        ({"step_size": 0.0}, "step_size=0.0: choose a positive number"),
        ({"step_size": math.nan}, "step_size=nan: choose a positive number"),
        ({"step_size": math.inf}, "step_size=inf: choose a positive number"),
        ({"weight_decay": -1e-3}, "weight_decay=-0.001: choose 0 or a small positive number"),
        ({"weight_decay": math.nan}, "weight_decay=nan: choose 0 or a small positive number"),
    ):
        with pytest.raises(ValueError, match=message):
            AnglePreserving(**settings)
    assert dataclasses.replace(AnglePreserving(), step_size=None).uses_lr
