"""The energy against loops from the paper, close pairs, derivatives, invariances, closed forms and edges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import comhe
from comhe import pairs
from comhe.energies import Energy, energy

Point = list[float]

EXPONENTS = [0, 0.5, 1, 2, 3.7, 7, 10]
SPACES = [False, True]
DISTANCES = ["chord", "angle"]
REDUCTIONS = ["mean", "sum"]
SETTINGS = [
    {"s": s, "half_space": half, "distance": distance}
    for s, half, distance in itertools.product(EXPONENTS, SPACES, DISTANCES)
]


def label(setting: dict) -> str:
    return f"s={setting['s']}-{'half' if setting['half_space'] else 'full'}-{setting['distance']}"


every_setting = pytest.mark.parametrize("setting", SETTINGS, ids=label)
# What the others share no code with: a logarithm, the exponent written out, a power; both spaces and distances.
some_settings = pytest.mark.parametrize(
    "setting", [setting for setting in SETTINGS if setting["s"] in (0, 2, 3.7)], ids=label
)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def value_and_gradient(points: Tensor, s: float = 2, **setting: object) -> tuple[Tensor, Tensor]:
    leaf = points.detach().clone().requires_grad_()
    value = energy(leaf, s, **setting)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


@pytest.fixture
def _any_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        backend.fp32_precision = "none"


# Loops from the paper: Eq. 1 over the directions of the neurons, and in half space over them and their opposites.


def on_sphere(w: Point) -> Point:
    norm = math.sqrt(math.fsum(x * x for x in w))
    return [x / norm for x in w]


def chord(a: Point, b: Point) -> float:
    return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def angle(a: Point, b: Point) -> float:
    """Kahan's form of arccos(a . b), good to the last digits at 0 and pi too."""
    return 2 * math.atan2(chord(a, b), chord(a, [-y for y in b]))


def loop(
    neurons: list[Point], s: float, half_space: bool, distance: str, reduction: str = "sum"
) -> tuple[float, float]:
    """The energy, and the same sum of absolute values: what rounding is relative to where logarithms cancel."""
    points = [on_sphere(w) for w in neurons]
    if half_space:
        points += [[-x for x in w] for w in points]
    terms = []
    for i in range(len(points)):
        for j in range(len(points)):
            if j != i:
                z = chord(points[i], points[j]) if distance == "chord" else angle(points[i], points[j])
                terms.append(z**-s if s > 0 else math.log(1 / z))
    count = len(points) * (len(points) - 1) if reduction == "mean" else 1
    return math.fsum(terms) / count, math.fsum(map(abs, terms)) / count


def assert_is_loop(value: Tensor, points: Tensor, tolerance: float, **setting: object) -> None:
    expected, size = loop(points.tolist(), **setting)
    assert abs(value.item() - expected) <= tolerance * size


@every_setting
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_value_is_the_papers(setting: dict, reduction: str) -> None:
    points = normal(2, 3, 7, 4)
    value = energy(points, **setting, reduction=reduction)
    assert value.shape == (2, 3)
    assert value.dtype == torch.float64
    for index in itertools.product(range(2), range(3)):
        assert_is_loop(value[index], points[index], 1e-12, **setting, reduction=reduction)

    points = points.float()
    value = energy(points, **setting, reduction=reduction)
    assert value.dtype == torch.float32
    for index in itertools.product(range(2), range(3)):
        assert_is_loop(value[index], points[index], 1e-5, **setting, reduction=reduction)


def test_the_angle_of_the_loop_is_arccos() -> None:
    for a, b in itertools.combinations(normal(6, 4).tolist(), 2):
        a, b = on_sphere(a), on_sphere(b)
        assert angle(a, b) == pytest.approx(math.acos(math.fsum(map(float.__mul__, a, b))), rel=1e-14)


def test_defaults_are_s_2_full_space_chord_mean() -> None:
    points = normal(6, 4)
    assert_is_loop(energy(points), points, 1e-12, s=2, half_space=False, distance="chord", reduction="mean")
    assert Energy() == Energy(2.0, False, "chord", "mean", 0.0)
    assert torch.equal(
        Energy(1, True, "angle", "sum")(points), energy(points, 1, half_space=True, distance="angle", reduction="sum")
    )


@some_settings
def test_many_dimensions(setting: dict) -> None:
    points = normal(5, 4608, dtype=torch.float32)
    assert_is_loop(energy(points, **setting, reduction="sum"), points, 1e-6, **setting)


