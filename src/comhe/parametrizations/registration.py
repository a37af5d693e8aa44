"""Putting a parametrization on a layer's weight, finding it again, and merging it away.

Built on `torch.nn.utils.parametrize`. The learned tensors are new parameters (`original0`, ...): the
layer's own parameter is never written, so a failure leaves the layer as it was and a weight tied elsewhere
keeps its values there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from comhe.discovery import layer_name, named_modules
from comhe.neurons import originals


@dataclass(frozen=True)
class Report:
    """One row of `report`: `layer` is the layer's name, free of wrappers' prefixes."""

    layer: str


class NeuronParametrization(nn.Module, ABC):
    """A weight as a function of learned tensors, seen as neurons [N, D], a row each.

    The rows are `weight.flatten(1)`; a transposed convolution keeps its output channels in dimension 1.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        weight = _plain_weight(module, name)
        self.label = _label(module, name)
        self.shape = weight.shape
        self.is_transposed = isinstance(module, _ConvTransposeNd)
        self.parameter_order = list(module._parameters)
        self.num_neurons, self.fan_in = self.rows(weight).shape

    def rows(self, weight: Tensor) -> Tensor:
        """The neurons [N, D] of a weight."""
        if weight.shape != self.shape:
            raise ValueError(
                f"{self.label}: a weight of shape {tuple(weight.shape)} was assigned; keep "
                f"{tuple(self.shape)}, or merge and parametrize again"
            )
        return (weight.transpose(0, 1) if self.is_transposed else weight).flatten(1)

    def weight(self, rows: Tensor) -> Tensor:
        """The contiguous weight whose neurons are `rows` [N, D]."""
        if not self.is_transposed:
            return rows.reshape(self.shape)
        outputs_first = (self.shape[1], self.shape[0], *self.shape[2:])
        return rows.reshape(outputs_first).transpose(0, 1).contiguous()

    @abstractmethod
    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The learned tensors from which the layer starts when it is given `weight`."""

    @abstractmethod
    def measure(self, layer: str, *originals: Tensor) -> Report:
        """This layer's row of `report`."""


class Found(NamedTuple):
    """One parametrized weight of a model."""

    name: str
    module: nn.Module
    tensor_name: str
    parametrization: NeuronParametrization
    originals: tuple[Tensor, ...]


def register(module: nn.Module, name: str, parametrization: NeuronParametrization) -> None:
    """Compute `module.name` by `parametrization` from now on; what it learns requires a gradient."""
    parametrize.register_parametrization(module, name, parametrization)
    for original in originals(module, name):
        original.requires_grad_(True)


def found(model: nn.Module) -> Iterator[Found]:
    """The weights of a model, or of a single layer, that are under one of this package's parametrizations."""
    for prefix, module in named_modules(model):
        if not parametrize.is_parametrized(module):
            continue
        lists = module.parametrizations
        assert isinstance(lists, nn.ModuleDict)
        for name, parametrizations in lists.items():
            assert isinstance(parametrizations, parametrize.ParametrizationList)
            first = parametrizations[0]
            if isinstance(first, NeuronParametrization):
                yield Found(layer_name(prefix, name), module, name, first, tuple(originals(module, name)))


def report(model: nn.Module) -> list[Report]:
    """A row for each parametrized weight: `RotationReport` or `LowRankReport`; empty where there is none.

    Reads the learned tensors and runs nothing else of the model.
    """
    with torch.no_grad():
        return [each.parametrization.measure(each.name, *each.originals) for each in found(model)]


def merge(model: nn.Module) -> list[str]:
    """Make each parametrized weight a plain `nn.Parameter` that requires a gradient; the layers' names.

    The layer computes the same bits as before, and its parameters have the order they had before it was
    parametrized. The parameters are new: an optimizer that is to train on needs to be built again.
    Parametrizations that others registered above ours are merged with them.
    """
    weights = list(found(model))
    if not weights:
        raise ValueError(
            f"merge: no weight of {type(model).__name__} is rotated or low-rank; call rotate or low_rank on "
            "a layer first, or pass the model that holds it"
        )
    for each in weights:
        module, name = each.module, each.tensor_name
        with torch.no_grad():
            weight = getattr(module, name).clone()
        parametrize.remove_parametrizations(module, name, leave_parametrized=True)
        delattr(module, name)
        module.register_parameter(name, nn.Parameter(weight))
        # Optimizers save their state by position.
        for parameter in each.parametrization.parameter_order:
            if parameter in module._parameters:
                module._parameters[parameter] = module._parameters.pop(parameter)
    return [each.name for each in weights]


def _label(module: nn.Module, name: str) -> str:
    return f"{parametrize.type_before_parametrizations(module).__name__}.{name}"


def _plain_weight(module: nn.Module, name: str) -> Tensor:
    """The parameter `name`, or an error that says why it cannot be parametrized."""
    label = _label(module, name)
    if parametrize.is_parametrized(module, name):
        raise ValueError(f"{label} is parametrized already; merge or remove that parametrization first")
    weight = module._parameters.get(name)
    if weight is None:
        if isinstance(getattr(module, name, None), Tensor):
            remedy = "remove the weight_norm or spectral_norm hook that computes it"
        else:
            known = [key for key, value in module._parameters.items() if value is not None]
            remedy = f"choose a name among {known}"
        raise ValueError(f"{label} is not a parameter; {remedy}")
    if is_lazy(weight):
        raise ValueError(f"{label} has no shape yet; run one batch through the lazy layer first")
    if weight.is_meta:
        raise ValueError(f"{label} is on the meta device and has no values; materialise the model first")
    if not weight.is_floating_point():
        raise ValueError(f"{label} is {weight.dtype}; only floating-point weights can be parametrized")
    if weight.ndim < 2 or weight.numel() == 0:
        raise ValueError(
            f"{label} has shape {tuple(weight.shape)}: neurons are the rows of a weight with at least 2 "
            "dimensions and at least 1 element; choose such a weight"
        )
    if not torch.isfinite(weight).all():
        raise ValueError(f"{label} has values that are not finite; mend the weight first")
    groups = getattr(module, "groups", 1)
    if isinstance(module, _ConvTransposeNd) and groups != 1:
        raise ValueError(
            f"{label}: groups={groups} in a transposed convolution; only groups=1 can be parametrized, so "
            "leave this layer out"
        )
    return weight
