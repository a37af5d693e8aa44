from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from comhe.projections._base import Basis, Layer, Projection, at_least_one
from comhe.random import Stream


@dataclass(frozen=True)
class CountSketch(Projection):
    """Count-sketch (Charikar, Chen and Farach-Colton 2002): each input goes to one random place with a random sign.

    One addition an input, no matrix. With dim near fan_in some places stay empty.
    """

    dim: int = 30
    num_views: int = 5

    def __post_init__(self) -> None:
        at_least_one(dim=self.dim, num_views=self.num_views)

    def draw(self, layer: Layer, stream: Stream) -> Basis:
        places = stream.integers(self.dim, self.num_views, layer.fan_in)
        return places, stream.signs(self.num_views, layer.fan_in)

    def views(self, neurons: Tensor, basis: Basis) -> tuple[Tensor, ...]:
        places, signs = basis
        signed = neurons.unsqueeze(-3) * signs.unsqueeze(-2)  # [..., C, N, D]
        index = places.unsqueeze(-2).expand(signed.shape)
        return (signed.new_zeros(*signed.shape[:-1], self.dim).scatter_add(-1, index, signed),)
