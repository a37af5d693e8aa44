"""Squared chords against exact arithmetic, duplicates, two maps that are each other's derivative, and their cost."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from comhe import pairs
from comhe.energies import Energy
from comhe.pairs import Pairs, sphere


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def cluster(apart: float, dim: int, count: int = 6) -> Tensor:
    """Neurons of different lengths, `apart` from each other or from each other's antipode."""
    center = normal(1, dim)
    aside = normal(count, dim, seed=1)
    factors = torch.tensor([1.0, -2.0, 3.0, -0.7, 1.3, 5.0], dtype=torch.float64)[:count].unsqueeze(-1)
    return factors * (center + apart * math.sqrt(0.5) * center.norm() * aside / aside.norm(dim=-1, keepdim=True))


def found_of(points: Tensor, dtype: torch.dtype) -> tuple[Tensor, Pairs]:
    unit, lacking = sphere(points)
    return unit, pairs.pairs(unit, lacking, dtype)


def exact_chord(a: list[float], b: list[float]) -> float:
    """The squared chord to the nearer of b and -b, of vectors as they are, without any rounding but the last."""
    exact_a, exact_b = ([Fraction(x) for x in v] for v in (a, b))
    return float(min(sum((x - s * y) ** 2 for x, y in zip(exact_a, exact_b, strict=True)) for s in (1, -1)))


def largest_error(unit: Tensor, found: Pairs) -> float:
    rows = unit.tolist()
    errors = [
        abs(float(found.nearest[i, j]) / exact_chord(rows[i], rows[j]) - 1)
        for i, j in itertools.combinations(range(len(rows)), 2)
    ]
    return max(errors)


# Squared chords.


@pytest.mark.parametrize("dim", [5, 64, 2304])
@pytest.mark.parametrize("apart", [1.0, 0.3, 1e-1, 1e-2, 1e-3, 1e-5, 1e-7])
def test_float64_from_two_products(apart: float, dim: int) -> None:
    """One rounding of the result, and those of sums of D terms no larger than 2^-26."""
    unit, found = found_of(cluster(apart, dim), torch.float64)
    error = largest_error(unit, found)
    assert error <= 1e-14 + 2.0**-26 * 2.0**-52 * math.sqrt(dim) / float(found.nearest.min())
    assert error < 1e-13 or apart < 1e-3


@pytest.mark.parametrize("dim", [5, 64, 2304])
@pytest.mark.parametrize("apart", [0.2, 1e-1, 1e-2, 1e-3, 1e-4])
def test_float32_from_a_product_in_float64(apart: float, dim: int) -> None:
    """The result's rounding and, of the product's, a few 1e-16 of 1: 1e-9 at a distance of 1e-3."""
    unit, found = found_of(cluster(apart, dim).float(), torch.float32)
    assert found.nearest.dtype == torch.float32
    assert bool(found.close)
    assert largest_error(unit, found) <= 2.0**-24 + 2.0**-52 * math.sqrt(dim) / float(found.nearest.min())


@pytest.mark.parametrize("dim", [5, 64, 576])
def test_without_float64_a_product_in_two_parts_serves_too(dim: int) -> None:
    """As on Apple's MPS, where unit vectors are held in float32: no more is lost than they have lost themselves."""
    unit, lacking = (part.float() for part in sphere(cluster(1e-3, dim)))
    found = pairs.pairs(unit, lacking, torch.float32)
    assert largest_error(unit, found) < 2e-4
    one_product = 2 - 2 * (unit @ unit.mT).abs()
    assert largest_error(unit, found._replace(nearest=one_product)) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_close_takes_one_product_of_the_results_type(dtype: torch.dtype) -> None:
    points = normal(40, 30, dtype=dtype)
    unit, found = found_of(points, dtype)
    assert not bool(found.close)
    assert largest_error(unit[:8], Pairs(found.nearest[:8, :8], *found[1:])) < 30 * torch.finfo(dtype).eps


def test_no_seam_where_pairs_begin_to_be_close() -> None:
    """On either side of |cos| = 0.95 the ways of computing a distance agree."""
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-14)):
        for cosine in (pairs.CLOSE_COSINE - 1e-6, pairs.CLOSE_COSINE + 1e-6):
            for sign in (1, -1):
                points = torch.tensor([[1.0, 0.0], [sign * cosine, math.sqrt(1 - cosine**2)]], dtype=torch.float64)
                unit, found = found_of(points.to(dtype), dtype)
                assert bool(found.close) is (cosine > pairs.CLOSE_COSINE)
                assert largest_error(unit, found) < tolerance
                assert found.side[0, 1] == sign


def test_a_close_pair_in_one_set_leaves_the_others_as_they_are() -> None:
    points = normal(3, 20, 10, dtype=torch.float32)
    before = found_of(points, torch.float32)[1].nearest
    points[1, 4] = -2 * points[1, 7] + 1e-3
    after = found_of(points, torch.float32)[1].nearest
    torch.testing.assert_close(after[[0, 2]], before[[0, 2]], rtol=1e-5, atol=0)


