from __future__ import annotations

from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass

import torch

from comhe.projections._base import Basis, Layer, Map, Projection, at_least_one
from comhe.random import Stream


@dataclass(frozen=True)
class Group(Projection):
    """Group CoMHE: P_c keeps the weights of one group of input channels, runs of `channels` by default.

    `stochastic` draws the groups anew each time. Channels that remain join the last group, as one or two weights by
    themselves leave no room to part in; each group counts alike.
    """

    channels: int = 8
    _: KW_ONLY
    stochastic: bool = False

    def __post_init__(self) -> None:
        at_least_one(channels=self.channels)

    @property
    def redraw_every(self) -> int | None:
        return 1 if self.stochastic else None

    def basis_key(self, layer: Layer) -> Hashable:
        return layer.fan_in, layer.taps

    def draw(self, layer: Layer, stream: Stream) -> Basis:
        num_channels = layer.fan_in // layer.taps
        order = (
            stream.permutation(num_channels) if self.stochastic else torch.arange(num_channels, device=stream.device)
        )
        columns = order.unsqueeze(-1) * layer.taps + torch.arange(layer.taps, device=stream.device)
        others = max(1, num_channels // self.channels) - 1  # groups before the last one
        if num_channels == (others + 1) * self.channels:
            return (columns.view(others + 1, -1),)
        last = columns[others * self.channels :].view(1, -1)
        return (columns[: others * self.channels].view(others, -1), last) if others else (last,)

    def maps(self, basis: Basis) -> tuple[Map, ...]:
        num_groups = sum(len(columns) for columns in basis)
        return tuple(Map(columns=columns, share=len(columns) / num_groups) for columns in basis)
