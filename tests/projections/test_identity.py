"""Eq. 1 through the regularizer: the energy of the neurons themselves."""

from __future__ import annotations

import loops
import pytest
import torch
from torch import nn

import comhe
from comhe.projections import Identity


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("s", [0.0, 1.0, 2.0, 3.5])
def test_equals_the_loop(s: float, half_space: bool, reduction: str, dtype: torch.dtype) -> None:
    model = loops.linear(7, 10, dtype)
    reg = comhe.Regularizer(model, Identity(), s=s, half_space=half_space, reduction=reduction)
    assert loops.agrees(reg(), loops.energy(loops.rows(model.weight), s, half_space, reduction == "mean"))


def test_layers_add_up() -> None:
    model = nn.Sequential(loops.linear(7, 10), loops.linear(5, 7, seed=1))
    expected = sum(loops.energy(loops.rows(layer.weight)) for layer in model)
    assert loops.agrees(comhe.Regularizer(model, Identity())(), expected)


def test_groups_of_a_convolution_are_averaged() -> None:
    """Each group is a set of its own: no pair crosses it."""
    model = nn.Conv2d(6, 8, 3, groups=2, bias=False).double()
    first, second = model.weight.flatten(1).split(4)
    expected = (loops.energy(loops.rows(first)) + loops.energy(loops.rows(second))) / 2
    assert loops.agrees(comhe.Regularizer(model, Identity())(), expected)


def test_there_is_no_basis() -> None:
    reg = comhe.Regularizer(loops.linear(7, 10), Identity())
    assert loops.basis(reg) == ()
    before = reg()
    reg.advance()
    assert torch.equal(reg(), before)
