from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from comhe.pairs import sphere
from comhe.products import lift, product
from comhe.projections._base import Basis, Layer, Projection, at_least_one
from comhe.random import Stream


@dataclass(frozen=True)
class MLP(Projection):
    """The nonlinear g of Eq. 3: a random perceptron with one hidden layer, of the unit neuron.

    g(w) = V a(U w/|w|) with standard normal U [hidden, fan_in] and V [dim, hidden], a the activation.
    """

    dim: int = 30
    num_views: int = 5
    _: KW_ONLY
    hidden: int = 64
    activation: Literal["relu", "tanh"] = "relu"

    def __post_init__(self) -> None:
        at_least_one(dim=self.dim, num_views=self.num_views, hidden=self.hidden)
        if self.activation not in ("relu", "tanh"):
            raise ValueError(f"activation={self.activation!r}: choose 'relu' or 'tanh'")

    def draw(self, layer: Layer, stream: Stream) -> Basis:
        first = stream.normal(self.num_views, self.hidden, layer.fan_in)
        return first, stream.normal(self.num_views, self.dim, self.hidden)

    def views(self, neurons: Tensor, basis: Basis) -> tuple[Tensor, ...]:
        first, second = basis
        unit = sphere(neurons)[0].to(lift(neurons).dtype)
        hidden = product(unit.unsqueeze(-3), first.mT)
        hidden = torch.relu(hidden) if self.activation == "relu" else torch.tanh(hidden)
        return (product(hidden, second.mT),)
