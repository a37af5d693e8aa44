"""The geometry of one set of neurons, its pairs visited block by block, so that no N x N matrix is held."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from comhe.bounds import lower_bound, uniform_expectation, with_antipodes
from comhe.energies import Energy
from comhe.pairs import sphere
from comhe.products import product

_BLOCK_ELEMENTS = 1 << 20  # pairs held at a time, and numbers while differences of close pairs are formed
# Below this squared distance 2 - 2 cos has lost digits to cancellation, and the difference is taken.
_CANCELLED = {torch.float64: 1e-3, torch.float32: 0.1}


class Geometry(NamedTuple):
    """What is known of the pairs of one set of neurons."""

    energy: float
    expected: float
    bound: float
    nearest: float  # the least squared chord, infinite without a pair
    num_close: int


def measure(neurons: Tensor, energy: Energy, limit: float) -> Geometry:
    """Finite neurons [N, D]; a pair is close below the squared chord `limit`. Holds O(N D) and a block of pairs."""
    count, dim = neurons.shape
    if count < 2:
        return Geometry(0.0, 0.0, 0.0, math.inf, 0)
    half_space, dtype = energy.half_space, neurons.dtype
    unit, lacking = sphere(neurons)
    total = unit.new_zeros(())
    least = unit.new_full((), math.inf)
    num_close = torch.zeros((), dtype=torch.int64, device=unit.device)
    size = max(1, _BLOCK_ELEMENTS // count)
    for start in range(0, count - 1, size):
        near, same_side, later = _block(unit, start, size)
        chord = near if half_space else torch.where(same_side, near, 4 - near)
        x, y = chord.to(dtype), (4 - chord).to(dtype)
        each = energy._potential(x, y)
        if half_space:
            each = each + energy._potential(y, x)
        total += torch.where(later, each, 0.0).sum(dtype=unit.dtype)
        apart = torch.where(later, chord, math.inf)
        least = torch.minimum(least, apart.min())
        num_close += (apart < limit).sum()
    mean = 2 * float(total) / (count * (count - 1))
    if half_space:
        mean = with_antipodes(count, mean / 2, replace(energy, half_space=False))
    distance = energy.distance
    expected = uniform_expectation(dim, energy.s, half_space=half_space, distance=distance, num_points=count)
    # Zero neurons, orthogonal to all, are as neurons in dimensions of their own.
    bound = lower_bound(count, dim + int((lacking > 0).sum()), energy.s, half_space=half_space, distance=distance)
    return Geometry(mean, expected, bound, float(least), int(num_close))


def _block(unit: Tensor, start: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows `start` to `start + size` against the rows from `start` on.

    Squared chord to the nearer of +-partner, whether that is the partner itself, and whether the partner comes later,
    so that each pair is seen once.
    """
    rows, partners = unit[start : start + size], unit[start:]
    cosine = product(rows, partners.mT)
    near, same_side = 2 - 2 * cosine.abs(), cosine >= 0
    later = torch.ones_like(same_side).triu(1)
    i, j = (later & (near < _CANCELLED[unit.dtype])).nonzero(as_tuple=True)
    portion = max(1, _BLOCK_ELEMENTS // unit.shape[-1])
    for a, b in zip(i.split(portion), j.split(portion), strict=True):
        sign = torch.where(same_side[a, b], 1.0, -1.0).to(unit.dtype).unsqueeze(-1)
        near[a, b] = (rows[a] - sign * partners[b]).square().sum(dim=-1)
    return near, same_side, later
