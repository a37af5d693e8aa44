"""The uniform expectation against closed forms, quadrature and Monte Carlo; the bound against configurations known."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

import comhe
from comhe.bounds import lower_bound, uniform_expectation
from comhe.energies import Energy

EXPONENTS = [0.0, 0.5, 1.0, 2.0, 3.5]
every_distance = pytest.mark.parametrize("distance", ["chord", "angle"])
every_space = pytest.mark.parametrize("half_space", [False, True], ids=["full", "half"])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean_energy(points, s=2.0, half_space=False, distance="chord"):
    return comhe.energy(points, s, half_space=half_space, distance=distance).item()


def simplex(num_points):
    return torch.eye(num_points, dtype=torch.float64) - 1 / num_points


def cross_polytope(dim):
    eye = torch.eye(dim, dtype=torch.float64)
    return torch.cat([eye, -eye])


def optimised(num_points, dim, s, half_space, distance):
    """The energy of points after a descent from a random start."""
    points = normal(num_points, dim, seed=num_points + dim).requires_grad_()
    descent = torch.optim.LBFGS([points], max_iter=30, line_search_fn="strong_wolfe")

    def closure():
        descent.zero_grad()
        value = comhe.energy(points, s, half_space=half_space, distance=distance)
        value.backward()
        return value

    descent.step(closure)
    return mean_energy(points.detach(), s, half_space, distance)


# The uniform expectation.


@pytest.mark.parametrize("dim", [4, 5, 27, 30, 31, 32, 40, 64, 577, 4608, 100_000])
def test_the_closed_form_at_s_2(dim):
    assert uniform_expectation(dim) == pytest.approx((dim - 2) / (2 * (dim - 3)), rel=1e-12)


@pytest.mark.parametrize(
    ("dim", "s", "distance", "value"),
    [
        (2, 0, "chord", 0.0),
        (3, 0, "chord", 0.5 - math.log(2)),
        (3, 1, "chord", 1.0),
        (3, 1.5, "chord", 2**-1.5 / (1 - 0.75)),
        (5, 3, "chord", 1.0),
        (2, 0, "angle", 1 - math.log(math.pi)),
        (2, 0.9, "angle", math.pi**-0.9 / 0.1),
        (2, 0.99, "angle", math.pi**-0.99 / 0.01),
        (3, 1, "angle", 1.8519370519824661703 / 2),  # Si(pi) / 2
        (4, 2, "angle", 1.4181515761326284502 * 2 / math.pi),  # 2 Si(2 pi) / pi
    ],
)
def test_values_known(dim, s, distance, value):
    assert uniform_expectation(dim, s, distance=distance) == pytest.approx(value, rel=1e-12, abs=1e-15)


@every_distance
@pytest.mark.parametrize("s", EXPONENTS)
@pytest.mark.parametrize("dim", [12, 64, 577, 4608])
def test_an_independent_quadrature(dim, s, distance):
    width = min(math.pi / 2, 14 / math.sqrt(dim))  # beyond, the density is below 1e-17 of its peak
    nodes, weights = np.polynomial.legendre.leggauss(200)
    angle = math.pi / 2 + width * nodes
    z = angle if distance == "angle" else 2 * np.sin(angle / 2)
    density = weights * np.sin(angle) ** (dim - 2)
    potential = -np.log(z) if s == 0 else z**-s
    expected = (density * potential).sum() / density.sum()
    assert uniform_expectation(dim, s, distance=distance) == pytest.approx(expected, rel=1e-10)


@every_distance
def test_the_logarithm_is_the_limit_of_small_exponents(distance):
    at_zero = uniform_expectation(7, 0, distance=distance)
    slope = (uniform_expectation(7, 1e-6, distance=distance) - 1) / 1e-6
    assert slope == pytest.approx(at_zero, abs=1e-5)


@every_distance
@every_space
@pytest.mark.parametrize("s", [0.0, 1.0, 2.0])
def test_monte_carlo(s, half_space, distance):
    sets = normal(4000, 6, 12, seed=3)
    energies = comhe.energy(sets, s, half_space=half_space, distance=distance)
    expected = uniform_expectation(12, s, half_space=half_space, distance=distance, num_points=6)
    assert abs(energies.mean().item() - expected) < 4 * energies.std().item() / math.sqrt(len(energies))


def test_half_space_at_s_2_as_written_out():
    e = (40 - 2) / (2 * (40 - 3))
    expected = (1 / 4 + 2 * 255 * e) / (2 * 256 - 1)
    assert uniform_expectation(40, half_space=True, num_points=256) == pytest.approx(expected, rel=1e-14)


def test_the_published_logs_of_cnn_9_at_initialisation():
    widths = [64] * 2 + [128] * 3 + [256] * 4

    def summed(dim):
        first = uniform_expectation(27, half_space=True, num_points=64)
        return first + sum(uniform_expectation(dim, half_space=True, num_points=n) for n in widths)

    assert summed(40) == pytest.approx(5.136, abs=0.01)
    assert summed(30) == pytest.approx(5.181, abs=0.01)
    assert 10 * uniform_expectation(256) == pytest.approx(5.02, abs=0.01)
    assert 10 * lower_bound(100, 256) == pytest.approx(4.95, rel=1e-14)


@every_distance
@pytest.mark.parametrize(("dim", "s"), [(1, 0), (1, 2), (2, 1), (2, 2), (3, 2), (4, 3.5)])
def test_infinite_where_random_pairs_come_too_close(dim, s, distance):
    assert uniform_expectation(dim, s, distance=distance) == math.inf
    assert uniform_expectation(dim, s, distance=distance, half_space=True, num_points=4) == math.inf


def test_a_single_point_has_energy_0_and_so_has_what_it_is_compared_to():
    assert uniform_expectation(9, half_space=True, num_points=1) == 0
    assert lower_bound(1, 9) == lower_bound(1, 9, 2.0, half_space=True) == mean_energy(normal(1, 9)) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: uniform_expectation(0), "dim=0: choose at least 1"),
        (lambda: uniform_expectation(9, half_space=True), "num_points=None: in half space"),
        (lambda: uniform_expectation(9, half_space=True, num_points=0), "num_points=0: choose at least 1"),
        (lambda: uniform_expectation(9, -1), "s=-1"),
        (lambda: uniform_expectation(9, distance="arc"), "distance='arc'"),
        (lambda: lower_bound(0, 9), "num_points=0"),
        (lambda: lower_bound(9, 0), "dim=0"),
        (lambda: lower_bound(9, 9, -1), "s=-1"),
    ],
)
def test_errors_name_the_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# The lower bound.


@pytest.mark.parametrize("s", EXPONENTS)
@pytest.mark.parametrize("num_points", [2, 3, 4, 9])
def test_a_simplex_attains_the_full_space_bound(num_points, s):
    for dim in (num_points - 1, num_points + 3):
        bound = lower_bound(num_points, dim, s)
        assert bound == pytest.approx(mean_energy(simplex(num_points), s), rel=1e-12, abs=1e-14)
    assert lower_bound(num_points, 12) == pytest.approx((num_points - 1) / (2 * num_points), rel=1e-14)


@pytest.mark.parametrize("s", EXPONENTS)
@pytest.mark.parametrize("dim", [2, 3, 8])
def test_a_cross_polytope_attains_the_full_space_bound(dim, s):
    bound = lower_bound(2 * dim, dim, s)
    assert bound == pytest.approx(mean_energy(cross_polytope(dim), s), rel=1e-12, abs=1e-14)


@every_distance
@pytest.mark.parametrize("s", EXPONENTS)
@pytest.mark.parametrize(("num_points", "dim"), [(2, 2), (3, 5), (8, 8), (3, 2), (6, 3)])
def test_lines_at_equal_angles_attain_the_half_space_bound(num_points, dim, s, distance):
    if num_points <= dim:
        lines = torch.eye(num_points, dim, dtype=torch.float64)  # +-: a cross-polytope
    elif dim == 2:
        turns = torch.arange(3, dtype=torch.float64) * math.pi / 3
        lines = torch.stack([turns.cos(), turns.sin()], dim=-1)
    else:
        golden = (1 + math.sqrt(5)) / 2
        flat = torch.tensor([[0, 1, golden], [0, -1, golden]], dtype=torch.float64)
        lines = torch.cat([flat, flat.roll(1, 1), flat.roll(2, 1)])  # the diagonals of the icosahedron
    bound = lower_bound(num_points, dim, s, half_space=True, distance=distance)
    assert bound == pytest.approx(mean_energy(lines, s, True, distance), rel=1e-12, abs=1e-14)


@every_distance
@every_space
@pytest.mark.parametrize("s", EXPONENTS)
def test_random_points_are_never_below(s, half_space, distance):
    for num_points in (2, 3, 5, 8, 9, 17, 40):
        for dim in (2, 3, 4, 8, 20):
            bound = lower_bound(num_points, dim, s, half_space=half_space, distance=distance)
            sets = normal(20, num_points, dim, seed=dim)
            energies = comhe.energy(sets, s, half_space=half_space, distance=distance)
            assert bound <= energies.min().item() + 1e-12
            expected = uniform_expectation(dim, s, half_space=half_space, distance=distance, num_points=num_points)
            assert bound < expected


@every_distance
@every_space
@pytest.mark.parametrize("s", [0.0, 0.5, 2.0])
@pytest.mark.parametrize(("num_points", "dim"), [(4, 3), (5, 3), (7, 4), (13, 6)])
def test_optimised_points_are_never_below(num_points, dim, s, half_space, distance):
    bound = lower_bound(num_points, dim, s, half_space=half_space, distance=distance)
    assert bound <= optimised(num_points, dim, s, half_space, distance) + 1e-12


def test_the_published_minima_of_the_thomson_problem():
    minima = {2: 0.5, 3: 1.732050808, 4: 3.674234614, 5: 6.474691495, 6: 9.985281374, 7: 14.452977414}
    minima |= {8: 19.675287861, 9: 25.759986531, 10: 32.716949460, 11: 40.596450510, 12: 49.165253058}
    minima |= {24: 223.347074052, 32: 412.261274651}
    for num_points, total in minima.items():
        least = total / math.comb(num_points, 2)
        bound = lower_bound(num_points, 3, 1)
        assert 0.95 * least < bound <= least * (1 + 1e-9)
        if num_points in (2, 3, 4, 6):
            assert bound == pytest.approx(least, rel=1e-9)


def test_a_simplex_is_not_the_least_for_the_logarithm_of_angles():
    square = mean_energy(cross_polytope(2), 0, distance="angle")
    assert square < mean_energy(simplex(4), 0, distance="angle") - 0.03
    assert lower_bound(4, 2, 0, distance="angle") <= square
    assert lower_bound(4, 4, 0, distance="angle") <= square


@pytest.mark.parametrize("s", [*EXPONENTS, 0.01, 30.0])
def test_the_energy_of_an_angle_lies_above_the_hull(s):
    """The hull at -1/(N-1) is no larger than any mean of two values of h with that mean cosine."""
    pair = Energy(s, distance="angle")
    left = torch.linspace(-1, -0.001, 400, dtype=torch.float64)
    for num_points in (2, 3, 4, 6, 40):
        mean = -1 / (num_points - 1)
        low = left[left < mean].unsqueeze(-1)
        high = torch.linspace(mean, 0.99, 400, dtype=torch.float64)
        share = (mean - low) / (high - low)
        mixed = (share * pair.of_cosine(high) + (1 - share) * pair.of_cosine(low)).reshape(-1)
        least = min([*mixed.tolist(), pair.of_cosine(torch.tensor(mean, dtype=torch.float64)).item()])
        by_mean_angle = math.pi * (num_points // 2) * ((num_points + 1) // 2) / math.comb(num_points, 2)
        other = -math.log(by_mean_angle) if s == 0 else by_mean_angle**-s
        bound = lower_bound(num_points, 50, s, distance="angle")
        assert bound <= max(least, other) + 1e-12
        assert bound >= other
        assert bound == pytest.approx(max(least, other), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("s", EXPONENTS)
def test_the_bound_knows_the_dimension(s):
    """Beyond D + 1 neurons it is above the simplex, grows with N without a jump, and stays below random."""
    values = [lower_bound(n, 10, s) for n in range(2, 60)]
    assert all(a < b for a, b in pairwise(values))
    assert lower_bound(40, 10, s) > lower_bound(40, 39, s) + 1e-3
    steps = np.diff(values)
    assert all(later < 1.5 * earlier for earlier, later in pairwise(steps[1:]))
    assert lower_bound(10**6, 10, s) < uniform_expectation(10, s)


def test_in_one_dimension_duplicates_cannot_be_avoided():
    assert lower_bound(2, 1) == 0.25
    assert lower_bound(3, 1) == math.inf
    assert lower_bound(2, 1, 2.0, half_space=True) == math.inf
