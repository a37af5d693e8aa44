"""What an energy is to be read against: the mean over uniformly random directions, and a value no directions go below.

Both in float64, for the mean over ordered pairs (`reduction="mean"`). docs/derivations.md, "Bounds", has the proofs.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F

from comhe.energies import Distance, Energy
from comhe.projections._base import at_least_one


def uniform_expectation(
    dim: int,
    s: float = 2.0,
    *,
    half_space: bool = False,
    distance: Distance = "chord",
    num_points: int | None = None,
) -> float:
    """The expected mean energy of independent uniform directions on the unit sphere in R^dim.

    In full space every pair has the same expectation e, whatever their number. For the chord, with n = dim - 1,

        s > 0    e = 2^-s Gamma(n) Gamma((n-s)/2) / (Gamma(n - s/2) Gamma(n/2)),  (dim-2) / (2 (dim-3)) at s = 2
        s = 0    e = -log 2 + (psi(n) - psi(n/2)) / 2

    for the angle a quadrature, to 1e-10. In half space N = `num_points` is needed, as each of the 2N points has one
    partner that is no accident, its antipode: (f(antipode) + 2 (N-1) e) / (2N - 1). A single point has energy 0 there,
    as in `energy`. Infinite where s >= dim - 1.
    """
    pair = Energy(s, distance=distance)
    at_least_one(dim=dim)
    if half_space and num_points is None:
        raise ValueError("num_points=None: in half space the expectation depends on the number of points, give it")
    if num_points is not None:
        at_least_one(num_points=num_points)
        if half_space and num_points == 1:
            return 0.0
    if s >= dim - 1:
        return math.inf
    mean = _mean_of_chord(dim, s) if distance == "chord" else _mean_of_angle(dim, s)
    return with_antipodes(num_points, mean, pair) if half_space and num_points else mean


def lower_bound(
    num_points: int, dim: int, s: float = 2.0, *, half_space: bool = False, distance: Distance = "chord"
) -> float:
    """A value below which the mean energy of N = `num_points` directions in R^dim, D = `dim`, cannot fall.

    Full space, chord: the energy h of a pair grows in its cosine g and all derivatives of h are positive. Cosines have
    a mean of at least -1/(N-1), so by Jensen h(-1/(N-1)), which a simplex attains (N <= D + 1). Beyond, the means of
    the next two Gegenbauer polynomials are bounded likewise, and a quadratic or cubic below h gives two values of h
    with weights; N = 2D is attained by the cross-polytope. Full space, angle: h has a cusp at g = -1, so Jensen takes
    its convex hull; and as a plane separates at most N^2/4 pairs, the mean angle is bounded too. The larger is
    returned. Half space: h(g) + h(-g) is a convex, growing function of g^2, whose mean is at least
    (N-D) / (D (N-1)) (Welch); attained for N <= D and by equiangular tight frames.

    0 for a single point; infinite where duplicates cannot be avoided (D = 1).
    """
    pair = Energy(s, distance=distance)
    at_least_one(num_points=num_points, dim=dim)
    if num_points == 1:
        return 0.0
    if dim == 1 and num_points > (1 if half_space else 2):
        return math.inf
    if half_space:
        square = max(0.0, (num_points - dim) / (dim * (num_points - 1)))
        either = Energy(s, half_space=True, distance=distance)
        return with_antipodes(num_points, _at(either, math.sqrt(square)), pair)
    if distance == "angle":
        return max(_convex_hull(num_points, pair), _at_largest_mean_angle(num_points, s))
    return _by_moments(num_points, dim, pair)


def _at(pair: Energy, cosine: float) -> float:
    return float(pair.of_cosine(torch.tensor(cosine, dtype=torch.float64)))


def with_antipodes(num_points: int, mean: float, pair: Energy) -> float:
    """The mean energy in half space, given that of pairs which are no antipodes; `pair` is the energy in full space."""
    return (_at(pair, -1.0) + 2 * (num_points - 1) * mean) / (2 * num_points - 1)


def _mean_of_chord(dim: int, s: float) -> float:
    n = dim - 1
    if s == 0:
        psi = torch.digamma(torch.tensor([n, n / 2], dtype=torch.float64))
        return float(psi[0] - psi[1]) / 2 - math.log(2)
    log_mean = _log_gamma_ratio(n, s / 2) - _log_gamma_ratio(n / 2, s / 2) - s * math.log(2)
    return math.exp(log_mean) if log_mean < 709 else math.inf


def _log_gamma_ratio(x: float, a: float) -> float:
    """log Gamma(x) / Gamma(x - a): for large x from Stirling's series, term by term, so that nothing cancels."""
    y = x - a
    if y < 30:
        return math.lgamma(x) - math.lgamma(y)
    return a * math.log(x) - a - (y - 0.5) * math.log1p(-a / x) + _stirling(x) - _stirling(y)


