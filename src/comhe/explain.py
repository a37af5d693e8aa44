"""The dry run: what a regularizer will do to which layers, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from comhe.discovery import Skipped
from comhe.plan import Plan
from comhe.rules import Schedule
from comhe.tables import table


@dataclass(frozen=True)
class Row:
    layer: str
    groups: int
    neurons: int
    fan_in: int
    rule: str
    projection: str
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
        lines = [table(names, [[getattr(row, name) for name in names] for row in self.rows])]
        lines += [f"{word}: {text}" for word, text in self.notes.items()]
        lines += [f"skipped {name}: {reason}" for name, reason in self.skipped]
        return "\n".join(lines)


def explain(plan: Plan, notes: dict[str, str], weights: Sequence[float | Schedule]) -> Explanation:
    """`weights` are those of the rules as they are now."""
    rows = []
    for group in plan.groups:
        rule, weight = group.rule, weights[group.rule_index]
        moves = f", moved every {group.moves_every}" if group.moves_every else ""
        drawn = f"redrawn every {group.redraw_every}" if group.redraw_every else "drawn once"
        for layer in group.layers:
            rows.append(
                Row(
                    layer=layer.name,
                    groups=layer.num_groups,
                    neurons=layer.num_neurons,
                    fan_in=layer.fan_in,
                    rule=group.label,
                    projection=str(rule.projection),
                    basis=f"{group.address} ({drawn}{moves})" if group.has_basis else "none",
                    objective=rule.describe(),
                    weight="schedule" if callable(weight) else f"{weight:g}",
                    engine="reference: PyTorch operations",
                )
            )
    order = {layer.name: i for i, layer in enumerate(plan.layers)}
    return Explanation(sorted(rows, key=lambda row: order[row.layer]), plan.skipped, notes)
