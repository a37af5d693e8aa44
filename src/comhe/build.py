"""From the name of a method to a regularizer of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.nn.utils import parametrize

from comhe.discovery import Because, Selection, discover, selectors
from comhe.methods import Method, find_method
from comhe.names import nearest
from comhe.neurons import Layer
from comhe.parametrizations import low_rank, rotate
from comhe.penalties import PENALTIES
from comhe.projections import REGISTRY, Projection
from comhe.projections.identity import Identity
from comhe.regularizer import Regularizer
from comhe.roles import Classifier, Roles, find_roles
from comhe.rules import Rule

_EMBEDDINGS = tuple(
    Because(kind, "an embedding, regularised only if `include` asks for it") for kind in (nn.Embedding, nn.EmbeddingBag)
)
_OF_RULE = {f.name for f in fields(Rule)} - {"where", "projection", "name"}
_OF_REGULARIZER = set(inspect.signature(Regularizer).parameters) - {"model", "rules", "settings", "notes"}
_OF_PARAMETRIZATION = {"": set(), "rotation": {"map"}, "low-rank": {"rank"}}


def build(
    name: str,
    model: nn.Module,
    *,
    classifier: Classifier = None,
    classifier_weight: float | None = None,
    small_fan_in: Literal["identity", "error"] = "identity",
    include: Selection | None = None,
    exclude: Selection | None = None,
    **overrides: Any,
) -> Regularizer:
    """The regularizer of a row of the paper, by its name, for the hidden layers of `model`, with weight 1.

    The first convolution, and every layer whose fan-in is not above `dim`, is not projected (`small_fan_in="error"`
    refuses such a layer instead). The classifier is left alone unless `classifier_weight` says otherwise; it is the
    one given, or the model's `get_output_embeddings()` or `get_classifier()`, or else the last layer; False means that
    there is none. Embeddings take part only if `include` asks for them.

    `overrides` are fields of the projection (dim, num_views...), of `Rule` (weight, s, half_space...), arguments of
    `Regularizer` (seed, redraw_every...) and of the method's penalty (local, body...). "rotation" also takes `map` and
    "lr-bp-comhe" takes `rank`; both parametrize the model in place, must precede the optimizer, and are undone by
    `comhe.merge(model)`.
    """
    method = find_method(name)
    if small_fan_in not in ("identity", "error"):
        raise ValueError(f"small_fan_in={small_fan_in!r}: choose 'identity' or 'error'")
    sorted_settings = _sort_settings(name, method, overrides)
    if of_penalty := sorted_settings.pop("penalty"):
        penalty = sorted_settings["rule"]["penalty"]
        sorted_settings["rule"]["penalty"] = partial(PENALTIES[penalty], **of_penalty)
    projection = REGISTRY[method.projection](**sorted_settings["projection"])
    excluded = [*selectors(exclude), *(() if include is not None else _EMBEDDINGS)]
    regularizer = {**sorted_settings["regularizer"], "include": include, "exclude": excluded}
    columns = regularizer.get("columns", ())
    layers = discover(model, include, excluded, columns=columns)
    # What is left out or frozen keeps its role, which would else pass to its neighbour.
    roles = find_roles(model, discover(model, None, _EMBEDDINGS, columns=columns, frozen=True), layers, classifier)
    weight = method.classifier_weight if classifier_weight is None else classifier_weight

    hidden = [layer for layer in layers if layer.name not in roles.classifier]
    undo = _parametrize(method, hidden, roles, regularizer.get("seed", 0), sorted_settings["parametrization"])
    try:
        rules = _rules(sorted_settings["rule"], projection, layers, roles, weight, small_fan_in, overrides)
        if weight == 0:
            excluded.append(
                Because(
                    lambda layer: layer.name in roles.classifier, "the classifier, of weight 0: see classifier_weight"
                )
            )
        return Regularizer(model, rules, notes=roles.notes, **regularizer)
    except BaseException:
        undo()
        raise


def _sort_settings(name: str, method: Method, overrides: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each setting to the one it belongs to; overrides replace the method's own."""
    penalty = {**method.settings, **overrides}.get("penalty")
    places = {
        "projection": {f.name for f in fields(REGISTRY[method.projection])},
        "rule": _OF_RULE,
        "regularizer": _OF_REGULARIZER,
        "parametrization": _OF_PARAMETRIZATION[method.parametrization],
        "penalty": set(list(inspect.signature(PENALTIES[penalty]).parameters)[1:]) if penalty in PENALTIES else set(),
    }
    found: dict[str, dict[str, Any]] = {place: {} for place in places}
    for key, value in {**method.settings, **overrides}.items():
        place = next((place for place, names in places.items() if key in names), None)
        if place is None:
            raise TypeError(f"{name!r} takes no {key!r}{nearest(key, set().union(*places.values()))}")
        found[place][key] = value
    return found


def _rules(
    settings: dict[str, Any],
    projection: Projection,
    layers: Sequence[Layer],
    roles: Roles,
    classifier_weight: float,
    small_fan_in: str,
    overrides: Container[str],
) -> list[Rule]:
    dim = getattr(projection, "dim", 0)
    limits = {layer.name: projection.limit(layer) for layer in layers if layer.name not in roles.classifier}
    small = [name for name, limit in limits.items() if limit <= dim]
    plain = roles.first_convolution | set(small)
    if small_fan_in == "error" and plain > roles.first_convolution:
        names = ", ".join(name for name in small if name not in roles.first_convolution)
        raise ValueError(f"{names}: no larger than dim={dim}: choose a smaller dim, or small_fan_in='identity'")
    if small and "dim" in overrides and plain >= limits.keys():
        raise ValueError(
            f"dim={dim}: no hidden layer is larger (the largest: {max(limits.values())}); choose a smaller dim"
        )
    if small:
        roles.notes["not projected"] = f"{', '.join(sorted(small))} (no larger than dim={dim})"
    of_classifier = {**settings, "weight": classifier_weight, "half_space": False}
    return [
        Rule(lambda layer: layer.name in roles.classifier, Identity(), name="classifier", **of_classifier),
        Rule(lambda layer: layer.name in plain, Identity(), name="unprojected", **settings),
        Rule("*", projection, name="hidden", **settings),
    ]


def _parametrize(
    method: Method, hidden: Sequence[Layer], roles: Roles, seed: int, settings: dict[str, Any]
) -> Callable[[], None]:
    """Parametrize hidden layers as the method has it; the function returned takes that back."""
    done: list[tuple[nn.Module, str, dict[str, nn.Parameter | None]]] = []

    def undo() -> None:
        for module, name, before in reversed(done):
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
            delattr(module, name)
            module._parameters.clear()
            module._parameters.update(before)

    rank = settings.get("rank", 30)
    weights = {(id(layer.module), layer.parameter): layer for layer in hidden}  # the parts of a fused weight are one
    try:
        for layer in weights.values() if method.parametrization else ():
            module, name, before = layer.module, layer.parameter, dict(layer.module._parameters)
            if method.parametrization == "rotation":
                rotate(module, name, **settings)
            elif min(layer.num_neurons, layer.fan_in) > rank and layer.name not in roles.first_convolution:
                low_rank(module, rank, name, seed=seed, key=layer.name)
            else:
                continue
            done.append((module, name, before))
    except BaseException:
        undo()
        raise
    if method.parametrization == "low-rank" and not done:
        raise ValueError(f"rank={rank}: no hidden layer has more than {rank} neurons and inputs; choose a smaller rank")
    return undo
