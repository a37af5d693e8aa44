"""Energies of many points: the numbers of the dense form, in memory that grows with N and not with N^2."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import comhe
from comhe import streaming
from comhe.energies import Energy
from comhe.streaming import is_streamed, stream


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 rows, so that 45 points have three each way, the last of them not whole."""
    monkeypatch.setitem(streaming._ROWS, "cpu", 16)


def points_with_everything(dtype: torch.dtype) -> Tensor:
    """Two sets with a zero point, duplicates, opposites and close pairs, in one tile and across tiles."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(2, 45, 5, dtype=dtype, generator=generator)
    points *= torch.rand(2, 45, 1, dtype=dtype, generator=generator)
    points[0, 3] = 0
    points[1, 4] = 2 * points[1, 5]
    points[1, 6] = 3 * points[1, 40]
    points[1, 7] = -points[1, 8]
    points[0, 9] = 3 * points[0, 41] + 1e-3 * torch.randn(5, dtype=dtype, generator=generator)
    return points


LAWS = list(itertools.product((0.0, 1.0, 2.0, 3.7), (False, True), ("chord", "angle"), ("mean", "sum"), (0.0, 1e-2)))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_dense_form(law, dtype):
    points, energy = points_with_everything(dtype).requires_grad_(), Energy(*law)
    expected = energy(points)
    (slope,) = torch.autograd.grad(expected.sum(), points)
    value, gradient = stream(points.detach(), energy, dtype, with_gradient=True)
    # The same pairs in another order. In the gradient a pair at a distance of 1e-3 loses three digits to cancellation
    # in float64; in float32 such a pair is computed in float64 either way.
    precision = {torch.float64: 1e-13, torch.float32: 3e-6}[dtype]
    of_slope = {torch.float64: 1e-11, torch.float32: 3e-5}[dtype]
    torch.testing.assert_close(value, expected.detach(), rtol=precision, atol=0)
    for one, other in zip(gradient, slope, strict=True):
        assert (one - other).norm() <= of_slope * other.norm()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("half_space", [False, True])
def test_well_separated_points_in_few_passes(half_space):
    """No pair is close: every tile takes the short way."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(50, 64, generator=generator) * torch.rand(50, 1, generator=generator)
    points[7] = 0
    value, gradient = stream(points, Energy(2.0, half_space), torch.float32, with_gradient=True)
    wide = points.double().requires_grad_()
    expected = Energy(2.0, half_space)(wide)
    expected.backward()
    assert abs(value.item() / expected.item() - 1) < 1e-6
    assert (gradient - wide.grad).norm() < 2e-6 * wide.grad.norm()
    assert not gradient[7].any()


class Largest(TorchDispatchMode):
    """The number of bytes of the largest tensor that is made."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("half_space", [False, True])
def test_memory_grows_with_the_points(half_space, close):
    """Value and gradient; the largest tensor is the points in double precision, or a tile of pairs."""
    largest = []
    for count in (6000, 12000):
        assert is_streamed(torch.Size([count, 8]))
        points = torch.randn(count, 8).requires_grad_()
        if close:
            points.data[1:] = points.data[0] + 0.1 * points.data[1:]
        with Largest() as seen:
            value, gradient = stream(points.detach(), Energy(2.0, half_space), torch.float32, with_gradient=True)
        assert value.isfinite()
        assert gradient.isfinite().all()
        largest.append(seen.bytes)
    tile = 8 * streaming._ROWS["cpu"] ** 2
    assert max(largest) <= max(2 * tile, 8 * 8 * 12000)


def test_the_size_decides_and_the_numbers_go_on(monkeypatch):
    points = torch.randn(2, 300, 16, dtype=torch.float64, requires_grad=True)
    dense = comhe.energy(points, half_space=True)
    (expected,) = torch.autograd.grad(dense.sum(), points)
    monkeypatch.setattr(streaming, "MOST_PAIRS", 2 * 300 * 300 - 1)
    with Largest() as seen:
        streamed = comhe.energy(points, half_space=True)
        (slope,) = torch.autograd.grad(streamed.sum(), points)
    assert seen.bytes <= 8 * 300 * 300  # a tile holds one set here; the dense form holds both
    torch.testing.assert_close(streamed, dense, rtol=1e-13, atol=0)
    torch.testing.assert_close(slope, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.usefixtures("small_tiles")
def test_the_streamed_form_inside_everything_else(monkeypatch):
    """Compiled whole, under autocast, differentiated twice (densely)."""
    points = torch.randn(60, 8, requires_grad=True)
    dense = comhe.energy(points)
    (expected,) = torch.autograd.grad(dense, points)
    monkeypatch.setattr(streaming, "MOST_PAIRS", 100)
    plain = comhe.energy(points)
    (slope,) = torch.autograd.grad(plain, points)
    torch.testing.assert_close(slope, expected)
    compiled = torch.compile(comhe.energy, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = compiled(points)
        again = comhe.energy(points)
    (compiled_slope,) = torch.autograd.grad(value, points)
    assert torch.equal(value, plain)
    assert torch.equal(again, plain)
    assert torch.equal(compiled_slope, slope)
    wide = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(streaming, "MOST_PAIRS", 10)
    assert torch.autograd.gradcheck(comhe.energy, wide)
    assert torch.autograd.gradgradcheck(comhe.energy, wide)


@pytest.mark.slow
def test_more_pairs_than_32_bits_can_count():
    """Above N = 46,340 the place of a pair exceeds 2^31."""
    generator = torch.Generator().manual_seed(2)
    points = torch.randn(46_500, 16, generator=generator, requires_grad=True)
    value = comhe.energy(points, half_space=True)
    (slope,) = torch.autograd.grad(value, points)
    unit = torch.nn.functional.normalize(points.detach().double(), dim=1)
    total, count = 0.0, len(points)
    for rows in unit.split(1000):
        total += float((1 / (1 - (rows @ unit.T).square()).clamp(min=1e-9)).sum())
    self_pairs = count / 1e-9  # each point with itself, at the clamp
    expected = 2 * (total - self_pairs + count / 4) / (2 * count * (2 * count - 1))
    assert abs(value.item() / expected - 1) < 1e-4
    for i in (0, 46_341, count - 1):
        cosine = unit @ unit[i]
        weight = 4 * cosine / (1 - cosine.square()).square()
        weight[i] = 0
        force = (weight.unsqueeze(1) * unit).sum(0) * 2 / (2 * count * (2 * count - 1))
        force = (force - (force @ unit[i]) * unit[i]) / points[i].detach().double().norm()
        assert (slope[i] - force).norm() < 1e-5 * force.norm()


def test_the_rule_of_size():
    assert not is_streamed(torch.Size([5, 2048, 30]))
    assert is_streamed(torch.Size([1, 6000, 30]))
    assert is_streamed(torch.Size([10, 2048, 30]))
    assert not is_streamed(torch.Size([0, 30]))
    assert math.isqrt(streaming.MOST_PAIRS) == 5792
