"""What angle-preserving and adversarial projections share: a matrix moved by gradient steps of its own."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from torch import Tensor

from comhe.energies import Energy
from comhe.projections._base import Basis, Layer, Map, Projection, at_least_one
from comhe.random import Stream


@dataclass(frozen=True)
class Stepped(Projection):
    """P [C, dim, fan_in], drawn as in `Gaussian`, descends an objective of its own that `gradient` gives.

    Every `advance_every` rounds P moves `num_steps` steps. "unrolled" moves it `num_unrolled` steps more inside the
    loss, differentiated through; "alternating" does not. `step_size=None` takes the network's learning rate.
    `weight_decay` adds (weight_decay / 2) |P|^2 to the objective of the steps between rounds.
    """

    dim: int = 30
    num_views: int = 1
    _: KW_ONLY
    num_steps: int = 1
    step_size: float | None = 0.1
    advance_every: int = 1
    mode: Literal["alternating", "unrolled"] = "unrolled"
    num_unrolled: int = 1
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        at_least_one(
            dim=self.dim,
            num_views=self.num_views,
            num_steps=self.num_steps,
            advance_every=self.advance_every,
            num_unrolled=self.num_unrolled,
        )
        if self.mode not in ("alternating", "unrolled"):
            raise ValueError(f"mode={self.mode!r}: choose 'alternating' or 'unrolled'")
        if self.step_size is not None and not 0 < self.step_size < math.inf:
            raise ValueError(f"step_size={self.step_size}: choose a positive number, or None for the learning rate")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay={self.weight_decay}: choose 0 or a small positive number")

    @abstractmethod
    def gradient(self, matrix: Tensor, neurons: Sequence[Tensor], energy: Energy) -> Tensor:
        """The derivative in P of what P descends, in closed form: differentiable and fit for any engine."""

    @property
    def redraw_every(self) -> int | None:
        return 1000

    @property
    def uses_lr(self) -> bool:
        return self.step_size is None

    def draw(self, layer: Layer, stream: Stream) -> Basis:
        return (stream.normal(self.num_views, self.dim, layer.fan_in),)

    def maps(self, basis: Basis) -> tuple[Map, ...]:
        return (Map(right=basis[0]),)

    def advance(self, basis: Basis, neurons: Sequence[Tensor], energy: Energy, lr: Tensor) -> Basis:
        return (self._descend(basis[0], neurons, energy, lr, self.num_steps, self.weight_decay),)

    def refine(self, basis: Basis, neurons: Sequence[Tensor], energy: Energy, lr: Tensor) -> Basis:
        if self.mode == "alternating":
            return basis
        return (self._descend(basis[0], neurons, energy, lr, self.num_unrolled, 0.0),)

    def _descend(
        self, matrix: Tensor, neurons: Sequence[Tensor], energy: Energy, lr: Tensor, num_steps: int, decay: float
    ) -> Tensor:
        step = lr if self.step_size is None else self.step_size
        for _ in range(num_steps):
            slope = self.gradient(matrix, neurons, energy) + decay * matrix
            matrix = matrix - step * slope
        return matrix
