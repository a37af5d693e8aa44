"""Pairs visited in blocks against the energy of all at once, and against loops over the angles."""

import importlib
import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import comhe
from comhe.bounds import lower_bound
from comhe.energies import Energy

geometry = importlib.import_module("comhe.geometry")
every_distance = pytest.mark.parametrize("distance", ["chord", "angle"])
every_space = pytest.mark.parametrize("half_space", [False, True], ids=["full", "half"])


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def crowded(dtype):
    """Pairs 1e-3 apart, opposite ones too, in a set of 30."""
    points = normal(30, 8, dtype=torch.float64)
    points[10:20] = points[:10] + 1e-3 * points[:10].norm(dim=1, keepdim=True) * normal(10, 8, seed=1) / 8**0.5
    points[20:25] = -3 * points[:5] + 1e-3 * normal(5, 8, seed=2)
    return points.to(dtype)


@pytest.mark.parametrize("block", [1, 7, 30, 64, 100, 1 << 20])
@pytest.mark.parametrize("s", [0.0, 1.0, 2.0, 3.0])
@every_distance
@every_space
def test_blocks_give_the_energy_of_all_pairs(monkeypatch, half_space, distance, s, block):
    monkeypatch.setattr(geometry, "_BLOCK_ELEMENTS", block)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        points = crowded(dtype)
        found = geometry.measure(points, Energy(s, half_space, distance), 1e-5)
        expected = comhe.energy(points, s, half_space=half_space, distance=distance).item()
        assert found.energy == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_space
def test_duplicates_have_the_same_finite_energy(half_space, dtype):
    points = normal(12, 6, dtype=dtype)
    points[3], points[4], points[5] = points[0], 2 * points[0], -points[1]
    found = geometry.measure(points, Energy(half_space=half_space), 1e-6)
    expected = comhe.energy(points, half_space=half_space).item()
    assert math.isfinite(expected)
    assert found.energy == pytest.approx(expected, rel=1e-5)
    assert found.nearest < 1e-13
    assert found.num_close == (4 if half_space else 3)


@every_space
@pytest.mark.parametrize("block", [1, 40, 1 << 20])
def test_angles_and_close_pairs_against_a_loop(monkeypatch, half_space, block):
    monkeypatch.setattr(geometry, "_BLOCK_ELEMENTS", block)
    points = normal(25, 3)
    angles = []
    for a, b in itertools.combinations(points / points.norm(dim=1, keepdim=True), 2):
        angle = 2 * math.atan2((a - b).norm(), (a + b).norm())
        angles.append(min(angle, math.pi - angle) if half_space else angle)
    limit = math.radians(20)
    found = geometry.measure(points, Energy(half_space=half_space), (2 * math.sin(limit / 2)) ** 2)
    assert 2 * math.asin(math.sqrt(found.nearest) / 2) == pytest.approx(min(angles), rel=1e-12)
    assert found.num_close == sum(angle < limit for angle in angles) > 2


def test_zero_neurons_count_as_orthogonal_and_the_bound_stays_one():
    """In two dimensions 20 neurons crowd, but 18 that are zero do not: the bound must not say otherwise."""
    points = torch.zeros(20, 2, dtype=torch.float64)
    points[:2] = torch.eye(2)
    for half_space in (False, True):
        found = geometry.measure(points, Energy(half_space=half_space), 1e-3)
        assert found.energy == pytest.approx(comhe.energy(points, half_space=half_space).item(), rel=1e-14)
        assert found.energy < lower_bound(20, 2, half_space=half_space)
        assert found.bound == lower_bound(20, 20, half_space=half_space) <= found.energy + 1e-14
        assert found.nearest == 2
        assert found.num_close == 0


@pytest.mark.parametrize("count", [0, 1])
def test_without_a_pair_everything_is_zero(count):
    assert geometry.measure(normal(count, 4), Energy(), 1e-3) == (0.0, 0.0, 0.0, math.inf, 0)


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return found


@pytest.mark.parametrize("spread", [1.0, 1e-3], ids=["random", "collapsed"])
def test_no_matrix_of_all_pairs_is_held(monkeypatch, spread):
    monkeypatch.setattr(geometry, "_BLOCK_ELEMENTS", 1 << 14)
    points = 1 + (spread * normal(800, 16) if spread < 1 else normal(800, 16))
    with LargestTensor() as largest:
        geometry.measure(points, Energy(half_space=True), 1e-3)
    assert 800 * 16 <= largest.numel <= 1 << 15
