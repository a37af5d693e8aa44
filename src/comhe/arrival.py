"""Whether what is added to an optimizer's step takes effect: seen once, on one parameter."""

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
        return None if self._is_settled else _smallest(gradients, rates)

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
        with_ours, without = self._with_ours, self._without_ours.to_dense()
        del self._value, self._with_ours, self._without_ours
        # Where there was nothing before ours, what moved the weight is ours, whoever has zeroed the gradient since.
        is_gone = torch.equal(parameter.grad.to_dense(), without) and not torch.equal(with_ours, without)
        return "the gradient was taken away again before the update" if is_gone and bool(without.any()) else ""


class Survival:
    """Watches the smallest weight that is changed after a step, until the change has been seen to last."""

    def __init__(self) -> None:
        self.parameter: Tensor | None = None
        self._is_settled = False

    def choose(self, gradients: Sequence[tuple[nn.Parameter, Tensor]], rates: Mapping[int, Any]) -> Tensor | None:
        """The parameter to watch from this step on, if any."""
        return None if self._is_settled else _smallest(gradients, rates)

    def watch(self, parameter: Tensor, changed: Tensor) -> None:
        """`parameter` is as the step left it, and about to become `changed`."""
        if not torch.equal(parameter, changed):
            self.parameter, self._before = parameter, parameter.detach().clone()

    def failure(self, optimizer: Optimizer) -> str:
        """Before the next step: why the change is lost or will be; "" where it is not, or where none was made."""
        parameter = self.parameter
        if parameter is None or self._is_settled or in_graph():
            return ""
        before = self._before
        self._is_settled = True
        del self._before
        if torch.equal(parameter, before):
            return "the weight was set back after it"
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                is_finer = value.element_size() > parameter.element_size()
                if is_finer and torch.equal(value.to(parameter), before):
                    return "the optimizer has a copy of the weight in higher precision, and writes that over it"
        return ""


def _smallest(gradients: Sequence[tuple[nn.Parameter, Tensor]], rates: Mapping[int, Any]) -> Tensor | None:
    """The smallest parameter that is about to move."""
    if in_graph():
        return None
    for leaf, gradient in sorted(gradients, key=lambda pair: pair[0].numel()):
        if rates[id(leaf)] != 0 and bool(gradient.any()):
            return leaf
    return None
