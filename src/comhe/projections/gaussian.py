from __future__ import annotations

from dataclasses import dataclass

from comhe.projections._base import Basis, Layer, Map, Projection, at_least_one
from comhe.random import Stream


@dataclass(frozen=True)
class Gaussian(Projection):
    """Random projection, RP-CoMHE (Eq. 4): C matrices P_c [dim, fan_in] with independent standard normal entries."""

    dim: int = 30
    num_views: int = 5

    def __post_init__(self) -> None:
        at_least_one(dim=self.dim, num_views=self.num_views)

    def draw(self, layer: Layer, stream: Stream) -> Basis:
        return (stream.normal(self.num_views, self.dim, layer.fan_in),)

    def maps(self, basis: Basis) -> tuple[Map, ...]:
        return (Map(right=basis[0]),)
