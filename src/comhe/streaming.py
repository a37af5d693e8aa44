"""Energies of many points: value and gradient tile by tile, in O(N D) memory, every pair visited once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from comhe.closed import energies_of, half_slopes_of, is_closed
from comhe.pairs import CLOSE_COSINE, between, sphere
from comhe.products import full_precision

if TYPE_CHECKING:
    from comhe.energies import Energy

# Above so many pairs (with the leading dimensions) their matrices are not formed: 128 MiB each in float32.
MOST_PAIRS = 1 << 25
# Rows of a tile: its matrices fit a core's second cache, and are large enough for the calls between them.
_ROWS = {"cpu": 512, "cuda": 4096}


def is_streamed(shape: torch.Size) -> bool:
    """Whether the energies of points [..., N, D] are computed tile by tile."""
    return math.prod(shape[:-1]) * shape[-2] > MOST_PAIRS


def stream(points: Tensor, energy: Energy, dtype: torch.dtype, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """[..., N, D] -> the energies [...] in `dtype` and their gradient [..., N, D], empty where it is not asked for."""
    unit, lacking = sphere(points, energy.norm_eps)
    sets = unit.reshape(-1, *unit.shape[-2:]), lacking.reshape(-1, lacking.shape[-1])
    with full_precision(points.device):
        sums = [_Sums(energy, rows, short, dtype, with_gradient) for rows, short in zip(*sets, strict=True)]
    totals = torch.stack([each.total for each in sums]).view(lacking.shape[:-1])
    value = energy.reduced(totals, lacking).to(dtype)
    if not with_gradient:
        return value, points.new_empty(0)
    force = torch.stack([each.force for each in sums]).view(unit.shape)
    of_others = torch.stack([each.of_others for each in sums]).view(lacking.shape) if energy.norm_eps else None
    return value, energy.chained(points, unit, lacking, force, of_others)


class _Sums:
    """Over the pairs of one set [N, D]: their energies, and for each point its force and its sum of slopes."""

    def __init__(self, energy: Energy, unit: Tensor, lacking: Tensor, dtype: torch.dtype, with_gradient: bool) -> None:
        self._energy, self._unit, self._lacking, self._dtype = energy, unit, lacking, dtype
        self._with_gradient = with_gradient
        self.total = unit.new_zeros(())
        self.force = torch.zeros_like(unit) if with_gradient else unit.new_empty(0)
        self.of_others = torch.zeros_like(lacking)
        size = min(len(unit), _ROWS.get(unit.device.type, 4096))
        is_plain = is_closed(energy) and not unit.is_cuda
        narrow = unit.to(dtype) if is_plain else unit
        buffers = unit.new_empty(2, size * size, dtype=dtype) if is_plain else unit.new_empty(2, 0)
        for rows, columns in _tiles(len(unit), size):
            if not (is_plain and self._add_plain(narrow, rows, columns, buffers)):
                self._add(rows, columns)

    def _add(self, rows: slice, columns: slice) -> None:
        """A tile of any law."""
        energy, u, v = self._energy, self._unit[rows], self._unit[columns]
        chord, side, close = between(u, v, self._dtype)
        short, other_short = self._lacking[rows].to(self._dtype), self._lacking[columns].to(self._dtype)
        nearest = chord + (short.unsqueeze(-1) + other_short)
        own = rows == columns
        if own:
            nearest.fill_diagonal_(2)
        each = energy.of_pairs(nearest, side)
        if own:
            each.fill_diagonal_(0)
        times = 1 if own else 2  # in a tile beside the diagonal each pair stands once
        # Each row by itself: of many duplicates the sum may exceed the range of one.
        self.total += times * each.sum(dim=-1).to(self.total.dtype).sum()
        if not self._with_gradient:
            return
        slope = energy.slopes(nearest, side)
        if energy.norm_eps:
            others = slope.fill_diagonal_(0) if own else slope
            for part, dim in ((rows, -1), (columns, -2)):
                self.of_others[part] += times * others.sum(dim=dim, dtype=u.dtype)
        weights = torch.where(chord != 0, slope, 0.0).to(u.dtype if close else self._dtype)
        signed = weights * side
        for part, points, partners, matrix, signs in (
            (rows, u, v, weights, signed),
            (columns, v, u, weights.mT, signed.mT),
        ):
            degree = matrix.sum(dim=-1, keepdim=True).to(u.dtype)
            self.force[part] += times * (degree * points - signs @ partners.to(signs.dtype))

    def _add_plain(self, narrow: Tensor, rows: slice, columns: slice, buffers: Tensor) -> bool:
        """A tile in the closed form of cosines; False where a pair is too close for that."""
        u, v, half_space = narrow[rows], narrow[columns], self._energy.half_space
        cosine, each = (buffer[: len(u) * len(v)].view(len(u), len(v)) for buffer in buffers)
        torch.mm(u, v.mT, out=cosine)
        own = rows == columns
        if own:
            cosine.fill_diagonal_(0)
        if bool(torch.linalg.vector_norm(cosine, torch.inf) > CLOSE_COSINE):
            return False
        energies_of(cosine, half_space, out=each)
        total = each.sum(dim=-1).to(self.total.dtype).sum()
        self.total += total - len(u) * (1.0 if half_space else 0.5) if own else 2 * total
        if self._with_gradient:
            weights = half_slopes_of(cosine, each, half_space)
            self.force[rows] += 2 * (weights @ v)
            if not own:
                self.force[columns] += 2 * (weights.mT @ u)
        return True


def _tiles(count: int, size: int) -> Iterator[tuple[slice, slice]]:
    """The upper triangle of the matrix of pairs."""
    for first in range(0, count, size):
        for second in range(first, count, size):
            yield slice(first, min(first + size, count)), slice(second, min(second + size, count))
