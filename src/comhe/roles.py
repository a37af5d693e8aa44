"""Which layer is the classifier and which the first convolution: the paper treats both apart."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Literal, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

from comhe.discovery import Discovery, layer_name, named_modules, unwrapped
from comhe.names import did_you_mean
from comhe.neurons import Layer

Classifier = nn.Module | str | Literal[False] | None


class Roles(NamedTuple):
    classifier: frozenset[str]  # names of layers
    first_convolution: frozenset[str]
    notes: dict[str, str]


def find_roles(
    model: nn.Module,
    whole: Discovery,
    selected: Sequence[Layer],
    classifier: Classifier,
    asked: Container[str] = (),
) -> Roles:
    """`whole` are the layers found by themselves, `selected` those to regularise, which may hold others.

    `classifier` is a module, a layer's name, False for none, or None to look for it, not among those `asked` for.
    """
    if not (classifier is None or classifier is False or isinstance(classifier, str | nn.Module)):
        raise TypeError(f"classifier={classifier!r}: give a module of the model, a layer's name, or False for none")
    layers = list({layer.name: layer for layer in [*whole, *selected]}.values())
    found, why = _find_classifier(model, layers, classifier) or (_last(model, whole), "the last layer")
    if classifier is None and any(name in asked for name in found):
        found, why = frozenset(), f"{', '.join(found)} is asked for by name"
    first = next((layer for layer in whole if isinstance(layer.module, _ConvNd)), None)
    notes = {"classifier": f"{', '.join(sorted(found)) or 'none'} ({why})"}
    if first is not None:
        notes["first convolution"] = f"{first.name} (not projected)"
    return Roles(found, frozenset({first.name} if first else ()), notes)


def _last(model: nn.Module, whole: Discovery) -> frozenset[str]:
    """The last layer, even if its weight is tied and counts elsewhere."""
    if not whole:
        return frozenset()
    inside = list(named_modules(model))
    place = {id(module): i for i, (_, module) in enumerate(inside)}[id(whole[-1].module)]
    behind = {layer_name(name, "weight") for name, _ in inside[place + 1 :]}
    tied = [name for name, reason in whole.skipped if reason.startswith("tied to") and name in behind]
    return frozenset([*(layer.name for layer in whole[-1:]), *tied][-1:])


def _find_classifier(model: nn.Module, layers: Sequence[Layer], given: Classifier) -> tuple[frozenset[str], str] | None:
    if given is False:
        return frozenset(), "classifier=False"
    if isinstance(given, str):
        names = frozenset(layer.name for layer in layers if given in (layer.name, layer.weight_name))
        if not names:
            raise ValueError(f"classifier={given!r} is no layer{did_you_mean(given, [layer.name for layer in layers])}")
        return names, "named"
    if given is not None:
        names = _within(given, layers)
        if not names:
            raise ValueError(
                f"classifier={type(given).__name__}(...) holds no layer of the model: give one of its modules"
            )
        return names, "given"
    inner = unwrapped(model)
    for method in ("get_output_embeddings", "get_classifier"):
        if callable(getattr(inner, method, None)):
            head = getattr(inner, method)()
            if isinstance(head, nn.Module):
                return _within(head, layers) or _tied(head, model), f"the model's {method}()"
    return None


def _within(module: nn.Module, layers: Sequence[Layer]) -> frozenset[str]:
    inside = {id(part) for part in module.modules()}
    return frozenset(layer.name for layer in layers if id(layer.module) in inside)


def _tied(head: nn.Module, model: nn.Module) -> frozenset[str]:
    """A head whose weight counts elsewhere is named all the same; there is nothing of its own to leave out."""
    return frozenset(layer_name(name, "weight") for name, module in named_modules(model) if module is head)
