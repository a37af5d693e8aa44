"""How a module's weights hold neurons: for each kind of module, [..., N, D] with a neuron in each row.

A leading dimension separates sets between which angles mean nothing: groups of a convolution, experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

from comhe.products import no_autocast

Take = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """What of a weight is one layer's neurons: all of it, a part of a fused weight, or a factor of a low-rank one."""

    take: Take  # a function with a name, so that a regularizer can be pickled
    name: str = ""  # of the part of a fused weight, "q", "forget", or of the factor
    is_factor: bool = False  # of a low-rank parametrization, regularised in place of the weight
    taps: int = 1
    unless_named: str = ""  # why it is left alone unless its exact name is asked for
    unless_meant: str = ""  # why it is left alone unless asked for by more than a wildcard


@dataclass(frozen=True, eq=False)
class Layer:
    """Neurons of a model: a module, the name of its weight, and how that weight holds them."""

    name: str
    module: nn.Module
    parameter: str
    part: Part
    num_neurons: int = field(init=False)
    fan_in: int = field(init=False)
    num_groups: int = field(init=False)
    _plain: Mapping[str, nn.Parameter | None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Compiled code may hold the parameters of a recurrent module, but not the module.
        object.__setattr__(self, "_plain", self.module._parameters)
        with torch.no_grad():
            shape = self.read().shape
        object.__setattr__(self, "num_neurons", shape[-2])
        object.__setattr__(self, "fan_in", shape[-1])
        object.__setattr__(self, "num_groups", math.prod(shape[:-2]))

    @property
    def weight_name(self) -> str:
        """The name that the parts of a fused weight have in common."""
        return self.name.removesuffix(f".{self.part.name}") if self.part.name else self.name

    @property
    def taps(self) -> int:
        return self.part.taps

    def read(self) -> Tensor:
        """The neurons [..., N, D] as the weight has them now, differentiable in the module's parameters."""
        return self.within(self.source())

    def source(self) -> Tensor | dict[str, Tensor]:
        """What the neurons lie in: the weight, or the factors of a low-rank one."""
        plain = self._plain.get(self.parameter)
        if plain is not None:
            if self.part.is_factor:
                raise RuntimeError(f"{self.name} is merged into its weight: build the regularizer again")
            return plain
        if self.part.is_factor:
            return read_factors(self.module, self.parameter)
        return read_weight(self.module, self.parameter)

    def within(self, source: Tensor | dict[str, Tensor]) -> Tensor:
        """The neurons in what `source` gave for this layer, or for another one of the same weight."""
        return source[self.part.name] if isinstance(source, dict) else self.part.take(source)

    @property
    def device(self) -> torch.device:
        return self.leaves()[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.leaves()[0].dtype

    def leaves(self) -> tuple[nn.Parameter, ...]:
        """The parameters that the neurons are computed from."""
        plain = self._plain.get(self.parameter)
        return (plain,) if plain is not None else tuple(leaves(self.module, self.parameter))


def read_all(layers: Iterable[Layer]) -> dict[str, Tensor]:
    """The neurons of each layer by its name; a weight that several layers are parts of is computed once."""
    sources: dict[str, Tensor | dict[str, Tensor]] = {}
    found = {}
    for layer in layers:
        if layer.weight_name not in sources:
            sources[layer.weight_name] = layer.source()
        found[layer.name] = layer.within(sources[layer.weight_name])
    return found


def read_weight(module: nn.Module, name: str) -> Tensor:
    """The weight, once; a parametrized one is computed in eval mode, so that no buffer moves (spectral norm)."""
    if not parametrize.is_parametrized(module, name):
        return getattr(module, name)  # type: ignore[no-any-return]
    parametrizations: nn.Module = module.parametrizations[name]  # type: ignore[index, assignment, unused-ignore]
    training = [part for part in parametrizations.modules() if part.training]
    for part in training:
        part.training = False
    try:
        with no_autocast(next(leaves(module, name)).device):
            weight: Tensor = parametrizations()
    finally:
        for part in training:
            part.training = True
    return weight


def read_factors(module: nn.Module, name: str) -> dict[str, Tensor]:
    """The factors {name: [N, D]} of a weight parametrized by them, {} for any other."""
    if parametrize.is_parametrized(module, name):
        chain = module.parametrizations[name]  # type: ignore[index, union-attr, unused-ignore]
        factors = getattr(chain[0], "factors", None)
        if factors is not None:
            return factors(*originals(module, name))  # type: ignore[no-any-return]
    return {}


def leaves(module: nn.Module, name: str) -> Iterator[nn.Parameter]:
    """The parameters of a weight: itself, or its originals and then what its parametrizations learn (LoRA)."""
    if not parametrize.is_parametrized(module, name):
        yield getattr(module, name)
        return
    yield from module.parametrizations[name].parameters()  # type: ignore[index, union-attr]


def originals(module: nn.Module, name: str) -> Iterator[nn.Parameter]:
    if not parametrize.is_parametrized(module, name):
        yield getattr(module, name)
        return
    yield from module.parametrizations[name].parameters(recurse=False)  # type: ignore[index, union-attr]


def parts(module: nn.Module, name: str, weight: Tensor, is_columns: bool = False) -> list[Part]:
    """The sets of neurons in weight `name` of `module`; none where it holds no neurons (biases, norms).

    `is_columns`: stored [in, out], a neuron in each column. A weight whose layout its module fixes stays as it is.
    """
    if factors := read_factors(module, name):
        return [Part(_all, name=factor, is_factor=True) for factor in factors]
    if weight.ndim < 2 or "bias" in name:
        return []
    if describe := _fixed(module, name):
        return describe(module, name, weight)
    if is_columns and weight.ndim <= 3:
        return [Part(_columns)]
    if isinstance(module, _ROWS) and name == "weight":
        return [Part(_rows)]
    return _of_unknown(module, name, weight)


def has_fixed_layout(module: nn.Module, name: str) -> bool:
    """Whether the module says by itself what in this weight is a neuron, whatever its orientation."""
    return _fixed(module, name) is not None


def _all(weight: Tensor) -> Tensor:
    return weight


def _rows(weight: Tensor) -> Tensor:
    return weight.flatten(1)


def _columns(weight: Tensor) -> Tensor:
    return weight.mT


def _chunk(index: int, count: int, weight: Tensor) -> Tensor:
    part: Tensor = weight.unflatten(0, (count, -1))[index]
    return part


def _grouped(groups: int, weight: Tensor) -> Tensor:
    """Of [out, in / groups, taps...]."""
    return weight.flatten(1) if groups == 1 else weight.reshape(groups, -1, weight[0].numel())


def _transposed(groups: int, weight: Tensor) -> Tensor:
    """Of [in, out / groups, taps...]."""
    by_group = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2).flatten(2)
    return by_group.squeeze(0) if groups == 1 else by_group


def _depthwise(take: Take, weight: Tensor) -> Tensor:
    return take(weight).squeeze(-2)


def _of_convolution(module: nn.Module, name: str, weight: Tensor) -> list[Part]:
    assert isinstance(module, _ConvNd)
    taps, groups = math.prod(module.kernel_size), module.groups
    take = partial(_transposed if isinstance(module, _ConvTransposeNd) else _grouped, groups)
    if groups > 1 and module.out_channels == groups:
        reason = "depthwise: one filter a channel, and filters of different channels are not comparable"
        return [Part(partial(_depthwise, take), taps=taps, unless_named=reason)]
    return [Part(take, taps=taps)]


def _split(names: tuple[str, ...]) -> list[Part]:
    return [Part(partial(_chunk, i, len(names)), name=name) for i, name in enumerate(names)]


def _of_attention(module: nn.Module, name: str, weight: Tensor) -> list[Part]:
    return _split(("q", "k", "v")) if name == "in_proj_weight" else [Part(_rows)]


_GATES = {"LSTM": ("input", "forget", "cell", "output"), "GRU": ("reset", "update", "new")}


def _of_recurrent(module: nn.Module, name: str, weight: Tensor) -> list[Part]:
    kind = str(getattr(module, "mode", type(module).__name__.removesuffix("Cell")))
    is_projection = name.startswith("weight_hr")  # of an LSTM
    return _split(_GATES[kind]) if kind in _GATES and not is_projection else [Part(_rows)]


# Modules that fix how their weights are laid out, and the names of these weights, or what these begin with in a module
# of several layers ("weight_ih_l0"). Any other parameter, one that a subclass adds perhaps, is unknown.
_Describe = Callable[[nn.Module, str, Tensor], list[Part]]
_KINDS: tuple[tuple[tuple[type[nn.Module], ...], tuple[str, ...], _Describe], ...] = (
    ((_ConvNd,), ("weight",), _of_convolution),
    ((nn.MultiheadAttention,), ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"), _of_attention),
    ((nn.RNNBase, nn.RNNCellBase), ("weight_ih", "weight_hh", "weight_hr"), _of_recurrent),
)


def _fixed(module: nn.Module, name: str) -> _Describe | None:
    for kind, names, describe in _KINDS:
        if isinstance(module, kind) and any(name == own or name.startswith(f"{own}_l") for own in names):
            return describe
    return None


_ROWS = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag)

# Layers outside torch whose square weights do not tell rows from columns, by name so that nothing is imported.
_KNOWN_ELSEWHERE: dict[str, Take] = {
    "torch_geometric.nn.dense.linear.Linear": _rows,
    "transformers.pytorch_utils.Conv1D": _columns,
}

_SIZES = (("in_features", "out_features"), ("in_channels", "out_channels"), ("nx", "nf"))


def _of_unknown(module: nn.Module, name: str, weight: Tensor) -> list[Part]:
    """Layers outside torch by their stated sizes; any other parameter is left alone unless it is meant."""
    if name == "weight" and weight.ndim == 2:
        for kind in type(module).__mro__:
            if known := _KNOWN_ELSEWHERE.get(f"{kind.__module__}.{kind.__qualname__}"):
                return [Part(known)]
        for fan_in, fan_out in _SIZES:
            sizes = getattr(module, fan_in, None), getattr(module, fan_out, None)
            if all(isinstance(size, int) for size in sizes) and sizes[0] != sizes[1]:
                if tuple(weight.shape) == (sizes[1], sizes[0]):
                    return [Part(_rows)]
                if tuple(weight.shape) == sizes:
                    return [Part(_columns)]
    if weight.ndim > 3:
        return [Part(_rows, unless_meant="a raw parameter, read as rows along its first dimension")]
    square = weight.ndim == 2 and weight.shape[0] == weight.shape[1]
    reason = "a raw parameter, read row by row" + ("; square, so its orientation is a guess" if square else "")
    return [Part(_all, unless_meant=reason)]
