from __future__ import annotations

from dataclasses import dataclass

from comhe.projections._base import Basis, Layer
from comhe.projections.gaussian import Gaussian
from comhe.random import Stream


@dataclass(frozen=True)
class Rademacher(Gaussian):
    """Random projection by fair signs: the entries of P_c are +1 or -1 (Achlioptas 2003), 0-mean and 1-subgaussian."""

    def draw(self, layer: Layer, stream: Stream) -> Basis:
        return (stream.signs(self.num_views, self.dim, layer.fan_in),)
