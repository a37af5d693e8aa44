"""The contract of a projection.

A projection is a rule without state: it draws a basis, may move it between steps, and turns neurons into views. The
bases belong to `Regularizer`. A new projection is a new file in this folder; nothing else is edited, and the contract
tests run on it at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor

from comhe.energies import Energy
from comhe.products import product
from comhe.random import Stream

Basis = tuple[Tensor, ...]


class Layer(Protocol):
    """What a projection may know of a layer when it draws a basis."""

    @property
    def name(self) -> str: ...
    @property
    def num_neurons(self) -> int: ...
    @property
    def fan_in(self) -> int: ...
    @property
    def taps(self) -> int:
        """Weights per input channel: 9 for a 3 x 3 convolution, 1 for a linear layer."""
        ...


class Map(NamedTuple):
    """A linear view: left @ neurons[:, columns] @ right', one for each c, each part optional."""

    left: Tensor | None = None  # [C, points, N]
    columns: Tensor | None = None  # [C, width] int64
    right: Tensor | None = None  # [C, K, width]
    share: float = 1.0

    def __call__(self, neurons: Tensor) -> Tensor:
        """[..., N, D] -> [..., C, points, K]."""
        if self.columns is not None:
            view = neurons[..., self.columns].movedim(-2, -3)
        else:
            view = neurons.unsqueeze(-3)
        if self.right is not None:
            view = product(view, self.right.mT)
        return view if self.left is None else product(self.left, view)


@dataclass(frozen=True)
class Projection:
    """Neurons [..., N, D] + basis -> views: point sets [..., C, points, dim] whose energy is minimised.

    All methods are pure. The energy of a layer is the sum over views of share x aggregate over C. A basis is drawn by
    the round alone, so that ranks agree and a resumed run continues.
    """

    scale_invariance: ClassVar[Literal["neuron", "global", "none"]] = "neuron"
    trainable: ClassVar[bool] = False  # bases are parameters, moved by the network's optimizer

    @property
    def redraw_every(self) -> int | None:
        """Rounds between two draws unless the regularizer says otherwise; None: never."""
        return 1

    @property
    def advance_every(self) -> int | None:
        """Rounds between two calls of `advance`; None where the basis only changes by being redrawn."""
        return None

    @property
    def uses_lr(self) -> bool:
        """Whether the network's learning rate enters."""
        return False

    def basis_key(self, layer: Layer) -> Hashable:
        """Layers of equal keys share a basis."""
        return layer.fan_in

    def limit(self, layer: Layer) -> int:
        """The largest `dim` that reduces this layer."""
        return layer.fan_in

    def draw(self, layer: Layer, stream: Stream) -> Basis:
        return ()

    def advance(self, basis: Basis, neurons: Sequence[Tensor], energy: Energy, lr: Tensor) -> Basis:
        """The basis after a step between two rounds; `neurons` has one matrix for every layer that shares it."""
        return basis

    def refine(self, basis: Basis, neurons: Sequence[Tensor], energy: Energy, lr: Tensor) -> Basis:
        """The basis after unrolled steps, differentiable in the basis and the neurons."""
        return basis

    def maps(self, basis: Basis) -> tuple[Map, ...] | None:
        """The views as linear maps; None where they are not linear, or never formed as matrices."""
        return None

    def shares(self, basis: Basis) -> tuple[float, ...]:
        """The weight of each view in the energy of a layer."""
        maps = self.maps(basis)
        return (1.0,) if maps is None else tuple(m.share for m in maps)

    def views(self, neurons: Tensor, basis: Basis) -> tuple[Tensor, ...]:
        """[..., N, D] -> one or more [..., C, points, dim]. Overridden only where `maps` does not serve."""
        maps = self.maps(basis)
        if maps is None:
            raise TypeError(f"{type(self).__name__} defines neither maps nor views: it must define one of them")
        return tuple(m(neurons) for m in maps)


def at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int):
            raise TypeError(f"{name}={count!r}: choose a whole number")
        if count < 1:
            raise ValueError(f"{name}={count}: choose at least 1")
