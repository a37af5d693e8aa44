"""From a model and rules to a plan: which layers, under which rule, sharing which basis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from comhe.discovery import Discovery, discover
from comhe.neurons import Layer
from comhe.products import lift
from comhe.projections import Projection
from comhe.rules import RedrawEvery, Rule
from comhe.selection import Selection, Selector, Skipped, exact_names, matches, selectors


@dataclass(eq=False)
class Family:
    """Layers of one rule that share a basis."""

    rule: Rule
    rule_index: int
    address: str  # names the basis: its random numbers and its place in a saved state depend on it
    redraw_every: int | None
    layers: list[Layer] = field(default_factory=list)

    @property
    def projection(self) -> Projection:
        return self.rule.projection

    @property
    def label(self) -> str:
        return self.rule.name or str(self.rule_index)

    @property
    def moves_every(self) -> int | None:
        return self.projection.advance_every

    @property
    def has_basis(self) -> bool:
        return type(self.projection).draw is not Projection.draw


@dataclass
class Plan:
    rules: tuple[Rule, ...]
    families: list[Family]
    layers: list[Layer]  # in the order of the model
    skipped: list[Skipped]
    unmatched: list[str]  # the labels of rules with globs, modules or types that no layer fits


def make_plan(
    model: nn.Module,
    rules: Sequence[Rule],
    *,
    include: Selection | None,
    exclude: Selection | None,
    columns: str | Iterable[str],
    redraw_every: RedrawEvery,
    shared: bool,
    serves: Callable[[Layer], bool] | None,
) -> Plan:
    if redraw_every not in (None, "auto") and (type(redraw_every) is not int or redraw_every < 1):
        raise ValueError(f"redraw_every={redraw_every!r}: choose a number of rounds >= 1, or None for never")
    labels = [rule.name or str(index) for index, rule in enumerate(rules)]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"two rules are named {label!r}: give each a name of its own")
    found = _discover(model, rules, include, exclude, columns)
    skipped, matched = list(found.skipped), set()
    families: dict[str, Family] = {}
    layers: list[Layer] = []
    for layer in found:
        index = next((i for i, rule in enumerate(rules) if any(matches(s, layer) for s in selectors(rule.where))), None)
        matched.add(index)
        if index is None:
            skipped.append(Skipped(layer.name, "no rule matches it"))
        elif serves is not None and not serves(layer):
            skipped.append(Skipped(layer.name, "not served here: its parameters are not in this optimizer"))
        else:
            rule = rules[index]
            _check_fit(layer, rule.projection)
            address = "/".join((labels[index], str(rule.projection.basis_key(layer))))
            if not shared:
                address = f"{address}/{layer.name}"
            period = rule.projection.redraw_every if redraw_every == "auto" else redraw_every
            family = families.setdefault(address, Family(rule, index, address, period))
            family.layers.append(layer)
            layers.append(layer)
    if not families:
        left_out = "; ".join(f"{name}: {reason}" for name, reason in skipped) or _nothing(model, include, columns)
        raise ValueError(f"no layer of {type(model).__name__} to regularise ({left_out})")
    unmatched = [
        label
        for index, (label, rule) in enumerate(zip(labels, rules, strict=True))
        if index not in matched and not any(_is_open(selector) for selector in selectors(rule.where))
    ]
    return Plan(tuple(rules), list(families.values()), layers, skipped, unmatched)


def _is_open(selector: Selector) -> bool:
    """Whether nobody would expect it to match something."""
    return selector == "*" or not isinstance(selector, str | type | nn.Module)


def _nothing(model: nn.Module, include: Selection | None, columns: str | Iterable[str]) -> str:
    """Why there is no layer where none was skipped."""
    there = ", ".join(layer.name for layer in discover(model, columns=columns, frozen=True))
    return f"include={include!r} matches none of: {there}" if there else "it has no weight matrices"


def _discover(
    model: nn.Module,
    rules: Sequence[Rule],
    include: Selection | None,
    exclude: Selection | None,
    columns: str | Iterable[str],
) -> Discovery:
    """What is found by itself, and what a rule asks for by its name, in the order of the model."""
    asked = [selector for rule in rules for selector in selectors(rule.where)]
    found = discover(model, ("*", *asked) if include is None else include, exclude, columns=columns)
    there = {
        alias for layer in found for alias in (layer.name, layer.weight_name, f"{layer.weight_name}.{layer.parameter}")
    }
    for name in sorted(exact_names(asked) - there):
        raise ValueError(f"a rule asks for {name!r}, which include or exclude leave out, or which does not exist")
    return found


def _check_fit(layer: Layer, projection: Projection) -> None:
    dim = getattr(projection, "dim", None)
    limit = projection.limit(layer)
    if dim is not None and dim > limit:
        raise ValueError(
            f"layer {layer.name!r}: dim={dim} is above {limit}, the most that its {layer.num_neurons} neurons of "
            f"fan-in {layer.fan_in} allow: choose a smaller dim, or give the layer a rule with projections.Identity()"
        )
    with torch.no_grad():
        if not bool(torch.isfinite(lift(layer.read())).all()):
            raise ValueError(f"layer {layer.name!r} holds a non-finite weight: repair or reinitialise it first")
