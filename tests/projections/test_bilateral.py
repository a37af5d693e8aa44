"""BP-CoMHE in the paper's orientation, W [m, n] with a neuron a column: E(columns of P1 W) + E(columns of W P2)."""

from __future__ import annotations

import statistics

import loops
import pytest
import torch
from torch import nn

import comhe
from comhe.projections import Bilateral


def by_loop(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor, half_space: bool) -> float:
    neurons = loops.rows(weight)  # n rows of m numbers: W transposed
    matrix = loops.transposed(neurons)  # W
    y1 = loops.apply(loops.rows(right), neurons)  # a row for each column of P1 W
    # Column c of W P2 is W times column c of P2 [n, r]; the basis holds P2 transposed.
    y2 = [[sum(w * p for w, p in zip(row, column, strict=True)) for row in matrix] for column in loops.rows(left)]
    return loops.energy(y1, 2.0, half_space) + loops.energy(y2, 2.0, half_space)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("num_views", [1, 3])
def test_equals_the_loop(num_views: int, half_space: bool, dtype: torch.dtype) -> None:
    model = loops.linear(7, 11, dtype)
    reg = comhe.Regularizer(model, Bilateral(5, num_views), half_space=half_space)
    for _ in range(2):
        left, right = loops.basis(reg)
        assert left.shape == (num_views, 5, 7)
        assert right.shape == (num_views, 5, 11)
        each = [by_loop(model.weight, *pair, half_space) for pair in zip(left, right, strict=True)]
        assert loops.agrees(reg(), statistics.fmean(each))
        reg.advance()


def test_layers_share_both_sides_or_none() -> None:
    model = nn.Sequential(loops.linear(11, 11), loops.linear(11, 11, seed=1), loops.linear(7, 11, seed=2))
    reg = comhe.Regularizer(model, Bilateral(5))
    assert [[layer.name for layer in family.layers] for family in reg.plan.families] == [["0", "1"], ["2"]]


def test_right_side_mixes_raw_weights() -> None:
    """A longer neuron weighs more in the mixtures: they are not those of unit neurons."""
    model = loops.linear(7, 11)
    reg = comhe.Regularizer(model, Bilateral(5))
    before = reg().item()
    with torch.no_grad():
        model.weight[0] *= 3
    assert abs(reg().item() - before) > 1e-6 * before
    left, right = loops.basis(reg)
    assert loops.agrees(reg(), by_loop(model.weight, left[0], right[0], True))


def test_entries_are_normal_and_independent() -> None:
    reg = comhe.Regularizer(loops.linear(300, 300), Bilateral(200))
    left, right = (t.double().flatten() for t in loops.basis(reg))
    for side in (left, right):
        assert abs(side.mean()) < 5 / len(side) ** 0.5
        assert abs(side.square().mean() - 1) < 5 * (2 / len(side)) ** 0.5
    assert abs((left * right).mean()) < 5 / len(left) ** 0.5
