"""Low-rank bilateral projection (Appendix E): W = Y2 (P1 Y2)^-1 Y1 with Y1 and Y2 learned and P1 fixed.

In the paper's orientation neurons are columns: W is [m, n], m the fan-in and n the number of neurons. The
layer's weight is its transpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from comhe.parametrizations.registration import NeuronParametrization, Report, register
from comhe.products import lift, product, widest
from comhe.random import Stream

Layer = TypeVar("Layer", bound=nn.Module)


@dataclass(frozen=True)
class LowRankReport(Report):
    """How much the solve multiplies rounding errors."""

    rank: int
    condition: float  # of P1 Y2; above 1 / machine epsilon the weight is noise


class LowRank(NeuronParametrization):
    """The weight of rank r from y1 [r, N] and y2 [D, r], with p1 [r, D] a fixed Gaussian matrix.

    Assigning to the layer's weight starts again, with the same P1 and P2.
    """

    p1: Tensor

    def __init__(self, module: nn.Module, name: str, rank: int, seed: int, key: str | None) -> None:
        super().__init__(module, name)
        limit = min(self.fan_in, self.num_neurons)
        if not 1 <= rank <= limit:
            raise ValueError(
                f"{self.label}: rank={rank}: choose from 1 to {limit}, the smaller of fan-in {self.fan_in} "
                f"and {self.num_neurons} neurons"
            )
        self.rank, self.seed = rank, seed
        self.key = f"low-rank {key if key is not None else tuple(self.shape)}"
        weight = getattr(module, name)
        # Scaled so that both projections keep the size of a neuron.
        p1 = Stream(seed, f"{self.key} left", 0, weight.device).normal(rank, self.fan_in) / self.fan_in**0.5
        self.register_buffer("p1", p1.to(weight.dtype))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Y1 = P1 W and Y2 = W P2 of the weight's best approximation of rank r, which they reproduce.

        Of a weight of full rank they would give an oblique projection, up to a thousand times as large as the weight.
        """
        neurons = self.rows(weight)  # W' [N, D]
        p2 = Stream(self.seed, f"{self.key} right", 0, weight.device).normal(self.num_neurons, self.rank)
        left, values, right = torch.linalg.svd(neurons.mT.to(widest(weight.device)), full_matrices=False)
        # What rounding adds to a weight of lower rank stays below this tolerance.
        found = int((values > 8 * torch.finfo(lift(weight).dtype).eps * values[0]).sum())
        if found < self.rank:
            raise ValueError(
                f"{self.label}: rank={self.rank} is above the weight's own rank {found}; choose a lower "
                "rank or initialise the weight first"
            )
        left, right = left[:, : self.rank] * values[: self.rank], right[: self.rank]
        y1 = product(product(self.p1, left), right)
        y2 = product(left, product(right, p2 / self.num_neurons**0.5))
        return y1.to(self.p1.dtype), y2.to(self.p1.dtype)

    def forward(self, y1: Tensor, y2: Tensor) -> Tensor:
        """y1 [r, N], y2 [D, r] -> the weight in y1's type.

        P1 Y2 is solved in the device's widest type: its condition multiplies rounding errors, and a
        factorisation obeys TF32 flags.
        """
        wide = widest(y1.device)
        core = product(self.p1.to(wide), y2)  # [r, r]
        with torch.autocast(core.device.type, enabled=False):
            # Unchecked, as a check would make the host wait: where P1 Y2 is singular the weight is not finite.
            coefficients = torch.linalg.solve_ex(core, y1.to(wide), check_errors=False).result  # [r, N]
        return self.weight(product(coefficients.mT.to(lift(y1).dtype), y2.mT).to(y1.dtype))

    def factors(self, *originals: Tensor) -> dict[str, Tensor]:
        """The points to regularise in place of the neurons: the columns of Y1, [N, r], and of Y2, [r, D]."""
        y1, y2 = originals
        return {"y1": y1.mT, "y2": y2.mT}

    def condition(self, *originals: Tensor) -> Tensor:
        """The condition number of P1 Y2, infinite where it is singular."""
        _, y2 = originals
        wide = widest(y2.device)
        values = torch.linalg.svdvals(product(self.p1.to(wide), y2.to(wide)))
        return torch.where(values[-1] > 0, values[0] / values[-1], torch.inf)

    def measure(self, layer: str, *originals: Tensor) -> LowRankReport:
        """The rank and the condition of P1 Y2."""
        return LowRankReport(layer, self.rank, float(self.condition(*originals)))

    def extra_repr(self) -> str:
        return f"rank={self.rank}, neurons={self.num_neurons}, fan_in={self.fan_in}"


def low_rank(module: Layer, rank: int, name: str = "weight", *, seed: int = 0, key: str | None = None) -> Layer:
    """Replace a layer's weight by its low-rank form with rank (D + N) learned numbers in place of D N.

    `module` is changed in place and returned; call this before the optimizer is built. P1 and P2 are fixed by
    the seed and `key` (the weight's shape unless given, so layers of one shape share them). The start is the best
    approximation of the weight of that rank. `report` gives the condition of P1 Y2.
    Rows are neurons as in `rotate`; tied and frozen weights are treated as there.
    """
    register(module, name, LowRank(module, name, rank, seed, key))
    return module
