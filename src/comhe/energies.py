"""Hyperspherical energy (Eq. 1 of the paper): Riesz and logarithmic, full and half space, chord and angle.

Pure functions of points; only here do points become directions on their way to an energy (`pairs.sphere`).
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from comhe.pairs import CACHED_PAIRS, Pairs, inverse_norms, pairs, pull, sphere
from comhe.products import lift, widest
from comhe.streaming import is_streamed, stream

Distance = Literal["chord", "angle"]
Reduction = Literal["mean", "sum"]

# Below this squared distance, or where a pair's slope would exceed the second number or its energy at a distance of
# zero the third, the energy goes on as its tangent: finite at duplicates, and still falling as they part. A thousand
# duplicates can be summed.
_FLOOR = {torch.float32: 1e-8, torch.float64: 1e-16}
_STEEPEST = {torch.float32: 1e37, torch.float64: 1e300}
_LARGEST = {torch.float32: 1e31, torch.float64: 1e201}
# The angle has a cusp at the antipode: closer to it than this squared distance it stops changing.
_CUSP = {torch.float32: 1e-12, torch.float64: 1e-28}


@dataclass(frozen=True)
class Energy:
    """The energy of points as a function of them, with its settings; `energy` says what they mean."""

    s: float = 2.0
    half_space: bool = False
    distance: Distance = "chord"
    reduction: Reduction = "mean"
    norm_eps: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.s, int | float):
            raise TypeError(f"s={self.s!r}: choose a number")
        if not (self.s >= 0 and self.s != float("inf")):
            raise ValueError(f"s={self.s}: choose a finite s >= 0 (0 is the logarithmic energy)")
        if self.distance not in ("chord", "angle"):
            raise ValueError(f"distance={self.distance!r}: choose 'chord' or 'angle'")
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction={self.reduction!r}: choose 'mean' or 'sum'")
        if not self.norm_eps >= 0:
            raise ValueError(f"norm_eps={self.norm_eps}: choose 0 or a small positive number")

    def __call__(self, points: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., N, D] -> [...]. Pairs are computed in `dtype`, in that of the points unless given.

        Points that come of a product are to be given in the widest type: rounded before, close ones have lost the
        digits of their difference.
        """
        points = checked(points)
        dtype = dtype or points.dtype
        if points.shape[-2] < 2:
            return (points * 0.0).sum(dim=(-2, -1)).to(dtype)  # no partner: energy 0, gradient zero
        value: Tensor = _WithGradient.apply(points, self, dtype)  # type: ignore[no-untyped-call]
        return value

    def gradient(self, points: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The derivative of `self(points, dtype).sum()`, [..., N, D], in closed form; itself differentiable."""
        points = checked(points)
        if points.shape[-2] < 2:
            return points * 0.0
        unit, lacking = sphere(points, self.norm_eps)
        return self._gradient(points, unit, lacking, pairs(unit, lacking, dtype or points.dtype))

    def with_gradient(self, points: Tensor, dtype: torch.dtype, wanted: bool = True) -> tuple[Tensor, Tensor]:
        """[..., N, D] -> the energies [...] in `dtype` and beside them their gradient, empty where it is not wanted."""
        if points.shape[-2] < 2:
            return points.new_zeros(points.shape[:-2], dtype=dtype), torch.zeros_like(points)
        leading, num_points = points.shape[:-2], points.shape[-2]
        num_sets = max(1, CACHED_PAIRS // (num_points * num_points))
        if points.device.type == "cpu" and math.prod(leading) > num_sets and not torch.compiler.is_compiling():
            some = points.reshape(-1, *points.shape[-2:]).split(num_sets)
            values, gradients = zip(*(self.with_gradient(part, dtype, wanted) for part in some), strict=True)
            gradient = torch.cat(gradients).view(points.shape) if wanted else gradients[0]
            return torch.cat(values).view(leading), gradient
        if is_streamed(points.shape):
            value, gradient = _streamed(points, *astuple(self), dtype, wanted)
            return value, gradient
        unit, lacking = sphere(points, self.norm_eps)
        found = pairs(unit, lacking, dtype)
        gradient = self._gradient(points, unit, lacking, found) if wanted else points.new_empty(0)
        return self._value(found, lacking), gradient

    def _value(self, found: Pairs, lacking: Tensor) -> Tensor:
        each = _without_self(self.of_pairs(found.nearest, found.side))
        # Rows are added up in the widest type: of many duplicates the sum may exceed a range that holds the mean.
        return self.reduced(each.sum(dim=-1).to(widest(each.device)).sum(dim=-1), lacking).to(each.dtype)

    def _gradient(self, points: Tensor, unit: Tensor, lacking: Tensor, found: Pairs) -> Tensor:
        slope = self.slopes(found.nearest, found.side)
        force = pull(torch.where(found.apart, slope, 0.0), unit, found)
        of_others: Tensor | None = None
        if self.norm_eps:
            slope = _without_self(slope)
            of_others = slope.sum(dim=-1, dtype=unit.dtype) + slope.sum(dim=-2, dtype=unit.dtype)
        return self.chained(points, unit, lacking, force, of_others)

    def of_pairs(self, nearest: Tensor, side: Tensor) -> Tensor:
        """The energy of each ordered pair, given the squared chord to the nearer of +-partner and which one that is.

        In half space that of the pair and of its antipode.
        """
        if self.half_space:
            return self._potential(nearest, 4 - nearest) + self._law(4 - nearest, nearest)
        return self._potential(*_with_sides(nearest, side))

    def slopes(self, nearest: Tensor, side: Tensor) -> Tensor:
        """The derivative of `of_pairs` in `nearest`."""
        if self.half_space:
            return self._slope(nearest, 4 - nearest) - self._slope(4 - nearest, nearest)
        # The squared chord to the nearer one runs against the distance where that is the antipode.
        return self._slope(*_with_sides(nearest, side)) * side

    def reduced(self, total: Tensor, lacking: Tensor) -> Tensor:
        """The energy of points [...], given the sum of `of_pairs` over ordered pairs of different points."""
        if self.half_space:
            total = 2 * (total + self._of_antipodes(lacking.to(total.dtype)))
        return total if self.reduction == "sum" else total / self.num_ordered_pairs(lacking.shape[-1])

    def chained(self, points: Tensor, unit: Tensor, lacking: Tensor, force: Tensor, of_others: Tensor | None) -> Tensor:
        """The gradient in the points, given `pull` of the slopes and, with norm_eps, each point's sum of slopes."""
        force = 2 * force
        force = force - (force * unit).sum(dim=-1, keepdim=True) * unit
        if of_others is not None:
            if self.half_space:
                short = 2 * lacking
                of_others = of_others - 2 * self._slope(4 - short, short)
            force = force - 2 * (lacking * of_others).unsqueeze(-1) * unit
        factor = 2.0 if self.half_space else 1.0
        if self.reduction == "mean":
            factor /= self.num_ordered_pairs(points.shape[-2])
        return (factor * force * inverse_norms(points, self.norm_eps)).to(points.dtype)

    def of_cosine(self, cosine: Tensor) -> Tensor:
        """The energy of one pair at the given cosine; in half space the mean over a pair and its antipode."""
        near, far = 2 - 2 * cosine, 2 + 2 * cosine
        value = self._potential(near, far)
        return (value + self._potential(far, near)) / 2 if self.half_space else value

    def num_ordered_pairs(self, count: int) -> int:
        points = 2 * count if self.half_space else count
        return points * (points - 1)

    def _of_antipodes(self, lacking: Tensor) -> Tensor:
        """The energies between each of the N points and its own antipode, added up: [..., N] -> [...]."""
        # Without norm_eps every direction is a full diameter away from its antipode, that of a zero point included.
        short = 2 * lacking if self.norm_eps else torch.zeros_like(lacking)
        return self._potential(4 - short, short).sum(dim=-1)

    def _floor(self, dtype: torch.dtype) -> float:
        if self.s == 0:
            return _FLOOR[dtype]
        of_slope: float = (self.s / 2 / _STEEPEST[dtype]) ** (2 / (self.s + 2))
        of_energy: float = ((1 + self.s / 2) / _LARGEST[dtype]) ** (2 / self.s)
        return max(_FLOOR[dtype], of_slope, of_energy)

    def _potential(self, x: Tensor, y: Tensor) -> Tensor:
        """f, given the squared chord x and the squared chord y to the antipode, x + y = 4; below the floor a line."""
        inside = x.clamp(min=self._floor(x.dtype))
        return self._law(inside, y) + self._slope(inside.detach(), y.detach()) * (x - inside)

    def _law(self, x: Tensor, y: Tensor) -> Tensor:
        if self.distance == "angle":
            z = 2 * torch.atan2(x.sqrt(), y.clamp(min=_CUSP[y.dtype]).sqrt())
            return -torch.log(z) if self.s == 0 else z**-self.s
        if self.s == 0:
            return -0.5 * torch.log(x)
        return 1 / x if self.s == 2 else x ** (-self.s / 2)

    def _slope(self, x: Tensor, y: Tensor) -> Tensor:
        """df/dx along x + y = 4."""
        x = x.clamp(min=self._floor(x.dtype))
        if self.distance == "angle":
            y = y.clamp(min=_CUSP[y.dtype])
            z = 2 * torch.atan2(x.sqrt(), y.sqrt())
            slope = -1 / z if self.s == 0 else -self.s * z ** (-self.s - 1)
            return slope * torch.rsqrt(x * y)
        return -0.5 / x if self.s == 0 else (-self.s / 2) * x ** (-self.s / 2 - 1)


class _WithGradient(torch.autograd.Function):
    """An energy whose gradient is computed beside it: one pass over the pairs, nothing of size N x N kept."""

    @staticmethod
    def forward(ctx: Any, points: Tensor, energy: Energy, dtype: torch.dtype) -> Tensor:
        value, gradient = energy.with_gradient(points, dtype, ctx.needs_input_grad[0])
        if ctx.needs_input_grad[0]:
            ctx.energy, ctx.dtype = energy, dtype
            ctx.save_for_backward(points, gradient)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        points, gradient = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # A second derivative is wanted, which the saved numbers lack.
            gradient = ctx.energy.gradient(points, ctx.dtype)
        return grad.unsqueeze(-1).unsqueeze(-1) * gradient, None, None


@torch.library.custom_op("comhe::streamed", mutates_args=())
def _streamed(
    points: Tensor,
    s: float,
    half_space: bool,
    distance: str,
    reduction: str,
    norm_eps: float,
    dtype: torch.dtype,
    with_gradient: bool,
) -> tuple[Tensor, Tensor]:
    energy = Energy(s, half_space, distance, reduction, norm_eps)  # type: ignore[arg-type]
    return stream(points, energy, dtype, with_gradient)


@_streamed.register_fake
def _(points: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    *_, dtype, with_gradient = settings
    value = points.new_empty(points.shape[:-2], dtype=dtype)
    return value, points.new_empty(points.shape if with_gradient else (0,))


def checked(points: Tensor) -> Tensor:
    if not isinstance(points, Tensor):
        raise TypeError(
            f"points={type(points).__name__}: give a tensor [..., N, D]; that of a layer is layer.weight.flatten(1)"
        )
    if points.ndim < 2 or points.shape[-1] == 0 or not points.is_floating_point():
        raise ValueError(
            f"points of shape {tuple(points.shape)} and type {points.dtype}: give real floating-point [..., N, D]"
        )
    return lift(points)


def _with_sides(nearest: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
    """Squared chords to the partner and to its antipode."""
    rest, same_side = 4 - nearest, side > 0
    return torch.where(same_side, nearest, rest), torch.where(same_side, rest, nearest)


def _without_self(each: Tensor) -> Tensor:
    return torch.where(torch.eye(each.shape[-1], dtype=torch.bool, device=each.device), 0.0, each)


def energy(
    points: Tensor,
    s: float = 2.0,
    *,
    half_space: bool = False,
    distance: Distance = "chord",
    reduction: Reduction = "mean",
    norm_eps: float = 0.0,
) -> Tensor:
    """The energy of the directions of `points` [..., N, D] -> [...], zero for a single point.

    With z the distance of two directions, f(z) = z^-s for s > 0 and -log z for s = 0; "sum" adds f over all ordered
    pairs i != j (Eq. 1), "mean" divides by their number N (N - 1). `distance` is the chord |a - b| or the angle in
    radians. `half_space` takes the 2N points +-w_i, antipodes included (Appendix B). float64 is computed and returned
    in float64, every lower precision in float32. A zero point counts as orthogonal to all others, with gradient zero; a
    point that is not finite makes it NaN. `norm_eps` is added to squared norms as in the reference code, which makes
    the energy depend on scale: leave it 0.

    Duplicates have a finite energy and a gradient of zero: f goes on as a straight line in z^2 below z = 1e-4 (1e-8 in
    float64), and where s is large from about 1e30 (1e200) on: below z = 1e-3 at s = 10, below 0.03 at s = 20.
    """
    return Energy(s, half_space, distance, reduction, norm_eps)(points)
