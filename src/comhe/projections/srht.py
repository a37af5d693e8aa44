from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from comhe.projections._base import Basis, Layer, Map, Projection, at_least_one
from comhe.random import Stream


@dataclass(frozen=True)
class SRHT(Projection):
    """Subsampled randomized Hadamard transform (Ailon and Chazelle 2006): `dim` rows of H diag(signs).

    Rows are zero-padded to the next power of two, 2^m; H is the Hadamard matrix of that size, of which `dim` rows are
    drawn without repetition. The transform costs O(2^m m) a neuron and forms no matrix.
    """

    dim: int = 30
    num_views: int = 5

    def __post_init__(self) -> None:
        at_least_one(dim=self.dim, num_views=self.num_views)

    def draw(self, layer: Layer, stream: Stream) -> Basis:
        size = _padded(layer.fan_in)
        signs = stream.signs(self.num_views, layer.fan_in)
        rows = torch.stack([stream.permutation(size)[: self.dim] for _ in range(self.num_views)])
        return signs, rows

    def maps(self, basis: Basis) -> tuple[Map, ...]:
        """The same views as dense matrices, for an executor of linear maps."""
        signs, rows = basis
        column = torch.arange(signs.shape[-1], device=signs.device)
        odd = _parity(rows.unsqueeze(-1) & column)  # [C, dim, D]
        return (Map(right=(1 - 2 * odd) * signs.unsqueeze(-2)),)

    def shares(self, basis: Basis) -> tuple[float, ...]:
        return (1.0,)

    def views(self, neurons: Tensor, basis: Basis) -> tuple[Tensor, ...]:
        signs, rows = basis
        signed = neurons.unsqueeze(-3) * signs.unsqueeze(-2)  # [..., C, N, D]
        padding = _padded(signs.shape[-1]) - signs.shape[-1]
        transformed = hadamard(torch.nn.functional.pad(signed, (0, padding)))
        index = rows.unsqueeze(-2).expand(*transformed.shape[:-1], rows.shape[-1])
        return (transformed.gather(-1, index),)


def hadamard(rows: Tensor) -> Tensor:
    """H @ row for each row of a length that is a power of two; entry (i, j) of H is (-1)^popcount(i and j)."""
    size, half = rows.shape[-1], 1
    while half < size:
        first, second = rows.unflatten(-1, (-1, 2, half)).unbind(-2)
        rows = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return rows


def _padded(fan_in: int) -> int:
    return 1 << (fan_in - 1).bit_length()


def _parity(words: Tensor) -> Tensor:
    for shift in (16, 8, 4, 2, 1):
        words = words ^ (words >> shift)
    return words & 1
