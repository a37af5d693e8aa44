"""Rows of H diag(signs), H by its definition: Kronecker powers of [[1, 1], [1, -1]]."""

from __future__ import annotations

import math
import statistics

import loops
import pytest
import torch
from torch import Tensor

import comhe
from comhe.projections import SRHT
from comhe.projections.srht import hadamard
from comhe.random import Stream


def kronecker(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    return matrix


@pytest.mark.parametrize("size", [1, 2, 4, 8, 64, 256])
def test_transform_is_the_hadamard_matrix(size: int) -> None:
    assert torch.equal(hadamard(torch.eye(size, dtype=torch.float64)), kronecker(size))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("fan_in", [1, 8, 11, 16, 17, 33])
def test_equals_the_loop(fan_in: int, dtype: torch.dtype) -> None:
    """Whatever the fan-in: it is padded with zeros to a power of two."""
    # Of one input all directions are +1 or -1, and some coincide.
    model = loops.linear(6 if fan_in > 1 else 1, fan_in, dtype)
    dim = min(5, fan_in)
    reg = comhe.Regularizer(model, SRHT(dim, 3), include="weight")
    size = 2 ** math.ceil(math.log2(fan_in))
    matrix = kronecker(size).tolist()
    for _ in range(2):
        signs, chosen = loops.basis(reg)
        assert signs.shape == (3, fan_in)
        assert chosen.shape == (3, dim)
        each = []
        for sign, rows in zip(loops.rows(signs), chosen.tolist(), strict=True):
            views = []
            for neuron in loops.rows(model.weight):
                padded = [w * e for w, e in zip(neuron, sign, strict=True)] + [0.0] * (size - fan_in)
                views.append(loops.apply([matrix[r] for r in rows], [padded])[0])
            each.append(loops.energy(views) if fan_in > 1 else 0.0)
        assert loops.agrees(reg(), statistics.fmean(each))
        reg.advance()


def test_rows_are_drawn_without_repetition_and_uniformly() -> None:
    projection = SRHT(dim=5, num_views=4000)
    layer = comhe.Regularizer(loops.linear(4, 11), SRHT(dim=5)).layers[0]
    signs, rows = projection.draw(layer, Stream(0, "key"))
    assert all(len(set(view)) == 5 for view in rows.tolist())
    counts = torch.bincount(rows.flatten(), minlength=16).double()
    assert len(counts) == 16
    # Binomial, 5 in 16: within five standard deviations.
    expected = 4000 * 5 / 16
    assert ((counts - expected).abs() < 5 * math.sqrt(expected * 11 / 16)).all()
    assert signs.unique().tolist() == [-1.0, 1.0]
    assert abs(signs.mean()) < 5 / math.sqrt(signs.numel())


def test_all_rows_keep_every_angle() -> None:
    """H has orthogonal rows: with as many as there are, the energy is that of the neurons."""
    model = loops.linear(6, 16)
    assert loops.agrees(comhe.Regularizer(model, SRHT(16, 2))(), loops.energy(loops.rows(model.weight)))
