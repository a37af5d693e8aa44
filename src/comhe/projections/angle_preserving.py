from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from comhe.energies import Energy
from comhe.pairs import Pairs, inverse_norms, pairs, pull, sphere
from comhe.products import lift, product
from comhe.projections._stepped import Stepped

# Below this squared chord the angle is held: its slope in the squared chord has no bound.
_SMALLEST = {torch.float32: 1e-12, torch.float64: 1e-28}


@dataclass(frozen=True, kw_only=True)
class AnglePreserving(Stepped):
    """Angle-preserving projection, AP-CoMHE (Eq. 5): P descends the mean of (t(w_i, w_j) - t(P w_i, P w_j))^2.

    t is the cosine or, as printed, the angle (`target`). The mean is over the pairs i != j of a set of neurons, over
    the sets of a layer and over the layers that share P; Eq. 5 adds up. So one step size serves layers of any width
    and number. `root` descends the Frobenius norm of the reference code, the square root of the sum over pairs (the
    mean over sets, added up over layers): give it a step of 0.1 or None, as there, since its slope is steeper.
    """

    step_size: float | None = 30.0
    target: Literal["cosine", "angle"] = "cosine"
    root: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target not in ("cosine", "angle"):
            raise ValueError(f"target={self.target!r}: choose 'cosine' or 'angle'")

    def objective(self, matrix: Tensor, neurons: Sequence[Tensor]) -> Tensor:
        """What P descends, [C]: one value for each of the C matrices [C, dim, fan_in]."""
        total = matrix.new_zeros(len(matrix))
        for layer in neurons:
            unit, wanted = _directions(layer.unsqueeze(-3))
            _, found = _directions(product(unit, matrix.mT), wanted.nearest.dtype)
            squares = self._error(wanted, found).square().sum(dim=(-2, -1))
            each = squares.sqrt() if self.root else squares * _share(layer, neurons)
            total = total + _over_sets(each, total)
        return total

    def gradient(self, matrix: Tensor, neurons: Sequence[Tensor], energy: Energy) -> Tensor:
        total = torch.zeros_like(matrix)
        for layer in neurons:
            unit, wanted = _directions(layer.unsqueeze(-3))
            points = product(unit, matrix.mT)
            projected, found = _directions(points, wanted.nearest.dtype)
            error = self._error(wanted, found)
            if self.root:
                squares = error.square().sum(dim=(-2, -1), keepdim=True)
                weight = error * torch.where(squares > 0, squares, 1.0).rsqrt()
            else:
                weight = error * (2 * _share(layer, neurons))
            force = 2 * pull(weight * self._slope(found), projected, found)
            force = (force - (force * projected).sum(dim=-1, keepdim=True) * projected) * inverse_norms(points)
            total = total + _over_sets(product(force.mT, unit), total).to(error.dtype)
        return total

    def _error(self, wanted: Pairs, found: Pairs) -> Tensor:
        """t(P w_i, P w_j) - t(w_i, w_j), from squared chords to the nearer of +-partner: exact for close pairs too."""
        turned = (found.side - wanted.side).to(found.nearest.dtype)
        if self.target == "cosine":  # side (1 - nearest / 2)
            return turned - (found.side * found.nearest - wanted.side * wanted.nearest) / 2
        acute, acute_wanted = _acute(found.nearest), _acute(wanted.nearest)  # and beyond a right angle pi less that
        return found.side * acute - wanted.side * acute_wanted - turned * (math.pi / 2)

    def _slope(self, found: Pairs) -> Tensor:
        """The derivative of t in the squared chord to the nearer of +-partner."""
        if self.target == "cosine":
            return -0.5 * found.side
        square = found.nearest.clamp(min=_SMALLEST[found.nearest.dtype])
        return found.side * (square * (4 - square)).rsqrt()


def _share(layer: Tensor, neurons: Sequence[Tensor]) -> float:
    """Of one ordered pair in the mean over pairs and layers."""
    count = layer.shape[-2]
    return 1 / (max(1, count * (count - 1)) * len(neurons))


def _directions(points: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Pairs]:
    """Unit vectors in the widest type, and their pairs in `dtype`."""
    unit, lacking = sphere(points)
    return unit, pairs(unit, lacking, dtype or lift(points).dtype)


def _acute(square: Tensor) -> Tensor:
    """The angle of two directions at this squared chord, 2 at most."""
    square = square.clamp(min=_SMALLEST[square.dtype])
    return 2 * torch.atan2(square.sqrt(), (4 - square).sqrt())


def _over_sets(each: Tensor, like: Tensor) -> Tensor:
    """The mean over leading dimensions that `like` lacks."""
    return each.sum_to_size(like.shape) / (each.numel() / like.numel())
