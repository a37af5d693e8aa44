"""Which weights of a model hold neurons: found as (module, parameter name), so raw parameters are found too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from comhe.names import did_you_mean
from comhe.neurons import Layer, Part, has_fixed_layout, leaves, parts, read_weight
from comhe.selection import Choice, Selection, Skipped, Unreadable, is_glob, matches

# The attribute under which each wrapper holds what it wraps, by class name so that nothing is imported.
WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


class Discovery(list[Layer]):
    """The layers found, in the order of the model, and what was left out and why."""

    def __init__(self, layers: Iterable[Layer], skipped: Iterable[Skipped]) -> None:
        super().__init__(layers)
        self.skipped = list(skipped)


def discover(
    model: nn.Module,
    include: Selection | None = None,
    exclude: Selection | None = None,
    *,
    columns: str | Iterable[str] = (),
    frozen: bool = False,
) -> Discovery:
    """The layers of `model` that hold neurons.

    `include` and `exclude` take globs on names ("features.*"), modules or their names, for all that is inside, module
    types, predicates of a `Layer`, or several of these. The exact name of a layer asks for that layer: what cannot be
    served (frozen, quantised, depthwise...) is then an error instead of a line in `.skipped`. Raw parameters are found
    only if meant: by name, type, module, predicate, or a glob whose last part is no bare wildcard ("*.gate_up").
    `columns` are globs of weights stored [in, out], whose columns are the neurons; convolutions, attention and
    recurrent layers keep their own layout. `frozen` admits frozen weights too, for whoever only looks at them.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: give a torch.nn.Module")
    choice = Choice(include, exclude)
    weights = list(_find(model, (columns,) if isinstance(columns, str) else tuple(columns), frozen))
    for weight in weights:
        if not weight.unfit:
            choice.owns(weight.name, weight.aliases, weight.identity)
    layers = []
    for weight in weights:
        for part in weight.parts:
            name = f"{weight.name}.{part.name}" if part.name else weight.name
            layer: Layer | Unreadable
            if weight.unfit or weight.unreadable:
                layer = Unreadable(name, weight.name, weight.module, weight.parameter, weight.unreadable)
                is_thin = False
            else:
                layer = Layer(name, weight.module, weight.parameter, part)
                is_thin = layer.fan_in == 1
            if choice.takes(
                name,
                {name} | weight.aliases,
                weight.name,
                weight.identity,
                partial(matches, layer=layer),
                unfit=weight.unfit,
                unless_named="of fan-in 1, where every neuron is +1 or -1" if is_thin else part.unless_named,
                unless_meant=part.unless_meant,
            ):
                if isinstance(layer, Unreadable):
                    raise ValueError(layer.why)
                layers.append(layer)
    others = [name for name, _ in (*named_modules(model), *model.named_parameters())]
    choice.check_names(others)
    return Discovery(layers, choice.skipped)


def named_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module once, under a name free of wrappers' prefixes; parametrizations belong to their owner."""
    return _walk(model, prefix, set())


