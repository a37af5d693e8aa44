"""Many linear views at once: values and gradients in closed form, one product a layer, point sets of a size together.

An optimisation of the reference in `regularizer.py` for the CPU, equal to it but for rounding. It reads `maps` alone
and knows no projection. A view with a close pair is computed again in the reference's precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from comhe.closed import closed, is_closed
from comhe.plan import Family
from comhe.products import full_precision, widest
from comhe.projections import Map, Projection
from comhe.rules import Rule


def why_not(family: Family) -> str:
    """Why the layers of a family are left to the reference; "" where they are served here."""
    projection = family.projection
    for layer in family.layers:  # which may be on several devices
        if layer.device.type != "cpu":
            return f"{layer.name} is on {layer.device.type}"
    if family.rule.penalty is not None:
        return "a penalty is no energy"
    if type(projection).views is not Projection.views:
        return "its views are not formed as linear maps"
    return ""


@dataclass
class _View:
    """One linear view of one layer, and where it stands among the values."""

    rule: Rule
    neurons: int  # places among the inputs; -1 where there is none
    left: int
    right: int
    columns: Tensor | None
    weight: float
    family: int


@dataclass
class Network:
    """What is computed in one call: `inputs` are neurons and the tensors of maps, `views` refer to them by place."""

    inputs: list[Tensor] = field(default_factory=list)
    views: list[_View] = field(default_factory=list)
    num_families: int = 0

    def add(
        self, rule: Rule, neurons: Sequence[Tensor], maps: Sequence[Map], weights: Sequence[Sequence[float]]
    ) -> None:
        """The layers of a family; `weights` are those of the views of each layer."""
        places = [(self._place(m.left), self._place(m.right), m.columns) for m in maps]
        for layer, of_views in zip(neurons, weights, strict=True):
            place = self._place(layer)
            for (left, right, columns), weight in zip(places, of_views, strict=True):
                self.views.append(_View(rule, place, left, right, columns, weight, self.num_families))
        self.num_families += 1

    def values(self) -> Tensor:
        """The value of each family, [F]."""
        values: Tensor = _Run.apply(self, *self.inputs)  # type: ignore[no-untyped-call]
        return values

    def by_reference(self, inputs: Sequence[Tensor]) -> Tensor:
        """The same, differentiable to any order."""
        values = [inputs[0].new_zeros(()) for _ in range(self.num_families)]
        for view in self.views:
            neurons = inputs[view.neurons]
            left, right = (None if place < 0 else inputs[place] for place in (view.left, view.right))
            points = Map(left, view.columns, right)(neurons.to(widest(neurons.device)))
            values[view.family] = values[view.family] + view.weight * view.rule.value(points, neurons.dtype)
        return torch.stack(values)

    def _place(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return -1
        self.inputs.append(tensor)
        return len(self.inputs) - 1


class _Run(torch.autograd.Function):
    """Gradients are computed beside the values, and handed on times those of the values."""

    @staticmethod
    def forward(ctx: Any, network: Network, *inputs: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad[1:]
        wide = any(tensor.dtype == torch.float64 for tensor in inputs)
        values = inputs[0].new_zeros(network.num_families, dtype=torch.float64 if wide else torch.float32)
        gradients: list[Tensor | None] = [None] * len(inputs)
        with full_precision(inputs[0].device):
            for view, value, forces, operands in _computed(network.views, inputs):
                values[view.family] += value
                for place, gradient in _pulled(view, forces, operands, wanted):
                    gradient = gradient.to(inputs[place].dtype).view(inputs[place].shape)
                    before = gradients[place]
                    gradients[place] = gradient if before is None else before.add_(gradient)
        ctx.network, ctx.gradients = network, gradients
        ctx.save_for_backward(*inputs)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        network = ctx.network
        if torch.is_grad_enabled():  # a second derivative is wanted, which the gradients lack
            inputs = ctx.saved_tensors
            wanted = [tensor for tensor, needs in zip(inputs, ctx.needs_input_grad[1:], strict=True) if needs]
            found = iter(torch.autograd.grad(network.by_reference(inputs), wanted, grad, create_graph=True))
            return None, *(next(found) if needs else None for needs in ctx.needs_input_grad[1:])
        families = {place: view.family for view in network.views for place in (view.neurons, view.left, view.right)}
        return None, *(
            gradient if gradient is None else gradient * grad[families[place]].to(gradient.dtype)
            for place, gradient in enumerate(ctx.gradients)
        )


_Operands = tuple[Tensor, Tensor | None, Tensor | None]
_Computed = tuple[_View, Tensor, Tensor, _Operands]


def _computed(views: Sequence[_View], inputs: Sequence[Tensor]) -> Iterator[_Computed]:
    """For each view its part of its family's value, and the forces on its points [G, C, points, K]."""
    together: dict[tuple[Any, ...], list[tuple[_View, _Operands, Tensor]]] = {}
    for view in views:
        operands = _operands(view, inputs)
        if is_closed(view.rule.energy) and operands[0].dtype == torch.float32:
            neurons, left, _ = operands
            if 1 < (neurons if left is None else left).shape[-2] <= _MOST_POINTS:
                points = _forward(view, operands)
                key = (*points.shape[-2:], view.rule.energy)
                together.setdefault(key, []).append((view, operands, points))
                continue
        yield _in_full(view, operands)
    for (count, width, energy), members in together.items():
        sets = [points.reshape(-1, count, width) for _, _, points in members]
        found = closed(torch.cat(sets) if len(sets) > 1 else sets[0], energy)
        sizes = [len(part) for part in sets]
        for (view, operands, points), each, forces, close in zip(
            members, *(part.split(sizes) for part in found), strict=True
        ):
            if close.any():
                yield _in_full(view, operands)
            else:
                leading = points.shape[:-2]
                value, share = _reduced(view, each.view(leading))
                yield view, value, forces.view(points.shape) * share[..., None, None], operands