# Duplicates.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 2), (37, 5), (5, 60, 30), (100, 2304), (10, 25088)], ids=str)
def test_duplicates_and_opposites_are_not_apart(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rounding alone must not part them: the slope there is huge, and its direction would be noise."""
    points = normal(*shape[:-2], 1, shape[-1], dtype=dtype).expand(shape).clone()
    points[..., 1, :] *= -2  # a power of two: the direction is that of the others to the last bit
    for half_space in (False, True):
        _, found = found_of(points, dtype)
        others = ~torch.eye(shape[-2], dtype=torch.bool)
        assert not found.nearest[..., others].any()
        assert not found.apart.any()
        assert (found.side[..., 0, 1:] == torch.tensor([-1] + [1] * (shape[-2] - 2))).all()
        # Full space keeps the pull of those opposite, which is zero too, but for rounding of numbers below 1.
        gradient = Energy(half_space=half_space).gradient(points)
        assert gradient.abs().max() < 1e-6
        assert not half_space or not gradient.any()


@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_duplicates_do_not_drown_the_pull_of_the_others(dtype: torch.dtype, half_space: bool) -> None:
    """A slope of 1e16, in float64 of 1e32, times a rounding error would."""
    points = normal(30, 100, dtype=dtype)
    energy = Energy(half_space=half_space, reduction="sum")
    once, without, twice = (energy.gradient(each) for each in (points, points[1:], torch.cat([points, points[:1]])))
    # The twins feel the others as one neuron does, and the others feel it twice.
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(twice[[0, 30]], once[[0, 0]], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(twice[1:30], 2 * once[1:] - without, rtol=tolerance, atol=tolerance)


def test_what_is_not_finite_is_passed_on() -> None:
    points = normal(4, 6, dtype=torch.float32)
    points[2, 1] = math.nan
    points[3] = points[0]
    _, found = found_of(points, torch.float32)
    assert found.nearest[2, [0, 1, 3]].isnan().all()
    assert found.nearest[[0, 1, 3], 2].isnan().all()


# The two maps.


def maps_of(close: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    unit, _ = sphere(torch.cat([normal(2, 5, 4), cluster(1e-3, 4).expand(2, -1, -1)], dim=-2))
    weights, other = normal(2, 11, 11, seed=2).to(dtype), normal(2, 11, 4, seed=3)
    _, side, _ = pairs._nearest(unit, dtype)
    return unit, other, weights, side, torch.tensor(close)


def differences(u: Tensor, v: Tensor, side: Tensor) -> Tensor:
    """pair_products by its definition."""
    sign = side.unsqueeze(-1)
    return ((u.unsqueeze(-2) - sign * u.unsqueeze(-3)) * (v.unsqueeze(-2) - sign * v.unsqueeze(-3))).sum(dim=-1)


@pytest.mark.parametrize(
    ("close", "dtype", "tolerance"),
    [(True, torch.float64, 1e-12), (True, torch.float32, 1e-6), (False, torch.float32, 1e-4)],
)
def test_maps_are_their_definitions_and_adjoint(close: bool, dtype: torch.dtype, tolerance: float) -> None:
    unit, other, weights, side, flag = maps_of(close, dtype)
    found = pairs._pair_products(unit, other, side, flag, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), differences(unit, other, side), rtol=tolerance, atol=tolerance)
    pulled = pairs._laplacian(weights, unit, side, flag)
    assert pulled.dtype == torch.float64
    paired, with_other = (weights.double() * differences(unit, other, side)).sum(), (other * pulled).sum()
    torch.testing.assert_close(paired, with_other, rtol=10 * tolerance, atol=10 * tolerance)


def test_derivatives_of_every_order() -> None:
    unit, other, weights, side, flag = maps_of(True, torch.float64)
    inputs = tuple(t[:1, :4].clone().requires_grad_() for t in (unit, other))
    weights, side = weights[:1, :4, :4].clone().requires_grad_(), side[:1, :4, :4]
    dtype = torch.float64
    for function, arguments in (
        (lambda u, v: pairs._pair_products(u, v, side, flag, dtype), inputs),
        (lambda w, u: pairs._laplacian(w, u, side, flag), (weights, inputs[0])),
    ):
        assert torch.autograd.gradcheck(function, arguments)
        assert torch.autograd.gradgradcheck(function, arguments)


# Cost.


def numbers_read(points: Tensor, dtype: torch.dtype) -> int:
    """By all operations of a value and its gradient, those inside the library's own included."""
    leaf = points.clone().requires_grad_()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        value = Energy(half_space=True)(leaf, dtype).sum()
        torch.autograd.grad(value, leaf)
    shapes = [shape for event in record.events() for shape in event.input_shapes]
    return sum(math.prod(shape) for shape in shapes if shape and all(isinstance(size, int) for size in shape))


@pytest.mark.parametrize("shape", [(96, 300), (3, 64, 30)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_collapsed_layer_costs_little_more_than_a_random_one(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The product is taken again, wider or in two parts; differences of all pairs would read N^2 D numbers."""
    ordinary = normal(*shape, dtype=dtype)
    collapsed = normal(*shape[:-2], 1, shape[-1], dtype=dtype, seed=1) + 0.1 * ordinary
    assert numbers_read(ordinary, dtype) > 10 * ordinary.numel()
    assert numbers_read(collapsed, dtype) < 2 * numbers_read(ordinary, dtype)
