"""Which weights of a model are regularised: found as (module, parameter name), so raw parameters are found too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from comhe.names import nearest
from comhe.neurons import Layer, View, columns_view, leaves, read_weight, views

Selector = str | type[nn.Module] | Callable[[Layer], bool]
Selection = Selector | Iterable[Selector]

# The attribute under which each wrapper holds what it wraps, by class name so that nothing is imported.
WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


class Skipped(NamedTuple):
    name: str
    reason: str


@dataclass(frozen=True)
class Because:
    """An exclusion that says why: `reason` stands beside what `selector` leaves out."""

    selector: Selector
    reason: str

    def __call__(self, layer: Layer) -> bool:
        return matches(self.selector, layer)


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

    `include` and `exclude` take globs on names ("features.*"), module types, predicates of a `Layer`, or several of
    these. A name without wildcards asks for that layer: raw parameters are found only so, and what cannot be served
    (frozen, quantised, depthwise...) is then an error instead of a line in `.skipped`. `columns` are globs of weights
    stored [in, out], whose columns are the neurons. `frozen` admits frozen weights too, for whoever only looks at them.
    """
    includes, excludes = selectors(include), selectors(exclude)
    asked, unwanted = ({s for s in chosen if isinstance(s, str) and not _is_glob(s)} for chosen in (includes, excludes))
    layers: list[Layer] = []
    skipped: list[Skipped] = []
    owners: dict[int, tuple[str, str]] = {}
    known: set[str] = set()
    answered: set[str] = set()

    for weight in _find(model, (columns,) if isinstance(columns, str) else tuple(columns), frozen):
        for view in weight.views:
            name = f"{weight.name}.{view.part}" if view.part else weight.name
            names = {name, weight.name, f"{weight.name}.{weight.parameter}"}
            known |= {name, weight.name}
            answered |= names
            by_name = bool(asked & names)
            reason = weight.unfit or ("" if by_name else view.unless_named)
            if not reason:
                layer = Layer(name, weight.module, weight.parameter, view)
                if include is not None and not by_name and not any(matches(s, layer) for s in includes):
                    continue
                # The first name under which a tied weight is wanted speaks for all of them.
                excluded = next((_why(s) for s in excludes if matches(s, layer)), "")
                fate = "is excluded" if excluded else "counts once"
                owner, fate = owners.setdefault(weight.identity, (weight.name, fate))
                if owner != weight.name:
                    reason = f"tied to {owner}, which {fate}"
                elif excluded:
                    skipped.append(Skipped(name, excluded))
                else:
                    layers.append(layer)
            if reason and by_name:
                raise ValueError(f"{name} was asked for by name but is {reason}: leave it out")
            if reason:
                skipped.append(Skipped(name, reason))
    if unwanted - answered:  # a module without neurons may be excluded, what does not exist may not
        unwanted -= {name for name, _ in named_modules(model)} | {name for name, _ in model.named_parameters()}
    for name in sorted((asked | unwanted) - answered):
        raise ValueError(f"no layer {name!r}{nearest(name, known)}")
    return Discovery(layers, skipped)


def matches(selector: Selector, layer: Layer) -> bool:
    if isinstance(selector, str):
        full = f"{layer.name}.weight" if layer.parameter == "weight" else layer.name
        return any(fnmatchcase(name, selector) for name in (layer.name, full, layer.weight_name))
    if isinstance(selector, type):
        return isinstance(layer.module, selector)
    return bool(selector(layer))


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
    views: list[View]
    identity: int  # equal for tied weights
    unfit: str  # why it cannot be regularised, "" if it can


def _find(model: nn.Module, column_globs: tuple[str, ...], frozen: bool) -> Iterator[_Weight]:
    for prefix, module in named_modules(model):
        _refuse_old_hooks(prefix, module)
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if parametrize.is_parametrized(module):
            names += list(module.parametrizations)  # type: ignore[arg-type]
        for parameter in names:
            name = layer_name(prefix, parameter)
            sources = tuple(leaves(module, parameter))
            for source in sources:
                _refuse_unmaterialised(name, source)
            if not sources:
                continue
            unfit = _unfit(sources, frozen)
            with torch.no_grad():
                weight = sources[0] if unfit else read_weight(module, parameter)
            found = views(module, parameter, weight)
            if found and any(fnmatchcase(name, glob) for glob in column_globs):
                found = [columns_view()]
            yield _Weight(name, module, parameter, found, id(sources[0]), unfit)


def _unfit(sources: tuple[nn.Parameter, ...], frozen: bool) -> str:
    for source in sources:
        if source.is_complex():
            return f"complex ({source.dtype})"
        if not source.is_floating_point():
            return f"quantised or integer ({source.dtype})"
    return "" if frozen or any(source.requires_grad for source in sources) else "frozen (requires_grad=False)"


def _refuse_unmaterialised(name: str, weight: Tensor) -> None:
    if isinstance(weight, UninitializedParameter):
        raise ValueError(f"{name} is lazy and has no shape yet: run one forward pass first")
    if weight.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values: materialise the model first")


def _refuse_old_hooks(prefix: str, module: nn.Module) -> None:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm):
            old = "weight_norm" if isinstance(hook, WeightNorm) else "spectral_norm"
            raise ValueError(
                f"{prefix or type(module).__name__} uses the hook-based torch.nn.utils.{old}, whose weight is stale "
                f"outside forward: use torch.nn.utils.parametrizations.{old}"
            )


def selectors(selection: Selection | None) -> tuple[Selector, ...]:
    if selection is None:
        return ()
    if isinstance(selection, str | type) or callable(selection):
        return (selection,)
    return tuple(selection)


def _why(selector: Selector) -> str:
    return selector.reason if isinstance(selector, Because) else "excluded"


def _is_glob(pattern: str) -> bool:
    return any(sign in pattern for sign in "*?[")
