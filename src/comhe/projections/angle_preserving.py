from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from comhe.energies import Energy
from comhe.pairs import sphere
from comhe.products import lift, product
from comhe.projections._stepped import Stepped


@dataclass(frozen=True)
class AnglePreserving(Stepped):
    """Angle-preserving projection, AP-CoMHE (Eq. 5): P descends sum_{i != j} (t(w_i, w_j) - t(P w_i, P w_j))^2.

    t is the cosine or, as printed, the angle (`target`). The sum runs over all layers that share P. `root` takes its
    square root, the Frobenius norm of the reference code.
    """

    step_size: float | None = 0.3
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
            unit, projected, _ = _unit_points(matrix, layer)
            error = self._error(_cosines(unit).unsqueeze(-3), _cosines(projected))
            squares = (error * error).sum(dim=(-2, -1))
            total = total + (squares.sqrt() if self.root else squares).sum_to_size(total.shape)
        return total

    def gradient(self, matrix: Tensor, neurons: Sequence[Tensor], energy: Energy) -> Tensor:
        total = torch.zeros_like(matrix)
        for layer in neurons:
            unit, projected, norm = _unit_points(matrix, layer)
            cosine = _cosines(projected)
            error = self._error(_cosines(unit).unsqueeze(-3), cosine)
            if self.root:
                squares = (error * error).sum(dim=(-2, -1), keepdim=True)
                weight = error * torch.where(squares > 0, squares, 1.0).rsqrt()
            else:
                weight = 2 * error
            if self.target == "angle":
                weight = -weight * (1 - cosine * cosine).clamp(min=_SMALLEST_SINE).rsqrt()
            force = 2 * product(weight, projected)  # every pair counts twice, and so does its symmetric partner
            force = (force - (force * projected).sum(dim=-1, keepdim=True) * projected) / norm
            slope = product(force.mT, unit.unsqueeze(-3))
            total = total + slope.sum_to_size(matrix.shape)
        return total

    def _error(self, wanted: Tensor, found: Tensor) -> Tensor:
        if self.target == "angle":
            wanted, found = _angles(wanted), _angles(found)
        same = torch.eye(found.shape[-1], dtype=torch.bool, device=found.device)
        return torch.where(same, 0.0, found - wanted)


# Squared sine below which the angle's slope is held: equal neurons stay equal under any P, so nothing is lost there.
_SMALLEST_SINE = 1e-6


def _unit_points(matrix: Tensor, neurons: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unit neurons [..., N, D], their unit projections [..., C, N, dim] and the norms of these, 1 where they vanish."""
    unit = sphere(neurons)[0].to(lift(neurons).dtype)
    points = product(unit.unsqueeze(-3), matrix.mT)
    square = (points * points).sum(dim=-1, keepdim=True)
    norm = torch.where(square > 0, square, 1.0).sqrt()
    return unit, points / norm, norm


def _cosines(unit: Tensor) -> Tensor:
    return product(unit, unit.mT)


def _angles(cosines: Tensor) -> Tensor:
    apart, across = (2 - 2 * cosines).clamp(min=_SMALLEST_SINE), (2 + 2 * cosines).clamp(min=_SMALLEST_SINE)
    return 2 * torch.atan2(apart.sqrt(), across.sqrt())
