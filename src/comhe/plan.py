"""From a model and rules to a plan: which layers, under which rule, sharing which basis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from comhe.discovery import Discovery, Selector, Skipped, discover, matches, selectors
from comhe.neurons import Layer
from comhe.projections import Projection
from comhe.rules import RedrawEvery, Rule


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


def make_plan(
    model: nn.Module,
    rules: Sequence[Rule],
    *,
    include: Selector | Iterable[Selector] | None,
    exclude: Selector | Iterable[Selector] | None,
    columns: str | Iterable[str],
    redraw_every: RedrawEvery,
    shared: bool,
    serves: Callable[[Layer], bool] | None,
) -> Plan:
    if redraw_every not in (None, "auto") and (not isinstance(redraw_every, int) or redraw_every < 1):
        raise ValueError(f"redraw_every={redraw_every!r}: choose a number of rounds >= 1, or None for never")
    found = _discover(model, rules, include, exclude, columns)
    skipped = list(found.skipped)
    families: dict[str, Family] = {}
    layers: list[Layer] = []
    for layer in found:
        index = next((i for i, rule in enumerate(rules) if any(matches(s, layer) for s in selectors(rule.where))), None)
        if index is None:
            skipped.append(Skipped(layer.name, "no rule matches it"))
        elif serves is not None and not serves(layer):
            skipped.append(Skipped(layer.name, "not served here: its parameters are not in this optimizer"))
        else:
            rule = rules[index]
            _check_fit(layer, rule.projection)
            address = "/".join((rule.name or str(index), str(rule.projection.basis_key(layer))))
            if not shared:
                address = f"{address}/{layer.name}"
            period = rule.projection.redraw_every if redraw_every == "auto" else redraw_every
            family = families.setdefault(address, Family(rule, index, address, period))
            family.layers.append(layer)
            layers.append(layer)
    if not families:
        left_out = "; ".join(f"{name}: {reason}" for name, reason in skipped) or _nothing(model, include, columns)
        raise ValueError(f"no layer of {type(model).__name__} to regularise ({left_out})")
    return Plan(tuple(rules), list(families.values()), layers, skipped)


def _nothing(model: nn.Module, include: Selector | Iterable[Selector] | None, columns: str | Iterable[str]) -> str:
    """Why there is no layer where none was skipped."""
    there = ", ".join(layer.name for layer in discover(model, columns=columns, frozen=True))
    return f"include={include!r} matches none of: {there}" if there else "it has no weight matrices"


def _discover(
    model: nn.Module,
    rules: Sequence[Rule],
    include: Selector | Iterable[Selector] | None,
    exclude: Selector | Iterable[Selector] | None,
    columns: str | Iterable[str],
) -> Discovery:
    """What is found by itself, and what a rule asks for by its exact name, in the order of the model."""
    found = discover(model, include, exclude, columns=columns)
    have = {layer.name for layer in found}
    asked = [
        s for rule in rules for s in selectors(rule.where) if isinstance(s, str) and not any(c in s for c in "*?[")
    ]
    missing = [name for name in asked if name not in have]
    if missing and include is None:
        return discover(model, ("*", *missing), exclude, columns=columns)
    return found


def _check_fit(layer: Layer, projection: Projection) -> None:
    dim = getattr(projection, "dim", None)
    limit = projection.limit(layer)
    if dim is not None and dim > limit:
        raise ValueError(
            f"{layer.name}: dim={dim} is above {limit}, the most that its {layer.num_neurons} neurons of fan-in "
            f"{layer.fan_in} allow: choose a smaller dim, or give the layer a rule with projections.Identity()"
        )
    with torch.no_grad():
        if not bool(torch.isfinite(layer.read()).all()):
            raise ValueError(f"{layer.name} holds a non-finite weight: repair or reinitialise it first")
