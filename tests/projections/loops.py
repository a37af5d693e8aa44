"""The paper's equations as loops over numbers, for comparison: no line of the library, no tensor operation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import comhe

Rows = Sequence[Sequence[float]]


def rows(tensor: Tensor) -> list[list[float]]:
    """[N, D] in double precision, whatever it was."""
    return tensor.detach().double().tolist()


def transposed(matrix: Rows) -> list[list[float]]:
    return [list(column) for column in zip(*matrix, strict=True)]


def apply(matrix: Rows, points: Rows) -> list[list[float]]:
    """P w for every point w, a row each."""
    return [[math.fsum(p * w for p, w in zip(row, point, strict=True)) for row in matrix] for point in points]


def unit(point: Sequence[float]) -> list[float]:
    norm = math.sqrt(math.fsum(x * x for x in point))
    return [x / norm for x in point]


def energy(points: Rows, s: float = 2.0, half_space: bool = True, mean: bool = True) -> float:
    """Eq. 1, the sum over ordered pairs or its mean; in half space of the points and their antipodes (Appendix B)."""
    on_sphere = [unit(point) for point in points]
    if half_space:
        on_sphere += [[-x for x in point] for point in on_sphere]
    terms = []
    for i, a in enumerate(on_sphere):
        for j, b in enumerate(on_sphere):
            if i != j:
                distance = math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)))
                terms.append(distance**-s if s > 0 else -math.log(distance))
    return math.fsum(terms) / (len(terms) if mean else 1)


def linear(num_neurons: int, fan_in: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Linear:
    """A layer with neurons of different lengths, none close to another."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(fan_in, num_neurons, bias=False)
    with torch.no_grad():
        lengths = torch.linspace(-1, 1, num_neurons).exp2().unsqueeze(-1)
        layer.weight.copy_(torch.randn(num_neurons, fan_in, generator=generator) * lengths)
    return layer.to(dtype)


def basis(reg: comhe.Regularizer, index: int = 0) -> tuple[Tensor, ...]:
    """The tensors of a basis as the regularizer holds them."""
    return tuple(t.detach() for t in reg._bases.basis(index))


def agrees(value: Tensor, expected: float) -> bool:
    """To 1e-12 relative in float64, to 1e-5 in float32."""
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[value.dtype]
    return abs(value.item() - expected) <= tolerance * abs(expected)
