"""Eq. 4: the energy of P_c w_i for C Gaussian matrices, averaged, or the worst of them."""

from __future__ import annotations

import math
import statistics

import loops
import pytest
import torch
from torch import nn

import comhe
from comhe.projections import Gaussian
from comhe.random import Stream

AGGREGATES = {
    "mean": statistics.fmean,
    "max": max,
    # Of an even number of views the lower of the two in the middle.
    "median": statistics.median_low,
    "logmeanexp": lambda e: math.log(math.fsum(map(math.exp, e)) / len(e)),
}


def by_loop(model: nn.Linear, reg: comhe.Regularizer, s: float, half_space: bool, mean: bool = True) -> list[float]:
    """The energy of each view."""
    (matrices,) = loops.basis(reg)
    neurons = [loops.unit(w) for w in loops.rows(model.weight)]
    return [loops.energy(loops.apply(loops.rows(matrix), neurons), s, half_space, mean) for matrix in matrices]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("s", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("num_views", [3, 4])
def test_equals_the_loop(num_views: int, aggregate: str, s: float, half_space: bool, dtype: torch.dtype) -> None:
    model = loops.linear(6, 11, dtype)
    reg = comhe.Regularizer(model, Gaussian(5, num_views), s=s, half_space=half_space, aggregate=aggregate)
    for _ in range(2):
        each = by_loop(model, reg, s, half_space)
        assert len(each) == num_views
        assert loops.agrees(reg(), AGGREGATES[aggregate](each))
        reg.advance()


def test_sum_is_the_paper_s_sum() -> None:
    model = loops.linear(6, 11)
    reg = comhe.Regularizer(model, Gaussian(5, 3), half_space=False, reduction="sum")
    assert loops.agrees(reg(), statistics.fmean(by_loop(model, reg, 2.0, False, mean=False)))


def test_aggregate_can_be_a_function() -> None:
    model = loops.linear(6, 11)
    reg = comhe.Regularizer(model, Gaussian(5, 3), aggregate=lambda energies: energies.amin(dim=-1))
    assert loops.agrees(reg(), min(by_loop(model, reg, 2.0, True)))


def test_aggregates_differ() -> None:
    model = loops.linear(6, 11)
    values = [comhe.Regularizer(model, Gaussian(5, 4), aggregate=name)().item() for name in AGGREGATES]
    median, mean, between, largest = (values[i] for i in (2, 0, 3, 1))
    assert mean < between < largest
    assert median != mean


def test_layers_of_one_fan_in_share_the_matrices() -> None:
    model = nn.Sequential(loops.linear(11, 11), loops.linear(6, 11, seed=1))
    reg = comhe.Regularizer(model, Gaussian(5, 3))
    assert len(reg.plan.families) == 1
    assert loops.agrees(reg(), sum(statistics.fmean(by_loop(layer, reg, 2.0, True)) for layer in model))
    apart = comhe.Regularizer(model, Gaussian(5, 3), shared=False)
    assert not torch.equal(*(loops.basis(apart, index)[0] for index in range(2)))


def test_entries_are_standard_normal() -> None:
    layer = comhe.Regularizer(loops.linear(4, 500), Gaussian(400, 5)).layers[0]
    (matrices,) = Gaussian(400, 5).draw(layer, Stream(0, "key"))
    assert matrices.shape == (5, 400, 500)
    sample = matrices.double().flatten()
    count = len(sample)
    # Each within five standard deviations of its expectation.
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(sample.pow(power).mean() - expected) < 5 * math.sqrt(variance / count)
    assert abs((sample[1:] * sample[:-1]).mean()) < 5 / math.sqrt(count)
