"""Whether a gradient that was added before an optimizer's step took part in its update: seen once, on one parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comhe.bases import in_graph

# A weight can be seen to move where its update exceeds this many units in its last place, whatever the optimizer.
_VISIBLE = 100


class Arrival:
    """Watches the smallest weight that gets a gradient, until that gradient has been seen to arrive."""

    def __init__(self) -> None:
        self.parameter: Tensor | None = None
        self._is_settled = False

    def choose(self, gradients: Sequence[tuple[nn.Parameter, Tensor]], rates: Mapping[int, Any]) -> Tensor | None:
        """The parameter to watch in this step, if any."""
        self.parameter = None
        if self._is_settled or in_graph():
            return None
        for leaf, gradient in sorted(gradients, key=lambda pair: pair[0].numel()):
            if rates[id(leaf)] != 0 and bool(gradient.any()):
                return leaf
        return None

    def watch(self, parameter: Tensor, without_ours: Tensor | None) -> None:
        """`parameter` holds the sum in `.grad` now; `without_ours` is what was there before."""
        assert parameter.grad is not None
        self.parameter, self._without_ours = parameter, without_ours
        self._value, self._with_ours = parameter.detach().clone(), parameter.grad.clone()

    def failure(self, optimizer: Optimizer, rates: Mapping[int, Any]) -> str:
        """After the step: why the gradient did not arrive; "" where it did, or where that cannot be told yet."""
        parameter = self.parameter
        overflow: Tensor | None = getattr(optimizer, "found_inf", None)
        if parameter is None or (overflow is not None and bool(overflow)):
            return ""
        if torch.equal(parameter, self._value):
            scale: Tensor | None = getattr(optimizer, "grad_scale", None)
            gradient = self._with_ours if scale is None else self._with_ours / scale
            update = rates[id(parameter)] * gradient.abs().clamp(max=1)
            seen = update > _VISIBLE * torch.finfo(self._value.dtype).eps * self._value.abs()
            return "the step did not move its weight" if bool(seen.any()) else ""
        self._is_settled = True
        if parameter.grad is None or self._without_ours is None:
            return ""
        without = self._without_ours.to_dense()
        if torch.equal(parameter.grad.to_dense(), without) and not torch.equal(self._with_ours, without):
            return "the gradient was taken away again before the update"
        return ""
