"""Rotation training (Appendix B): the neurons stay fixed, one orthogonal matrix a layer is learned.

Angles between neurons, and with them the hyperspherical energy, stay what they were at the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from comhe.energies import energy
from comhe.names import did_you_mean
from comhe.parametrizations.orthogonal import MAPS, MapName
from comhe.parametrizations.registration import NeuronParametrization, Report, register
from comhe.products import lift, product, widest

Layer = TypeVar("Layer", bound=nn.Module)


@dataclass(frozen=True)
class RotationReport(Report):
    """How far the layer is from a rotation of its fixed neurons; both are zero but for rounding."""

    orthogonality_error: float  # ||R'R - I||_F
    energy_drift: float  # mean energy (s = 2, full space) of the current neurons less that of the fixed ones


class Rotation(NeuronParametrization):
    """Neurons R w_i: the w_i are fixed, the rows of `neurons` [N, D]; R = map(X) with X [D, D] learned.

    Assigning to the layer's weight fixes new neurons and starts again at R = I.
    """

    neurons: Tensor

    def __init__(self, module: nn.Module, name: str, map: MapName) -> None:
        super().__init__(module, name)
        self.map = map
        weight = getattr(module, name).detach()
        self.register_buffer("neurons", self.rows(weight).clone(memory_format=torch.contiguous_format))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor]:
        """Fix `weight` as the neurons; the X at which R = I."""
        self.neurons.copy_(self.rows(weight))
        return (MAPS[self.map].start(self.fan_in).to(self.neurons),)

    def forward(self, learned: Tensor) -> Tensor:
        """X [D, D] -> the weight, computed in at least float32 and returned in X's type."""
        rows = product(self.neurons, self.orthogonal(learned).mT)  # [N, D]
        return self.weight(rows.to(learned.dtype))

    def orthogonal(self, learned: Tensor) -> Tensor:
        """X [D, D] -> R [D, D] in at least float32, autocast or not."""
        with torch.autocast(learned.device.type, enabled=False):
            return MAPS[self.map].apply(lift(learned))

    def measure(self, layer: str, *originals: Tensor) -> RotationReport:
        """||R'R - I|| and the energy's drift, measured in the widest type."""
        (learned,) = originals
        wide = widest(learned.device)
        matrix = self.orthogonal(learned).to(wide)
        identity = torch.eye(self.fan_in, dtype=wide, device=matrix.device)
        current = self.rows(self(learned))
        drift = energy(current.to(wide)) - energy(self.neurons.to(wide))
        return RotationReport(layer, float((product(matrix.mT, matrix) - identity).norm()), float(drift))

    def extra_repr(self) -> str:
        return f"map={self.map!r}, neurons={self.num_neurons}, fan_in={self.fan_in}"


def rotate(module: Layer, name: str = "weight", *, map: MapName = "gram-schmidt") -> Layer:
    """Train a layer by rotating its neurons, the rows of its weight: they are fixed, a matrix X is learned.

    `module` is changed in place and returned; call this before the optimizer is built. The layer starts at
    R = I with exactly the weights it has. `map` makes R of X: "gram-schmidt" (the paper's), "cayley",
    "householder" or "exponential". X is [D, D] with D the fan-in (in channels x kernel, so 576 for 64
    channels of 3x3), and each forward pass costs O(D^3): a layer with a large fan-in pays for it in memory
    and time. Weight decay on X is not needed. A grouped convolution's filters share one R; transposed
    convolutions are served for groups=1. A frozen weight may be rotated: X is trained all the same. A tied
    weight is rotated here alone.
    """
    if map not in MAPS:
        raise ValueError(f"map={map!r} is no orthogonal map{did_you_mean(map, MAPS)}")
    register(module, name, Rotation(module, name, map))
    return module