_MOST_POINTS = 2048  # a larger set is computed by itself


def _in_full(view: _View, operands: _Operands) -> _Computed:
    """A view as the reference computes it, its points in the widest type."""
    dtype = operands[0].dtype
    wide = widest(operands[0].device)
    left, right = (None if part is None else part.to(wide) for part in operands[1:])
    lifted: _Operands = (operands[0].to(wide), left, right)
    each, forces = view.rule.energy.with_gradient(_forward(view, lifted), dtype)
    value, share = _reduced(view, each)
    return view, value, forces * share[..., None, None], lifted


def _reduced(view: _View, each: Tensor) -> tuple[Tensor, Tensor]:
    """The value that a view adds to its family, and its derivative in the energies [G, C]."""
    with torch.enable_grad():
        each = each.detach().requires_grad_()
        value = view.weight * view.rule.over_sets(view.rule.aggregated(each))
        (share,) = torch.autograd.grad(value, each)
    return value.detach(), share


def _operands(view: _View, inputs: Sequence[Tensor]) -> _Operands:
    neurons = inputs[view.neurons]
    left, right = (None if place < 0 else inputs[place].to(neurons.dtype) for place in (view.left, view.right))
    return neurons.reshape(-1, *neurons.shape[-2:]), left, right


def _selected(view: _View, neurons: Tensor) -> Tensor:
    """[G, N, D] -> [G, 1 or C, N, width]."""
    return neurons.unsqueeze(1) if view.columns is None else neurons[..., view.columns].movedim(-2, 1)


def _forward(view: _View, operands: _Operands) -> Tensor:
    """left @ neurons[:, columns] @ right' -> [G, C, points, K]."""
    neurons, left, right = operands
    if right is not None and view.columns is None:  # one product for all C
        flat: Tensor = neurons @ right.flatten(0, 1).mT
        points: Tensor = flat.unflatten(-1, right.shape[:2]).movedim(-2, 1)
    else:
        points = _selected(view, neurons)
        points = points if right is None else points @ right.mT
    return points if left is None else left @ points


def _pulled(view: _View, forces: Tensor, operands: _Operands, wanted: Sequence[bool]) -> Iterator[tuple[int, Tensor]]:
    """The gradient of each input that wants one, by its place."""
    neurons, left, right = operands
    if left is not None and wanted[view.left]:
        points = _forward(view, (neurons, None, right))
        yield view.left, (forces @ points.mT).sum(dim=0)
    if left is not None:
        forces = left.mT @ forces
    if right is not None and wanted[view.right]:
        yield view.right, (forces.mT @ _selected(view, neurons)).sum(dim=0)
    if not wanted[view.neurons]:
        return
    if view.columns is not None:
        width = forces if right is None else forces @ right  # [G, C, N, width]
        spread = width.movedim(1, -2).flatten(-2)
        gradient = torch.zeros_like(neurons).index_add_(-1, view.columns.flatten(), spread)
    elif right is not None:
        gradient = forces.movedim(1, -2).flatten(-2) @ right.flatten(0, 1)
    else:
        gradient = forces.sum(dim=1)
    yield view.neurons, gradient
