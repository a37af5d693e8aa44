"""A rule says, for the layers it matches, which projection, which energy or penalty, and how strong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from comhe import penalties
from comhe.bounds import uniform_expectation
from comhe.energies import Distance, Energy, Reduction
from comhe.names import did_you_mean
from comhe.projections import Basis, Projection
from comhe.projections.identity import Identity
from comhe.selection import Selection

Penalty = Callable[[Tensor], Tensor]
Schedule = Callable[[Tensor], Tensor | float]


def _mean(energies: Tensor) -> Tensor:
    return energies.mean(dim=-1)


def _max(energies: Tensor) -> Tensor:
    return energies.amax(dim=-1)


def _median(energies: Tensor) -> Tensor:
    return energies.median(dim=-1).values


def _log_mean_exp(energies: Tensor) -> Tensor:
    """Between the mean and the max, and smooth."""
    return torch.logsumexp(energies, dim=-1) - math.log(energies.shape[-1])


# Functions with names, so that a regularizer can be pickled.
AGGREGATES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": _mean,
    "max": _max,
    "median": _median,
    "logmeanexp": _log_mean_exp,
}


@dataclass(frozen=True)
class Rule:
    """First match wins.

    where: glob on names, module type, predicate of a layer, or several of these.
    weight: a number, or a schedule: a function of the round (a 0-d integer tensor), evaluated by `advance()`.
    aggregate: how the C views of a projection become one number: mean, max, median, logmeanexp, or a function
        [..., C] -> [...].
    penalty: takes the energy's place: orthogonal, orthonormal, srip, mma, or a function [..., N, D] -> [...].
    relative: divides the energy by its expectation under uniform points, so that 1 means "no better than chance" in
        every layer, whatever its size.
    """

    where: Selection = "*"
    projection: Projection = field(default_factory=Identity)
    s: float = 2.0
    half_space: bool = True
    weight: float | Schedule = 1.0
    aggregate: str | Callable[[Tensor], Tensor] = "mean"
    distance: Distance = "chord"
    reduction: Reduction = "mean"
    norm_eps: float = 0.0
    penalty: str | Penalty | None = None
    relative: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.projection, Projection):
            raise TypeError(f"projection={self.projection!r}: give a projection, as comhe.projections.Gaussian(dim=30)")
        if isinstance(self.aggregate, str) and self.aggregate not in AGGREGATES:
            raise ValueError(f"aggregate={self.aggregate!r}{did_you_mean(self.aggregate, AGGREGATES)}")
        if isinstance(self.penalty, str) and self.penalty not in penalties.PENALTIES:
            raise ValueError(f"penalty={self.penalty!r}{did_you_mean(self.penalty, penalties.PENALTIES)}")
        if not callable(self.weight) and not (isinstance(self.weight, int | float) and math.isfinite(self.weight)):
            raise ValueError(f"weight={self.weight!r}: choose a finite number, or a function of the round")
        if self.relative and self.penalty is not None:
            raise ValueError("relative=True: only an energy has a uniform expectation, a penalty has none")
        # The energy's settings are checked now, not at the first step; and compiled code can read these, not make them.
        _ = self.energy, self._penalty, self.aggregated

    @cached_property
    def energy(self) -> Energy:
        return Energy(self.s, self.half_space, self.distance, self.reduction, self.norm_eps)

    @cached_property
    def _penalty(self) -> Penalty | None:
        if self.penalty is None:
            return None
        return penalties.PENALTIES[self.penalty] if isinstance(self.penalty, str) else self.penalty

    @cached_property
    def aggregated(self) -> Callable[[Tensor], Tensor]:
        return AGGREGATES[self.aggregate] if isinstance(self.aggregate, str) else self.aggregate

    def value(self, view: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., C, points, dim], in the widest type, -> 0-d in `dtype`."""
        values = self.energy(view, dtype) if self._penalty is None else self._penalty(view).to(dtype)
        return self.over_sets(self.aggregated(values))

    def over_sets(self, values: Tensor) -> Tensor:
        """One number for a layer whose weight holds several separate sets of neurons: [...] -> 0-d."""
        mean = self.penalty is None and self.reduction == "mean"
        return values.mean() if mean else values.sum()

    def describe(self) -> str:
        if isinstance(self.penalty, str):
            return self.penalty
        if isinstance(self.penalty, partial):
            settings = ", ".join(f"{key}={value!r}" for key, value in self.penalty.keywords.items())
            return f"{self.penalty.func.__name__}({settings})"
        if self.penalty is not None:
            return getattr(self.penalty, "__name__", "penalty")
        space = "half space" if self.half_space else "full space"
        extra = "" if self.distance == "chord" else ", angle"
        return f"E_{self.s:g} {space}{extra}"


RedrawEvery = int | None | Literal["auto"]


def view_weights(rule: Rule, neurons: Tensor, basis: Basis) -> list[float]:
    """The factor of each view in the value of a layer: its share, over its uniform expectation if asked for."""
    shares = rule.projection.shares(basis)
    if not rule.relative:
        return list(shares)
    # So that every layer is at 1 by chance: views that add up are averaged, and so are sets that would be added.
    num_sets = math.prod(neurons.shape[:-2]) if rule.reduction == "sum" else 1
    weights = []
    for share, view in zip(shares, rule.projection.views(neurons, basis), strict=True):
        count, dim = view.shape[-2:]
        expected = uniform_expectation(
            dim, rule.s, half_space=rule.half_space, distance=rule.distance, num_points=count
        )
        if count == 1:
            expected = 1.0  # the energy is 0 by itself
        if not 0 < expected < math.inf:
            remedy = "dim > s + 1" if expected == math.inf else "s > 0"
            raise ValueError(
                f"relative=True: {rule.describe()} of uniform points in {dim} dimensions is {expected}; "
                f"choose {remedy} or relative=False"
            )
        points = 2 * count if rule.half_space else count
        pairs = points * (points - 1) if rule.reduction == "sum" else 1
        weights.append(share / (sum(shares) * expected * pairs * num_sets))
    return weights
