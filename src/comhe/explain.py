"""The dry run: what a regularizer will do to which layers, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from comhe.executor import why_not
from comhe.neurons import Layer
from comhe.plan import Plan
from comhe.projections import Basis, Projection
from comhe.rules import Schedule
from comhe.selection import Skipped
from comhe.tables import table


@dataclass(frozen=True)
class Row:
    layer: str
    num_groups: int
    num_neurons: int
    fan_in: int
    rule: str
    projection: str  # settings other than the default ones
    views: str
    basis: str
    objective: str
    weight: str
    engine: str


@dataclass(frozen=True)
class Explanation:
    """A row for each layer, what was skipped and why, and remarks; `str()` gives the table."""

    rows: list[Row]
    skipped: list[Skipped]
    notes: dict[str, str]

    def as_dicts(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        names = [f.name for f in fields(Row)]
        headings = [name.removeprefix("num_") for name in names]
        lines = [table(headings, [[getattr(row, name) for name in names] for row in self.rows])]
        lines += [f"{word}: {text}" for word, text in self.notes.items()]
        lines += [f"skipped {name}: {reason}" for name, reason in self.skipped]
        return "\n".join(lines)


def explain(
    plan: Plan, notes: dict[str, str], weights: Sequence[float | Schedule], bases: Sequence[Basis]
) -> Explanation:
    """`weights` are those of the rules as they are now, `bases` those of the families."""
    views = {
        layer.name: _views(family.projection, layer, basis)
        for family, basis in zip(plan.families, bases, strict=True)
        for layer in family.layers
    }
    rows = []
    for family in plan.families:
        rule, weight = family.rule, weights[family.rule_index]
        period, moves_every = family.redraw_every, family.moves_every
        drawn = f"redrawn {_every(period)}" if period else "drawn once"
        moves = f", moved {_every(moves_every)}" if moves_every else ""
        if period and moves_every and moves_every % period == 0:
            moves = ", never moved as each move falls on a draw"
        for layer in family.layers:
            rows.append(
                Row(
                    layer=layer.name,
                    num_groups=layer.num_groups,
                    num_neurons=layer.num_neurons,
                    fan_in=layer.fan_in,
                    rule=family.label,
                    projection=_brief(rule.projection),
                    views=views[layer.name],
                    basis=f"{family.address} ({drawn}{moves})" if family.has_basis else "none",
                    objective=rule.describe(),
                    weight="schedule" if callable(weight) else f"{weight:g}",
                    engine=f"reference: {why}" if (why := why_not(family)) else "closed forms",
                )
            )
    if plan.unmatched:
        notes = {**notes, "rules without a layer": ", ".join(plan.unmatched)}
    order = {layer.name: i for i, layer in enumerate(plan.layers)}
    return Explanation(sorted(rows, key=lambda row: order[row.layer]), plan.skipped, notes)


def _views(projection: Projection, layer: Layer, basis: Basis) -> str:
    """As "5 x [64, 30]": the point sets that are made of one set of neurons, found without computing any."""
    neurons = torch.empty(layer.num_neurons, layer.fan_in, device="meta")
    shapes = [view.shape for view in projection.views(neurons, tuple(part.to("meta") for part in basis))]
    return " + ".join(f"{count} x [{points}, {dim}]" for count, points, dim in shapes)


def _brief(projection: Projection) -> str:
    chosen = {
        f.name: getattr(projection, f.name) for f in fields(projection) if getattr(projection, f.name) != f.default
    }
    return f"{type(projection).__name__}({', '.join(f'{name}={value!r}' for name, value in chosen.items())})"


def _every(period: int) -> str:
    return "every round" if period == 1 else f"every {period} rounds"