# Close pairs.


def close_pairs(apart: float, dtype: torch.dtype) -> Tensor:
    """Four neurons, each but the first with a partner about `apart` away, beside it or opposite, and longer."""
    base = normal(4, 5)
    base = base / base.norm(dim=-1, keepdim=True)
    aside = normal(4, 5, seed=1)
    aside = aside - (aside * base).sum(-1, keepdim=True) * base
    partner = base + apart * aside / aside.norm(dim=-1, keepdim=True)
    factors = torch.tensor([2.0, 3.0, -2.0, -3.0], dtype=torch.float64).unsqueeze(-1)
    return torch.cat([base, factors * partner])[[0, 7, 2, 5, 4, 3, 6, 1]].to(dtype)


def test_the_close_pairs_are_close() -> None:
    for apart in (1e-1, 1e-3):
        points = [on_sphere(w) for w in close_pairs(apart, torch.float32).tolist()]
        nearest = [min(chord(p, q) for q in points if q is not p) for p in points]
        opposite = [min(chord(p, [-x for x in q]) for q in points) for p in points]
        assert sum(abs(d - apart) < 0.01 * apart for d in nearest) == 4
        assert sum(abs(d - apart) < 0.01 * apart for d in opposite) == 4


@every_setting
@pytest.mark.parametrize("apart", [0.5, 0.3, 0.1, 1e-2, 1e-3])
def test_close_pairs(setting: dict, apart: float) -> None:
    points = close_pairs(apart, torch.float32)
    assert_is_loop(energy(points, **setting, reduction="sum"), points, 1e-5, **setting)
    # In float64 the unit vectors' own rounding, 1e-16 of a distance of `apart`, is what there is.
    points = close_pairs(apart, torch.float64)
    assert_is_loop(
        energy(points, **setting, reduction="sum"), points, max(1e-12, 1e-15 * setting["s"] / apart), **setting
    )