def _walk(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    inner = WRAPPERS.get(type(module).__name__)
    for name, child in module.named_children():
        if name == "parametrizations" and parametrize.is_parametrized(module):
            continue
        path = prefix if name == inner else f"{prefix}.{name}" if prefix else name
        yield from _walk(child, path, seen)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside its wrappers."""
    while (name := WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, name)
    return model


def layer_name(prefix: str, parameter: str) -> str:
    if parameter == "weight" and prefix:
        return prefix
    return f"{prefix}.{parameter}" if prefix else parameter


class _Weight(NamedTuple):
    name: str
    module: nn.Module
    parameter: str
    parts: list[Part]
    identity: int  # equal for tied weights
    unfit: str = ""  # why it cannot be regularised, "" if it can
    unreadable: str = ""  # why it cannot even be looked at

    @property
    def aliases(self) -> set[str]:
        return {self.name, f"{self.name}.{self.parameter}"}


def _find(model: nn.Module, columns: tuple[str, ...], frozen: bool) -> Iterator[_Weight]:
    names, missing = set(), {glob for glob in columns if not is_glob(glob)}
    for prefix, module in named_modules(model):
        stale = dict(_stale(module))
        for computed, how in stale.items():
            name = layer_name(prefix, computed)
            owner = prefix or type(module).__name__
            why = f"{owner} uses the hook-based torch.nn.utils.{how}, whose weight is stale outside forward"
            unfit = "" if frozen or _is_trained(module.parameters(recurse=False)) else _FROZEN
            yield _Weight(name, module, computed, [Part(torch.flatten)], id(module), unfit, f"{why}: {_INSTEAD[how]}")
        for parameter in _parameters(module):
            sources = tuple(leaves(module, parameter))
            if not sources or any(parameter.startswith(f"{computed}_") for computed in stale):
                continue
            name = layer_name(prefix, parameter)
            names.add(name)
            matched = {g for g in columns if matches(g, Unreadable(name, name, module, parameter, ""))}
            if matched & missing and has_fixed_layout(module, parameter):
                raise ValueError(f"columns={name!r}: a {type(module).__name__} has a layout of its own, leave it out")
            missing -= matched
            yield _weight(name, module, parameter, sources, bool(matched), frozen)
        for packed, identity, how in _quantised(module):
            unfit = f"quantised or integer ({how})"
            yield _Weight(layer_name(prefix, packed), module, packed, [Part(torch.flatten)], identity, unfit)
    for name in missing:
        raise ValueError(f"columns={name!r}: no layer of that name{did_you_mean(name, names)}")


def _parameters(module: nn.Module) -> list[str]:
    names = [name for name, _ in module.named_parameters(recurse=False)]
    return [*names, *module.parametrizations] if parametrize.is_parametrized(module) else names  # type: ignore[misc]


def _weight(
    name: str, module: nn.Module, parameter: str, sources: tuple[nn.Parameter, ...], is_columns: bool, frozen: bool
) -> _Weight:
    unfit, unreadable = _unfit(sources, frozen), _unmaterialised(name, sources)
    if isinstance(sources[0], UninitializedParameter):
        is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
        found = [Part(torch.flatten)] if parameter == "weight" and not is_norm else []
    else:
        with torch.no_grad():
            weight = sources[0] if unfit or unreadable else read_weight(module, parameter)
        found = parts(module, parameter, weight, is_columns)
    return _Weight(name, module, parameter, found, id(sources[0]), unfit, unreadable)


def _unfit(sources: tuple[nn.Parameter, ...], frozen: bool) -> str:
    for source in sources:
        if source.is_complex():
            return f"complex ({source.dtype})"
        if not source.is_floating_point():
            return f"quantised or integer ({source.dtype})"
        if not isinstance(source, UninitializedParameter) and source.numel() == 0:
            return f"empty, of shape {tuple(source.shape)}"
    return "" if frozen or _is_trained(sources) else _FROZEN


_FROZEN = "frozen (requires_grad=False)"


def _is_trained(sources: Iterable[nn.Parameter]) -> bool:
    return any(source.requires_grad for source in sources)


def _unmaterialised(name: str, sources: tuple[nn.Parameter, ...]) -> str:
    for source in sources:
        if isinstance(source, UninitializedParameter):
            return f"{name} is lazy and has no shape yet: run one forward pass first"
        if source.is_meta:
            return f"{name} is on the meta device and has no values: materialise the model first"
    return ""


_INSTEAD = {
    "weight_norm": "use torch.nn.utils.parametrizations.weight_norm",
    "spectral_norm": "use torch.nn.utils.parametrizations.spectral_norm",
    "prune": "call torch.nn.utils.prune.remove first",
}


def _stale(module: nn.Module) -> Iterator[tuple[str, str]]:
    """The weights that a hook computes in forward, and by which means."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            yield hook.name, "weight_norm"
        elif isinstance(hook, SpectralNorm):
            yield hook.name, "spectral_norm"
        elif isinstance(hook, BasePruningMethod):
            yield hook._tensor_name, "prune"


def _quantised(module: nn.Module) -> Iterator[tuple[str, int, str]]:
    """Weights that are no parameters: (name, identity, how they are kept)."""
    for name, buffer in module.named_buffers(recurse=False):
        if "weight" in name and buffer.ndim > 1 and not (buffer.is_floating_point() or buffer.is_complex()):
            yield name, id(buffer), str(buffer.dtype)
    if callable(getattr(type(module), "weight", None)):  # of the type: reading a parametrized weight has side effects
        yield "weight", id(module), "packed"
