"""Eq. 4 with matrices of fair signs."""

from __future__ import annotations

import math
import statistics

import loops
import pytest
import torch

import comhe
from comhe.projections import Rademacher
from comhe.random import Stream


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("half_space", [False, True])
def test_equals_the_loop(half_space: bool, dtype: torch.dtype) -> None:
    model = loops.linear(6, 11, dtype)
    reg = comhe.Regularizer(model, Rademacher(5, 3), half_space=half_space)
    for _ in range(2):
        neurons = loops.rows(model.weight)
        each = [
            loops.energy(loops.apply(loops.rows(matrix), neurons), 2.0, half_space) for matrix in loops.basis(reg)[0]
        ]
        assert loops.agrees(reg(), statistics.fmean(each))
        reg.advance()


def test_entries_are_fair_signs() -> None:
    layer = comhe.Regularizer(loops.linear(4, 500), Rademacher(40, 5)).layers[0]
    (matrices,) = Rademacher(40, 5).draw(layer, Stream(0, "key"))
    assert matrices.shape == (5, 40, 500)
    assert matrices.unique().tolist() == [-1.0, 1.0]
    bound = 5 / math.sqrt(matrices.numel())
    assert abs(matrices.double().mean()) < bound
    sample = matrices.double().flatten()
    assert abs((sample[1:] * sample[:-1]).mean()) < bound
