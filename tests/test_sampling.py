"""Energies estimated from random pairs: unbiased, with an honest standard error, reproducible."""

from __future__ import annotations

import pytest
import torch

import comhe


@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize(("s", "distance"), [(0.0, "chord"), (1.0, "chord"), (2.0, "chord"), (1.0, "angle")])
def test_the_standard_error_is_that_of_many_estimates(half_space, s, distance):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(40, 12, dtype=torch.float64, generator=generator)
    points[5] = 0
    exact = comhe.energy(points, s, half_space=half_space, distance=distance)
    settings = {"half_space": half_space, "distance": distance}
    found = [comhe.sampled_energy(points, 500, s, round=r, **settings) for r in range(400)]
    values = torch.stack([each.value for each in found])
    errors = torch.stack([each.standard_error for each in found])
    # The mean of 400 is within 4 of its standard deviations, but for one run in 15,000; the seed is fixed.
    assert abs(values.mean() - exact) < 4 * values.std() / 20
    # The ratio of two estimates of one deviation from 400 values each has itself one of about 4 %.
    assert 0.85 < values.std() / errors.square().mean().sqrt() < 1.15


def test_the_gradient_is_unbiased_too():
    points = torch.randn(20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (exact,) = torch.autograd.grad(comhe.energy(points, half_space=True), points)
    slopes = torch.stack(
        [
            torch.autograd.grad(comhe.sampled_energy(points, 400, half_space=True, round=r).value, points)[0]
            for r in range(400)
        ]
    )
    deviation = (slopes.mean(0) - exact) / (slopes.std(0) / 20)
    assert deviation.abs().max() < 5  # of 160 numbers


def test_batches_types_and_reproduction():
    points = torch.randn(3, 30, 6)
    one = comhe.sampled_energy(points, 1000, seed=5)
    assert one.value.shape == one.standard_error.shape == (3,)
    assert one.value.dtype == torch.float32
    torch.manual_seed(3)
    assert torch.equal(one.value, comhe.sampled_energy(points, 1000, seed=5).value)
    assert not torch.equal(one.value, comhe.sampled_energy(points, 1000, seed=6).value)
    assert not torch.equal(one.value, comhe.sampled_energy(points, 1000, seed=5, round=1).value)
    assert comhe.sampled_energy(points.bfloat16(), 10).value.dtype == torch.float32
    assert comhe.sampled_energy(points[:, :1], 10).value.eq(0).all()


@pytest.mark.parametrize("num_pairs", [0, 1, -3])
def test_too_few_pairs_are_refused(num_pairs):
    with pytest.raises(ValueError, match=f"num_pairs={num_pairs}: choose at least 2"):
        comhe.sampled_energy(torch.randn(5, 5), num_pairs)


def test_a_million_points():
    points = torch.randn(1_000_000, 16)
    found = comhe.sampled_energy(points, 100_000, half_space=True)
    expected = comhe.bounds.uniform_expectation(16, half_space=True, num_points=1_000_000)
    assert abs(found.value - expected) < 5 * found.standard_error