@every_setting
@pytest.mark.parametrize("apart", [0.5, 0.3, 0.1, 1e-2, 1e-3])
def test_gradient_of_close_pairs_in_float32(setting: dict, apart: float) -> None:
    points = close_pairs(apart, torch.float32)
    _, gradient = value_and_gradient(points, **setting)
    _, expected = value_and_gradient(points.double(), **setting)
    for closed in (gradient, Energy(**setting).gradient(points)):
        error = (closed.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() <= 1e-5


def test_no_seam_where_pairs_begin_to_be_close() -> None:
    """On either side of |cos| = 0.95 the ways of computing a distance agree."""
    for cosine in (pairs.CLOSE_COSINE - 1e-6, pairs.CLOSE_COSINE + 1e-6):
        for sign in (1, -1):
            points = torch.tensor([[1.0, 0.0], [sign * cosine, math.sqrt(1 - cosine**2)]])
            for setting in SETTINGS:
                # A cosine to two roundings is a squared chord of 0.1 to 2.4e-6, and an energy to s / 2 of that.
                tolerance = 2e-6 * max(1, setting["s"] / 2)
                assert_is_loop(energy(points, **setting, reduction="sum"), points, tolerance, **setting)


# Derivatives.


@every_setting
def test_gradient(setting: dict) -> None:
    points = normal(5, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: energy(p, **setting), points)
    if setting["s"] in (0, 2, 3.7):
        assert torch.autograd.gradgradcheck(lambda p: energy(p, **setting), points)


@some_settings
def test_gradient_of_batches_and_eps(setting: dict) -> None:
    points = normal(2, 3, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: energy(p, **setting, reduction="sum"), points)
    assert torch.autograd.gradcheck(lambda p: energy(p, **setting, norm_eps=0.3), points)
    assert torch.autograd.gradgradcheck(lambda p: energy(p, **setting, norm_eps=0.3), points)


@some_settings
@pytest.mark.parametrize("apart", [0.1, 0.01])
def test_gradient_of_close_pairs(setting: dict, apart: float) -> None:
    # One pair beside each other, one opposite; scaled to a value of about 1, moved by far less than the distance.
    points = close_pairs(apart, torch.float64)[[0, 1, 4, 5]].requires_grad_()
    scale = apart ** setting["s"]
    assert torch.autograd.gradcheck(lambda p: scale * energy(p, **setting), points, eps=1e-5 * apart, atol=1e-4)
    if apart == 0.1:
        assert torch.autograd.gradgradcheck(lambda p: scale * energy(p, **setting), points, eps=1e-5 * apart, atol=1e-3)


@every_setting
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("norm_eps", [0.0, 1e-4, 0.5])
def test_closed_gradient_is_that_of_autograd(setting: dict, reduction: str, norm_eps: float) -> None:
    setting = {**setting, "reduction": reduction, "norm_eps": norm_eps}
    points = torch.cat([normal(2, 6, 4), close_pairs(1e-2, torch.float64)[:, :4].expand(2, -1, -1)], dim=-2)
    points[0, 3] = 0
    _, expected = value_and_gradient(points, **setting)
    found = Energy(**setting).gradient(points)
    assert found.dtype == torch.float64
    error = (found - expected).norm(dim=-1)
    assert (error <= 1e-11 * expected.norm(dim=-1)).all()
    assert not found[0, 3].any()

    low = points.to(torch.bfloat16)
    found = Energy(**setting).gradient(low)
    assert found.dtype == torch.float32
    assert torch.equal(found, Energy(**setting).gradient(low.float()))


@some_settings
@pytest.mark.parametrize("norm_eps", [0.0, 0.5])
def test_closed_gradient_can_be_differentiated(setting: dict, norm_eps: float) -> None:
    function = Energy(**setting, norm_eps=norm_eps)
    points = close_pairs(0.1, torch.float64)[1:].requires_grad_()
    weights = normal(*points.shape, seed=2)
    (first,) = torch.autograd.grad(function(points), points, create_graph=True)
    (expected,) = torch.autograd.grad(first, points, weights)
    (found,) = torch.autograd.grad(function.gradient(points), points, weights)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


def test_descent_parts_close_neurons() -> None:
    """The sign: a step against the gradient lowers the energy and raises the smallest angle."""
    for setting in SETTINGS:
        points = close_pairs(1e-1, torch.float64)[1:]
        before, gradient = value_and_gradient(points, **setting)
        step = 1e-2 * gradient / gradient.norm()
        assert energy(points - step, **setting) < before
        # Pairs beside each other part; in half space those opposite each other too.
        assert smallest_angle(points - step, setting["half_space"]) > smallest_angle(points, setting["half_space"])


def smallest_angle(points: Tensor, half_space: bool) -> float:
    rows = points.tolist()
    rows += [[-x for x in w] for w in rows] if half_space else []
    return min(angle(on_sphere(a), on_sphere(b)) for a, b in itertools.combinations(rows, 2))


# Invariances.


@every_setting
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_half_space_is_full_space_with_the_opposites(setting: dict, reduction: str) -> None:
    if not setting["half_space"]:
        setting = {**setting, "half_space": True}
    for points in (normal(3, 6, 4), close_pairs(1e-3, torch.float64)):
        doubled = torch.cat([points, -points], dim=-2)
        value, gradient = value_and_gradient(points, **setting, reduction=reduction)
        expected, of_both = value_and_gradient(doubled, **{**setting, "half_space": False}, reduction=reduction)
        count = points.shape[-2]
        assert torch.allclose(value, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, of_both[..., :count, :] - of_both[..., count:, :], rtol=1e-8, atol=1e-10)


@every_setting
def test_invariant_to_rotation_and_permutation(setting: dict) -> None:
    points = normal(7, 5)
    value, gradient = value_and_gradient(points, **setting)
    rotation, _ = torch.linalg.qr(normal(5, 5, seed=3))
    rotated, of_rotated = value_and_gradient(points @ rotation, **setting)
    assert rotated.item() == pytest.approx(value.item(), rel=1e-12, abs=1e-13)
    torch.testing.assert_close(of_rotated, gradient @ rotation, rtol=1e-10, atol=1e-12)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    permuted, of_permuted = value_and_gradient(points[order], **setting)
    assert permuted.item() == pytest.approx(value.item(), rel=1e-13, abs=1e-14)
    torch.testing.assert_close(of_permuted, gradient[order], rtol=1e-11, atol=1e-13)


@every_setting
def test_half_space_is_invariant_to_sign(setting: dict) -> None:
    points = torch.cat([normal(4, 5), close_pairs(1e-2, torch.float64)])
    signs = torch.tensor([1.0, -1.0] * 3 + [-1.0] * 3 + [1.0] * 3, dtype=torch.float64).unsqueeze(-1)
    value, gradient = value_and_gradient(points, **setting)
    flipped, of_flipped = value_and_gradient(signs * points, **setting)
    if setting["half_space"]:
        assert flipped.item() == pytest.approx(value.item(), rel=1e-13)
        torch.testing.assert_close(signs * of_flipped, gradient, rtol=1e-11, atol=1e-12)
    else:
        assert flipped.item() != pytest.approx(value.item(), rel=1e-3)


FACTORS = {
    "all alike": [0.003] * 6,
    "far apart": [0.003, 1.0, 1e-30, 1e30, 7.0, 1e-7],
    "all huge": [1e30] * 6,
    "all tiny": [1e-30] * 6,
}


@every_setting
@pytest.mark.parametrize("factors", FACTORS)
def test_invariant_to_the_scale_of_every_neuron(setting: dict, factors: str) -> None:
    scale = torch.tensor(FACTORS[factors], dtype=torch.float64).unsqueeze(-1)
    # Rounding moves a neuron by 1e-16 or 6e-8, a close pair's distance in proportion.
    for dtype, apart, tolerance in ((torch.float64, 1e-3, 1e-11), (torch.float32, 0.3, 1e-5)):
        points = close_pairs(apart, dtype)[:6]
        scaled = (scale * points.double()).to(dtype)
        value, gradient = value_and_gradient(points, **setting)
        found, of_scaled = value_and_gradient(scaled, **setting)
        assert found.item() == pytest.approx(value.item(), rel=tolerance, abs=tolerance)
        expected = gradient.double() / scale
        error = (of_scaled.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < 10 * tolerance
        closed = Energy(**setting).gradient(scaled)
        assert ((closed.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 10 * tolerance


@every_setting
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two_change_no_bit(setting: dict, dtype: torch.dtype) -> None:
    points = close_pairs(1e-2 if setting["s"] < 10 else 0.1, dtype)  # a slope times 2^60 is to fit float32
    value, gradient = value_and_gradient(points, **setting)
    exponents = [0, 1, -1, 10, -20, 60, -60, 90]
    scale = torch.tensor([2.0**e for e in exponents], dtype=dtype).unsqueeze(-1)
    found, of_scaled = value_and_gradient(scale * points, **setting)
    assert torch.equal(found, value)
    assert torch.equal(scale * of_scaled, gradient)


@some_settings
def test_the_ends_of_float64(setting: dict) -> None:
    points = normal(4, 3)
    scale = torch.tensor([1e-200, 1.0, 1e200, 1e-300], dtype=torch.float64).unsqueeze(-1)
    value, gradient = value_and_gradient(points, **setting)
    found, of_scaled = value_and_gradient(scale * points, **setting)
    assert found.item() == pytest.approx(value.item(), rel=1e-12)
    torch.testing.assert_close(scale * of_scaled, gradient, rtol=1e-11, atol=0)
    torch.testing.assert_close(scale * Energy(**setting).gradient(scale * points), gradient, rtol=1e-11, atol=0)


def test_norm_eps_is_that_of_the_reference_code() -> None:
    """norm = sqrt(norm^2 + 1e-4), then 2 - 2 cos and 1 / that: here by loops, and no longer free of scale."""
    points = 0.05 * normal(5, 4)
    rows = points.tolist()
    norms = [math.sqrt(math.fsum(x * x for x in w) + 1e-4) for w in rows]

    def squared(i: int, j: int, sign: int) -> float:
        return 2 - 2 * sign * math.fsum(map(float.__mul__, rows[i], rows[j])) / (norms[i] * norms[j])

    every, signs = range(5), (1, -1)
    full = [1 / squared(i, j, 1) for i in every for j in every if i != j]
    # Both points of a pair may be turned: each combination occurs twice. A point meets its own antipode twice too.
    half = [2 / squared(i, j, sign) for i in every for j in every for sign in signs if i != j or sign == -1]
    assert energy(points, norm_eps=1e-4).item() == pytest.approx(math.fsum(full) / 20, rel=1e-12)
    assert energy(points, norm_eps=1e-4, half_space=True).item() == pytest.approx(math.fsum(half) / 90, rel=1e-12)
    assert energy(0.01 * points, norm_eps=1e-4) < 0.9 * energy(points, norm_eps=1e-4)


# Edges: duplicates, zero neurons, few neurons.


ALL_EXPONENTS = [*EXPONENTS, 50]
every_exponent = pytest.mark.parametrize("s", ALL_EXPONENTS)


@every_exponent
@pytest.mark.parametrize("half_space", SPACES)
@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_duplicates_are_finite(s: float, half_space: bool, distance: str, dtype: torch.dtype) -> None:
    setting = {"s": s, "half_space": half_space, "distance": distance}
    base = normal(3, 4)
    cases = {
        "exact": torch.cat([base, base, base]),
        "longer": torch.cat([base, 2 * base, 3 * base]),
        "opposite": torch.cat([base, -base, -3 * base]),
        "almost": torch.cat([base, base * (1 + 1e-7 * normal(3, 4, seed=1)), base + 1e-5 * normal(3, 4, seed=2)]),
        "all one": torch.ones(9, 4),
    }
    for name, points in cases.items():
        points = points.to(dtype)
        for reduction in REDUCTIONS:
            value, gradient = value_and_gradient(points, **setting, reduction=reduction)
            closed = Energy(**setting, reduction=reduction).gradient(points)
            assert torch.isfinite(value), name
            assert s == 0 or value > 0, name
            assert torch.isfinite(closed).all(), name
            # 65504 is the largest number of float16: an autograd gradient of that type may exceed it.
            assert dtype == torch.float16 or torch.isfinite(gradient).all(), name
            assert not torch.isnan(gradient).any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_setting
def test_duplicates_cost_more_than_anything_else(setting: dict, dtype: torch.dtype) -> None:
    """The energy goes on rising, strictly, below the floor: neurons that nearly coincide still part."""
    previous = -math.inf
    for apart in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 0.0):
        points = torch.tensor([[1.0, 0.0], [math.cos(apart), math.sin(apart)]], dtype=dtype)
        value, gradient = value_and_gradient(points, **setting)
        assert value > previous
        previous = value
        if apart:
            # Pushed apart: the second, above the first axis, descends upwards.
            assert gradient[1, 1] < 0
            assert gradient[0, 1] > 0
        else:
            assert not gradient.any()


@pytest.mark.parametrize("s", [2, 7, 7.5, 8, 10, 20, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_of_duplicates_is_finite(s: float, dtype: torch.dtype) -> None:
    """A thousand of them, summed: 2e6 pairs of 1e31 each stay below 3e38, and so do slopes of 1e37 times 1e-4."""
    exact = torch.ones(1000, 3, dtype=dtype)
    for points in (exact, exact + 1e-5 * normal(1000, 3, dtype=dtype), exact + 1e-4 * normal(1000, 3, dtype=dtype)):
        for setting in ({"half_space": True, "reduction": "sum"}, {"reduction": "sum", "norm_eps": 1e-12}, {}):
            value, gradient = value_and_gradient(points, s, **setting)
            assert torch.isfinite(value)
            assert value > 0
            assert torch.isfinite(gradient).all()
            if "norm_eps" not in setting:  # which pulls at lengths
                assert bool(gradient.any()) is (points is not exact)


@pytest.mark.parametrize("s", [0, 1, 2, 7, 8, 12])
def test_below_the_floor_the_energy_is_its_tangent(s: float) -> None:
    """In float32 the floor is a squared chord of 1e-8, a slope of 1e37 or duplicates of 1e31: exact down to it."""
    floor = {8: 4e-37**0.2, 12: 7e-31 ** (1 / 6)}.get(s, 1e-8)
    start = floor ** (-s / 2) if s else -0.5 * math.log(floor)
    slope = -s / 2 * floor ** (-s / 2 - 1) if s else -0.5 / floor
    for below in (0.0, 0.3, 0.9):
        apart = 2 * math.asin(math.sqrt(below * floor) / 2)
        points = torch.tensor([[1e4, 0.0], [1e4 * math.cos(apart), 1e4 * math.sin(apart)]], dtype=torch.float32)
        squared = chord(*map(on_sphere, points.tolist())) ** 2
        assert energy(points, s).item() == pytest.approx(start + slope * (squared - floor), rel=1e-5)


@every_exponent
@pytest.mark.parametrize("half_space", SPACES)
@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_neuron_is_orthogonal_to_all(s: float, half_space: bool, distance: str, dtype: torch.dtype) -> None:
    setting = {"s": s, "half_space": half_space, "distance": distance}
    points = torch.cat([normal(5, 4), torch.zeros(5, 2)], dim=-1).to(dtype)
    orthogonal = points.clone()
    points[1], points[4] = 0, 0
    orthogonal[1], orthogonal[4] = torch.eye(6, dtype=dtype)[4:]
    value, gradient = value_and_gradient(points, **setting)
    expected, of_expected = value_and_gradient(orthogonal, **setting)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    assert value.item() == pytest.approx(expected.item(), rel=tolerance, abs=tolerance)
    assert not gradient[[1, 4]].any()
    assert not Energy(**setting).gradient(points)[[1, 4]].any()
    others = [0, 2, 3]
    size = float(of_expected[others].abs().max())
    torch.testing.assert_close(gradient[others, :4], of_expected[others, :4], rtol=0, atol=10 * tolerance * size)

    value, gradient = value_and_gradient(torch.zeros(4, 3, dtype=dtype), **setting)
    expected = energy(torch.eye(4, dtype=dtype), **setting)
    assert value.item() == pytest.approx(expected.item(), rel=tolerance)
    assert not gradient.any()


@pytest.mark.parametrize("setting", SETTINGS, ids=label)
def test_few_points(setting: dict) -> None:
    for dtype, wide in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ):
        for shape in ((1, 4), (0, 4), (2, 3, 1, 4), (2, 3, 0, 4), (0, 5, 4), (1, 1)):
            points = torch.ones(shape, dtype=dtype)
            value, gradient = value_and_gradient(points, **setting)
            closed = Energy(**setting).gradient(points)
            assert value.shape == shape[:-2]
            assert value.dtype == closed.dtype == wide
            assert not value.any()
            assert gradient.shape == closed.shape == shape
            assert not gradient.any()
            assert not closed.any()


def test_one_dimension_has_two_directions() -> None:
    points = torch.tensor([[2.0], [-3.0]], dtype=torch.float64)
    assert energy(points).item() == 0.25
    assert energy(points, 1, distance="angle").item() == pytest.approx(1 / math.pi, rel=1e-13)
    assert not value_and_gradient(points)[1].any()


# Precision.


@every_setting
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(setting: dict, dtype: torch.dtype) -> None:
    points = normal(3, 9, 5, dtype=dtype)
    value, gradient = value_and_gradient(points, **setting)
    expected, of_expected = value_and_gradient(points.float(), **setting)
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)
    assert gradient.dtype == dtype
    assert torch.equal(gradient, of_expected.to(dtype))


@pytest.mark.usefixtures("_any_precision")
@some_settings
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ambient_precision_changes_no_bit(setting: dict, dtype: torch.dtype) -> None:
    # A neuron for each of many dimensions: large enough for the products that a flag switches to bfloat16.
    points = torch.cat([normal(272, 256, dtype=dtype), close_pairs(1e-2, dtype).repeat(1, 52)[:, :256]])
    plain = [*value_and_gradient(points, **setting), Energy(**setting).gradient(points)]
    for precision in ("high", "medium"):
        for low in (torch.bfloat16, torch.float16):
            torch.set_float32_matmul_precision(precision)
            with torch.autocast("cpu", low):
                ambient = [*value_and_gradient(points, **setting), Energy(**setting).gradient(points)]
            for found, expected in zip(ambient, plain, strict=True):
                assert torch.equal(found, expected)


def both(points: Tensor, setting: dict) -> list[Tensor]:
    return [energy(points, **setting), Energy(**setting).gradient(points)]


COMPILED = [
    {"s": 2, "half_space": True, "norm_eps": 1e-4},
    {"s": 3.7, "half_space": False, "distance": "angle", "reduction": "sum"},
]


@pytest.mark.parametrize(
    ("backend", "setting"),
    [("aot_eager", COMPILED[0])] + [pytest.param("inductor", each, marks=pytest.mark.slow) for each in COMPILED],
    ids=str,
)
def test_compiles_whole(backend: str, setting: dict) -> None:
    torch.compiler.reset()
    compiled = torch.compile(both, fullgraph=True, backend=backend)
    points = torch.stack([normal(8, 5), close_pairs(1e-3, torch.float64)]).float()
    expected, of_expected = value_and_gradient(points, **setting)
    leaf = points.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value, closed = compiled(leaf, setting)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    torch.testing.assert_close(value.detach(), expected, rtol=1e-6, atol=1e-6)
    for found in (gradient, closed.detach()):
        error = (found - of_expected).norm(dim=-1) / of_expected.norm(dim=-1)
        assert error.max() <= 1e-5


# Closed forms.


def simplex(count: int) -> Tensor:
    """`count` points in as many coordinates, every two of them at a squared chord of 2 N / (N - 1)."""
    return torch.eye(count, dtype=torch.float64) - 1 / count


def cross_polytope(dim: int) -> Tensor:
    return torch.cat([torch.eye(dim), -torch.eye(dim)]).double()


def circle(count: int, turn: float = 2 * math.pi) -> Tensor:
    angles = torch.arange(count, dtype=torch.float64) * (turn / count) + 0.1
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def riesz(z: float, s: float) -> float:
    return z**-s if s > 0 else -math.log(z)


@pytest.mark.parametrize("s", EXPONENTS)
@pytest.mark.parametrize("count", [2, 3, 4, 10, 101])
def test_simplex(s: float, count: int) -> None:
    points = simplex(count)
    expected = riesz(math.sqrt(2 * count / (count - 1)), s)
    assert energy(points, s).item() == pytest.approx(expected, rel=1e-12)
    of_angle = riesz(math.acos(-1 / (count - 1)) if count > 2 else math.pi, s)
    assert energy(points, s, distance="angle").item() == pytest.approx(of_angle, rel=1e-12)
    assert energy(points, s, reduction="sum").item() == pytest.approx(count * (count - 1) * expected, rel=1e-12)
    # A minimum: no slope.
    assert Energy(s).gradient(points).abs().max() < 1e-12


@pytest.mark.parametrize("s", EXPONENTS)
@pytest.mark.parametrize("dim", [2, 3, 4, 10])
@pytest.mark.parametrize("distance", DISTANCES)
def test_cross_polytope(s: float, dim: int, distance: str) -> None:
    aside, across = (math.sqrt(2), 2.0) if distance == "chord" else (math.pi / 2, math.pi)
    total = 2 * dim * ((2 * dim - 2) * riesz(aside, s) + riesz(across, s))
    found = energy(cross_polytope(dim), s, distance=distance, reduction="sum")
    assert found.item() == pytest.approx(total, rel=1e-12)
    # Orthogonal neurons and their opposites.
    found = energy(torch.eye(dim, dtype=torch.float64), s, half_space=True, distance=distance, reduction="sum")
    assert found.item() == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("count", [2, 3, 5, 8, 33])
def test_circle(count: int) -> None:
    # sum_k 1 / (4 sin^2(pi k / N)) = (N^2 - 1) / 12 and prod_k 2 sin(pi k / N) = N.
    assert energy(circle(count), 2, reduction="sum").item() == pytest.approx(count * (count**2 - 1) / 12, rel=1e-12)
    assert energy(circle(count), 0, reduction="sum").item() == pytest.approx(-count * math.log(count), rel=1e-12)
    arcs = [2 * math.pi * min(k, count - k) / count for k in range(1, count)]
    found = energy(circle(count), 1, distance="angle", reduction="sum")
    assert found.item() == pytest.approx(count * math.fsum(1 / arc for arc in arcs), rel=1e-12)
    # Points on half a circle, with their opposites, are a circle.
    both_halves = circle(count, turn=math.pi)
    found = energy(both_halves, 2, half_space=True, reduction="sum")
    assert found.item() == pytest.approx(2 * count * (4 * count**2 - 1) / 12, rel=1e-12)
    found = energy(both_halves, 0, half_space=True, reduction="sum")
    assert found.item() == pytest.approx(-2 * count * math.log(2 * count), rel=1e-12)


@every_setting
def test_energy_of_a_cosine(setting: dict) -> None:
    """Of one pair; in half space the mean over a pair and its antipode."""
    function = Energy(**setting)
    for cosine in (-0.9, -0.2, 0.0, 0.5, 0.99):
        z = [math.sqrt(2 - 2 * c) if setting["distance"] == "chord" else math.acos(c) for c in (cosine, -cosine)]
        each = [riesz(x, setting["s"]) for x in z]
        expected = sum(each) / 2 if setting["half_space"] else each[0]
        found = function.of_cosine(torch.tensor(cosine, dtype=torch.float64))
        assert found.item() == pytest.approx(expected, rel=1e-12, abs=1e-13)


# Every finite input.

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 1 + 2**-23, 2.0**-149, -(2.0**-126), 2.0**127, -3.4028234663852886e38]
)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    count, dim = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    row = st.lists(numbers, min_size=dim, max_size=dim)
    rows = draw(st.lists(row, min_size=1, max_size=count))
    rows += draw(st.lists(st.sampled_from(rows), max_size=2))
    return torch.tensor(rows, dtype=torch.float32)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    points=matrices(),
    s=st.sampled_from([0, 0.5, 1, 2, 3.7, 6, 10, 50]),
    half_space=st.booleans(),
    distance=st.sampled_from(DISTANCES),
    reduction=st.sampled_from(REDUCTIONS),
)
def test_finite_for_every_finite_input(
    points: Tensor, s: float, half_space: bool, distance: str, reduction: str
) -> None:
    setting = {"s": s, "half_space": half_space, "distance": distance, "reduction": reduction}
    value, gradient = value_and_gradient(points, **setting)
    assert torch.isfinite(value)
    assert s == 0 or value >= 0
    closed = Energy(**setting).gradient(points)
    # The slope grows as 1 / norm: below 1e-10 it may leave float32's range, but never as NaN.
    largest = points.abs().amax(dim=-1)
    for found in (gradient, closed):
        assert not torch.isnan(found).any()
        assert torch.isfinite(found[(largest > 1e-10) | (largest == 0)]).all()
        assert not found[largest == 0].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_setting
