"""The nonlinear g of Eq. 3: g(w) = V a(U w / |w|), and its direction."""

from __future__ import annotations

import math
import statistics

import loops
import pytest
import torch

import comhe
from comhe.projections import MLP

ACTIVATIONS = {"relu": lambda x: max(x, 0.0), "tanh": math.tanh}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_the_loop(activation: str, half_space: bool, dtype: torch.dtype) -> None:
    model = loops.linear(6, 11, dtype)
    reg = comhe.Regularizer(model, MLP(5, 3, hidden=9, activation=activation), half_space=half_space)
    for _ in range(2):
        first, second = loops.basis(reg)
        assert first.shape == (3, 9, 11)
        assert second.shape == (3, 5, 9)
        each = []
        for u, v in zip(first, second, strict=True):
            inner = loops.apply(loops.rows(u), [loops.unit(w) for w in loops.rows(model.weight)])
            hidden = [[ACTIVATIONS[activation](x) for x in row] for row in inner]
            each.append(loops.energy(loops.apply(loops.rows(v), hidden), 2.0, half_space))
        assert loops.agrees(reg(), statistics.fmean(each))
        reg.advance()


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"activation='gelu': choose 'relu' or 'tanh'"):
        MLP(activation="gelu")
