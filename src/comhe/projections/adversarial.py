from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from comhe.energies import Energy
from comhe.products import product, widest
from comhe.projections._stepped import Stepped


@dataclass(frozen=True, kw_only=True)
class Adversarial(Stepped):
    """Adversarial projection, Adv-CoMHE (Eq. 7): P ascends the energy that the neurons descend.

    The paper calls it unstable: the energy has no upper bound, and where P moves faster than the neurons can answer the
    loss grows a thousandfold. The default step, the first learning rate of the reference code, is one that they kept up
    with at rates from 0.1 to 0.001; larger ones make a stronger adversary.
    `ascend_full_space` lets P ascend the full-space energy while the neurons descend the half-space one, as the
    reference code does.

    The energy is that of the rule: of a layer with several sets of neurons the mean over them, or with
    `reduction="sum"` the sum, which takes a far smaller step.
    """

    ascend_full_space: bool = False

    def gradient(self, matrix: Tensor, neurons: Sequence[Tensor], energy: Energy) -> Tensor:
        if self.ascend_full_space:
            energy = replace(energy, half_space=False)
        total = torch.zeros_like(matrix)
        for layer in neurons:
            wide = layer.to(widest(layer.device)).unsqueeze(-3)  # close neurons keep their distance, small ones a slope
            points = product(wide, matrix.mT)  # [..., C, N, dim]
            slope = product(energy.gradient(points, layer.dtype).mT, wide).sum_to_size(matrix.shape)
            num_sets = math.prod(layer.shape[:-2]) if energy.reduction == "mean" else 1
            total = total - (slope / num_sets).to(layer.dtype)
        return total
