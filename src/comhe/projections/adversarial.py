from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from comhe.energies import Energy
from comhe.products import product, widest
from comhe.projections._stepped import Stepped


@dataclass(frozen=True)
class Adversarial(Stepped):
    """Adversarial projection, Adv-CoMHE (Eq. 7): P ascends the energy that the neurons descend.

    The paper calls it unstable. `ascend_full_space` lets P ascend the full-space energy while the neurons descend
    the half-space one, as the reference code does.

    The slope of a mean energy in a matrix of standard normals is small, hence the large default step.
    """

    step_size: float | None = 100.0
    ascend_full_space: bool = False

    def gradient(self, matrix: Tensor, neurons: Sequence[Tensor], energy: Energy) -> Tensor:
        if self.ascend_full_space:
            energy = replace(energy, half_space=False)
        total = torch.zeros_like(matrix)
        for layer in neurons:
            wide = layer.to(widest(layer.device))  # close neurons keep their distance
            points = product(wide.unsqueeze(-3), matrix.mT)  # [..., C, N, dim]
            slope = product(energy.gradient(points, layer.dtype).to(layer.dtype).mT, layer.unsqueeze(-3))
            total = total - slope.sum_to_size(matrix.shape)
        return total
