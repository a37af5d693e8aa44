"""An unbiased estimate of an energy from random pairs, for points too many for all pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from comhe.energies import Distance, Energy, checked
from comhe.pairs import sphere
from comhe.random import Stream


class Estimate(NamedTuple):
    """A mean energy [...] and the standard error of it."""

    value: Tensor
    standard_error: Tensor


def sampled_energy(
    points: Tensor,
    num_pairs: int = 1_000_000,
    s: float = 2.0,
    *,
    half_space: bool = False,
    distance: Distance = "chord",
    seed: int = 0,
    round: int | Tensor = 0,
) -> Estimate:
    """The mean `energy` of points [..., N, D], estimated from `num_pairs` pairs drawn with replacement -> [...].

    Unbiased, and so is its gradient; O(N D + num_pairs D) time and memory. The pairs are a function of seed and round.
    The standard error takes the pairs for independent with a finite variance: at s >= (D - 1) / 2 close pairs are so
    rare and so heavy that neither it nor the estimate can be relied on. A single point has energy 0.
    """
    if num_pairs < 2:
        raise ValueError(f"num_pairs={num_pairs}: choose at least 2")
    points, energy = checked(points), Energy(s, half_space, distance)
    count = points.shape[-2]
    if count < 2:
        zero = (points * 0.0).sum(dim=(-2, -1))
        return Estimate(zero, zero.detach())
    stream = Stream(seed, "pairs", round, points.device)
    first = stream.integers(count, num_pairs)
    second = (first + 1 + stream.integers(count - 1, num_pairs)) % count
    unit, lacking = sphere(points)
    a, b = unit[..., first, :], unit[..., second, :]
    side = torch.where((a.detach() * b.detach()).sum(dim=-1) >= 0, 1.0, -1.0)
    missing = lacking[..., first] + lacking[..., second]
    nearest = ((a - side.unsqueeze(-1) * b).square().sum(dim=-1) + missing).to(points.dtype)
    each = energy.of_pairs(nearest, side.to(points.dtype))
    value = energy.reduced(each.mean(dim=-1) * (count * (count - 1)), lacking)
    share = (count - 1) / (count - 0.5) if half_space else 1.0  # of such pairs among all, less the antipodes
    spread = each.detach().std(dim=-1) / num_pairs**0.5
    return Estimate(value.to(points.dtype), (share * spread / 2 if half_space else spread))