def test_a_point_that_is_not_finite_makes_the_energy_nan(setting: dict, bad: float) -> None:
    """Training that has diverged must be seen to: a point is not dropped because its norm cannot be told."""
    points = normal(5, 7, dtype=torch.float32)
    points[2, 3] = bad
    value, gradient = value_and_gradient(points, **setting)
    assert torch.isnan(value)
    assert torch.isnan(gradient).any()


# Errors.


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"s": -1}, r"s=-1: choose a finite s >= 0 \(0 is the logarithmic energy\)"),
        ({"s": math.nan}, "s=nan: choose a finite s >= 0"),
        ({"s": math.inf}, "s=inf: choose a finite s >= 0"),
        ({"distance": "arc"}, "distance='arc': choose 'chord' or 'angle'"),
        ({"reduction": "none"}, "reduction='none': choose 'mean' or 'sum'"),
        ({"norm_eps": -1e-4}, "norm_eps=-0.0001: choose 0 or a small positive number"),
        ({"norm_eps": math.nan}, "norm_eps=nan: choose 0 or a small positive number"),
    ],
)
def test_bad_settings(setting: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        energy(normal(3, 4), **setting)
    with pytest.raises(ValueError, match=message):
        Energy(**setting)


@pytest.mark.parametrize(
    "points",
    [
        torch.ones(4),
        torch.tensor(1.0),
        torch.ones(4, 0),
        torch.ones(4, 3, dtype=torch.int64),
        torch.ones(4, 3, dtype=torch.bool),
        torch.ones(4, 3, dtype=torch.complex64),
    ],
    ids=lambda points: f"{tuple(points.shape)}-{points.dtype}",
)
def test_bad_points(points: Tensor) -> None:
    message = r"points of shape \(.*\) and type torch\..*: give real floating-point \[\.\.\., N, D\]"
    with pytest.raises(ValueError, match=message):
        energy(points)
    with pytest.raises(ValueError, match=message):
        Energy().gradient(points)


def test_energies_are_values() -> None:
    """Equal settings are equal, and nobody changes one that another holds."""
    assert len({Energy(), Energy(2), Energy(s=2.0, half_space=False), Energy(half_space=True)}) == 2
    with pytest.raises(AttributeError):
        Energy().s = 1


@pytest.mark.parametrize(
    "points", [torch.nn.Linear(3, 4), [[1.0, 0.0], [0.0, 1.0]], None], ids=["layer", "list", "none"]
)
def test_what_is_no_tensor_is_refused(points) -> None:
    for function in (comhe.energy, comhe.sampled_energy):
        with pytest.raises(
            TypeError, match=r"give a tensor \[\.\.\., N, D\]; that of a layer is layer\.weight\.flatten"
        ):
            function(points)


def test_an_exponent_is_a_number() -> None:
    with pytest.raises(TypeError, match="s='2': choose a number"):
        comhe.energy(torch.randn(3, 3), "2")  # type: ignore[arg-type]
