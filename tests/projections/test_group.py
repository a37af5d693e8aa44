"""Group CoMHE: P_c keeps one run of input channels, and the energies of the C groups are averaged."""

from __future__ import annotations

import statistics

import loops
import pytest
import torch
from torch import nn

import comhe
from comhe.projections import Group


def by_loop(weight: torch.Tensor, groups: list[list[int]], half_space: bool = True) -> float:
    """From the weight [out, in, taps...] itself: channels are its second dimension."""
    each = [loops.energy(loops.rows(weight[:, channels].flatten(1)), 2.0, half_space) for channels in groups]
    return statistics.fmean(each)


def runs(num_channels: int, size: int) -> list[list[int]]:
    last = (max(1, num_channels // size) - 1) * size
    return [list(range(first, first + size)) for first in range(0, last, size)] + [list(range(last, num_channels))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize(("num_channels", "size"), [(16, 8), (24, 8), (11, 4), (9, 3), (5, 8)])
def test_equals_the_loop_for_a_convolution(num_channels: int, size: int, half_space: bool, dtype: torch.dtype) -> None:
    """Nine weights a channel; what remains of the channels is in the last group."""
    torch.manual_seed(0)
    model = nn.Conv2d(num_channels, 6, 3, bias=False).to(dtype)
    reg = comhe.Regularizer(model, Group(size), half_space=half_space)
    assert loops.agrees(reg(), by_loop(model.weight, runs(num_channels, size), half_space))


def test_equals_the_loop_for_other_layers() -> None:
    linear = loops.linear(6, 20)
    assert loops.agrees(comhe.Regularizer(linear, Group(8))(), by_loop(linear.weight, runs(20, 8)))
    one_tap = nn.Conv2d(12, 6, 1, bias=False).double()
    assert loops.agrees(comhe.Regularizer(one_tap, Group(8))(), by_loop(one_tap.weight, runs(12, 8)))
    transposed = nn.ConvTranspose2d(12, 6, 3, bias=False).double()
    assert loops.agrees(
        comhe.Regularizer(transposed, Group(8))(), by_loop(transposed.weight.transpose(0, 1), runs(12, 8))
    )
    grouped = nn.Conv2d(24, 8, 3, groups=2, bias=False).double()
    each = [by_loop(part, runs(12, 8)) for part in grouped.weight.split(4)]
    assert loops.agrees(comhe.Regularizer(grouped, Group(8))(), statistics.fmean(each))


@pytest.mark.parametrize("fan_in", [24, 25, 26, 27, 31, 131])
def test_what_remains_does_not_explode(fan_in: int) -> None:
    """In one or two dimensions 64 points have no room: by themselves they would be the whole energy."""
    torch.manual_seed(0)
    layer = nn.Linear(fan_in, 64)
    value = comhe.Regularizer(layer, Group(8))()
    value.backward()
    assert value < 1
    # The last group has its share of the gradient and no more.
    sizes = torch.stack([layer.weight.grad[:, run].norm() for run in runs(fan_in, 8)])
    assert sizes[-1] < 5 * sizes[:-1].mean()


def test_default_is_eight_channels() -> None:
    assert Group() == Group(channels=8, stochastic=False)


def test_largest_groups_can_be_the_objective() -> None:
    model = nn.Conv2d(16, 6, 3, bias=False).double()
    reg = comhe.Regularizer(model, Group(4), aggregate="max")
    assert loops.agrees(reg(), max(by_loop(model.weight, [run]) for run in runs(16, 4)))


@pytest.mark.parametrize(("num_channels", "size"), [(16, 8), (11, 4)])
def test_stochastic_groups_are_new_partitions_of_the_channels(num_channels: int, size: int) -> None:
    model = nn.Conv2d(num_channels, 6, 3, bias=False).double()
    reg = comhe.Regularizer(model, Group(size, stochastic=True))
    seen = []
    for _ in range(4):
        groups = []
        for part in loops.basis(reg):
            for columns in part.tolist():
                channels = sorted({column // 9 for column in columns})
                assert sorted(columns) == [9 * channel + tap for channel in channels for tap in range(9)]
                groups.append(channels)
        assert sorted(channel for group in groups for channel in group) == list(range(num_channels))
        assert [len(group) for group in groups] == [len(run) for run in runs(num_channels, size)]
        assert loops.agrees(reg(), by_loop(model.weight, groups))
        seen.append([tuple(group) for group in groups])
        reg.advance()
    assert len(set(map(tuple, seen))) == 4
