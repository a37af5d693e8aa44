from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Literal

from comhe.projections._base import Basis, Layer, Map, Projection, at_least_one
from comhe.random import Stream


@dataclass(frozen=True)
class Bilateral(Projection):
    """Bilateral projection, BP-CoMHE (Appendix E): the energies of P_1 W and of W P_2 are added.

    With neurons as rows, the N points of the first view are neurons of `dim` entries; the `dim` points of the second
    are random mixtures of all neurons. The second depends on the neurons' norms, so raw weights are projected and only
    a common factor leaves the energy as it is.
    """

    scale_invariance: ClassVar[Literal["neuron", "global", "none"]] = "global"

    dim: int = 30
    num_views: int = 1

    def __post_init__(self) -> None:
        at_least_one(dim=self.dim, num_views=self.num_views)

    def basis_key(self, layer: Layer) -> Hashable:
        return layer.num_neurons, layer.fan_in

    def limit(self, layer: Layer) -> int:
        return min(layer.num_neurons, layer.fan_in)

    def draw(self, layer: Layer, stream: Stream) -> Basis:
        right = stream.normal(self.num_views, self.dim, layer.fan_in)
        left = stream.normal(self.num_views, self.dim, layer.num_neurons)
        return left, right

    def maps(self, basis: Basis) -> tuple[Map, ...]:
        left, right = basis
        return Map(right=right), Map(left=left)