def _stirling(x: float) -> float:
    return (1 / 12 - (1 / 360 - (1 / 1260 - 1 / (1680 * x * x)) / (x * x)) / (x * x)) / x


@cache
def _mean_of_angle(dim: int, s: float) -> float:
    """The mean of theta^-s, or -log theta, under the density sin^(dim-2) theta: tanh-sinh quadrature, in logarithms."""
    # theta = pi sigmoid(pi sinh t). The step resolves the peak of the density, the range its slowest tail.
    step = min(1 / 64, 0.2 / math.sqrt(dim))
    reach = math.ceil(math.asinh(16 / (dim - 1 - s)) / step) if dim - 1 - s < 0.5 else math.ceil(4.2 / step)
    t = torch.arange(-reach, reach + 1, dtype=torch.float64) * step
    log_part, log_rest = F.logsigmoid(math.pi * t.sinh()), F.logsigmoid(-math.pi * t.sinh())
    log_theta = math.log(math.pi) + log_part
    log_nearer = math.log(math.pi) + torch.minimum(log_part, log_rest)
    log_sine = log_nearer + torch.sinc(log_nearer.exp() / math.pi).log()
    log_weight = (dim - 2) * log_sine + log_part + log_rest + t.cosh().log()
    if s == 0:
        return -float((log_weight.softmax(dim=0) * log_theta).sum())
    return float((torch.logsumexp(log_weight - s * log_theta, 0) - torch.logsumexp(log_weight, 0)).exp())


def _by_moments(num_points: int, dim: int, pair: Energy) -> float:
    """The full-space bound for the chord, from what uniform points and the pairs i = i say of the first moments."""
    u = 1 / (num_points - 1)
    if num_points <= dim + 1:
        return _at(pair, -u)
    square = (num_points - dim) * u / dim
    if num_points < 2 * dim:  # a node at -1 and one more: a quadratic touching h at it
        low, high = -1.0, (square - u) / (1 - u)
    else:  # two nodes, roots of x^2 + b x + c: a cubic touching h at both
        b = u * (1 - square) / (square - u * u)
        c = b * u - square
        low = -(b + math.sqrt(b * b - 4 * c)) / 2
        high = c / low
    share = (-u - low) / (high - low)
    return share * _at(pair, high) + (1 - share) * _at(pair, max(low, -1.0))


def _convex_hull(num_points: int, pair: Energy) -> float:
    """The largest convex function below the energy of an angle, at the mean cosine of a simplex."""
    s, mean = pair.s, -1 / (num_points - 1)
    # h is concave at first, then convex. The tangent from (-1, h(-1)) touches it at an angle of 1 to pi, found by
    # halving: the curve is steeper than the line to it at smaller angles.
    smaller, larger = 1.0, math.pi
    for _ in range(80):
        theta = (smaller + larger) / 2
        of_curve = 1 / (theta * math.tan(theta / 2))
        of_line = math.log(math.pi / theta) if s == 0 else -math.expm1(s * math.log(theta / math.pi)) / s
        smaller, larger = (theta, larger) if of_curve > of_line else (smaller, theta)
    touching = math.cos(smaller)
    if mean >= touching:
        return _at(pair, mean)
    start = _at(pair, -1.0)
    return start + (_at(pair, touching) - start) * (1 + mean) / (1 + touching)


def _at_largest_mean_angle(num_points: int, s: float) -> float:
    separated = (num_points // 2) * ((num_points + 1) // 2)
    angle = math.pi * separated / math.comb(num_points, 2)
    return -math.log(angle) if s == 0 else angle**-s
