"""Each input goes to one place with a sign: by a loop over inputs."""

from __future__ import annotations

import math
import statistics

import loops
import pytest
import torch

import comhe
from comhe.projections import CountSketch
from comhe.random import Stream


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize(("fan_in", "dim"), [(11, 5), (23, 8)])
def test_equals_the_loop(fan_in: int, dim: int, half_space: bool, dtype: torch.dtype) -> None:
    model = loops.linear(6, fan_in, dtype)
    reg = comhe.Regularizer(model, CountSketch(dim, 3), half_space=half_space)
    for _ in range(2):
        places, signs = loops.basis(reg)
        assert places.shape == signs.shape == (3, fan_in)
        each = []
        for place, sign in zip(places.tolist(), signs.tolist(), strict=True):
            sketches = []
            for neuron in loops.rows(model.weight):
                sketch = [0.0] * dim
                for j, w in enumerate(neuron):
                    sketch[place[j]] += sign[j] * w
                sketches.append(sketch)
            each.append(loops.energy(sketches, 2.0, half_space))
        assert loops.agrees(reg(), statistics.fmean(each))
        reg.advance()


def test_inner_products_are_kept_on_average() -> None:
    """E <S x, S y> = <x, y>, with variance at most (|x|^2 |y|^2 + <x, y>^2) / dim."""
    model = loops.linear(2, 50)
    x, y = model.weight.detach()
    projection = CountSketch(dim=10, num_views=20000)
    layer = comhe.Regularizer(model, CountSketch(dim=10)).layers[0]
    basis = tuple(t.double() if t.is_floating_point() else t for t in projection.draw(layer, Stream(0, "key")))
    (views,) = projection.views(model.weight.detach(), basis)
    products = (views[:, 0] * views[:, 1]).sum(dim=-1)
    deviation = math.sqrt((x @ x * (y @ y) + (x @ y) ** 2) / 10 / 20000)
    assert abs(products.mean() - x @ y) < 5 * deviation
    assert products.var() < 1.1 * (x @ x * (y @ y) + (x @ y) ** 2) / 10


def test_places_and_signs_are_uniform() -> None:
    layer = comhe.Regularizer(loops.linear(2, 50), CountSketch(dim=7)).layers[0]
    places, signs = CountSketch(dim=7, num_views=2000).draw(layer, Stream(0, "key"))
    counts = torch.bincount(places.flatten(), minlength=7).double()
    assert len(counts) == 7
    expected = places.numel() / 7
    assert ((counts - expected).abs() < 5 * math.sqrt(expected * 6 / 7)).all()
    assert signs.unique().tolist() == [-1.0, 1.0]
    assert abs(signs.mean()) < 5 / math.sqrt(signs.numel())
