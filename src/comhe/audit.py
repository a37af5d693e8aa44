"""The geometry of a model's weights, layer by layer: energy against its bound, close pairs, dead neurons."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from comhe.discovery import discover
from comhe.energies import Distance, Energy
from comhe.geometry import measure
from comhe.products import lift, widest
from comhe.selection import Selection, Skipped
from comhe.stored import load
from comhe.stored import neurons as stored_neurons
from comhe.tables import table

Source = nn.Module | Mapping[str, Any] | str | os.PathLike[str]

_DEAD = 1e-8  # of the layer's largest norm


@dataclass(frozen=True)
class Change:
    """What the second model has more, or less, than the first."""

    energy: float
    excess: float | None
    smallest_angle: float | None
    num_close_pairs: int
    num_dead: int
    num_nonfinite: int


@dataclass(frozen=True)
class Row:
    """One layer. A layer of several groups has the means over groups of `energy`, `expected` and `bound`."""

    name: str
    num_neurons: int  # of a group
    fan_in: int | None  # None in the total
    num_groups: int
    energy: float  # mean over ordered pairs
    expected: float  # the same of uniformly random directions, infinite where s >= fan_in - 1
    bound: float  # what no directions go below
    excess: float | None  # 0 at the bound, 1 as random, above 1 worse; None where expected is infinite
    smallest_angle: float | None  # in degrees; None without a pair
    num_close_pairs: int
    num_dead: int
    num_nonfinite: int
    change: Change | None = None


# Heading, field and format of each column.
_CHANGES = (
    ("energy", "energy", ".4g"),
    ("excess", "excess", ".3g"),
    ("angle", "smallest_angle", ".4g"),
    ("close", "num_close_pairs", "d"),
    ("dead", "num_dead", "d"),
    ("non-finite", "num_nonfinite", "d"),
)
_COLUMNS = (
    ("layer", "name", ""),
    ("N", "num_neurons", "d"),
    ("D", "fan_in", "d"),
    ("groups", "num_groups", "d"),
    ("energy", "energy", ".6g"),
    ("uniform", "expected", ".6g"),
    ("bound", "bound", ".6g"),
    *_CHANGES[1:],
)


@dataclass(frozen=True)
class Audit:
    """A row for each layer and one for all; `str()` is the table.

    In `total`, counts and energies are added up, as a loss adds them (its `num_neurons` counts every group),
    the angle is the smallest, and `excess` is that of the sums over the layers that have one.
    """

    rows: list[Row]
    total: Row
    skipped: list[Skipped]
    only_in_model: list[str]
    only_in_other: list[str]

    def as_dicts(self) -> list[dict[str, Any]]:
        """The rows for JSON, which knows no infinity: None stands for it."""
        return [_plain(asdict(row)) for row in self.rows]

    def __str__(self) -> str:
        compared = self.total.change is not None
        lines = [[heading for heading, *_ in _COLUMNS]]
        if compared:
            lines[0] += [f"+{heading}" for heading, *_ in _CHANGES]
        for row in (*self.rows, self.total):
            lines.append([_cell(row, field, form) for _, field, form in _COLUMNS])
            if compared:
                lines[-1] += [_cell(row.change, field, f"+{form}") for _, field, form in _CHANGES]
        names, *numbers = zip(*lines, strict=True)
        aligned = [[cell.rjust(max(map(len, column))) for cell in column] for column in numbers]
        heading, *cells = zip(names, *aligned, strict=True)
        text = [table(heading, cells)]
        if compared:
            text.append("+: what the other model has more")
        text += [f"only in the first model: {name}" for name in self.only_in_model]
        text += [f"only in the other model: {name}" for name in self.only_in_other]
        text += [f"skipped {name}: {reason}" for name, reason in self.skipped]
        return "\n".join(text)


@torch.no_grad()
def audit(
    model: Source,
    other: Source | None = None,
    *,
    include: Selection | None = None,
    exclude: Selection | None = None,
    columns: str | Iterable[str] = (),
    s: float = 2.0,
    half_space: bool = False,
    distance: Distance = "chord",
    close_angle: float = 1.0,
) -> Audit:
    """The energy of every layer between its bound and the uniform expectation, its close pairs and dead neurons.

    `model` is a module, whose layers are those of `discover`, frozen ones too; or a state dict, or the path of one
    saved by `torch.save` or as .safetensors. A state dict is read as it is stored: each floating tensor of two or more
    dimensions holds a neuron in each row, `flatten(1)`, whatever its groups, parametrization or transposition; globs
    alone select there. `columns` are globs of weights stored [in, out]. With `other` each row that both have by name
    gets the change from `model` to `other`.

    A pair is close below `close_angle` degrees. In half space angles are those of lines: opposite neurons are
    at 0 degrees. A neuron is dead where its norm is at most 1e-8 of its layer's largest; one of norm 0 is orthogonal to
    all others (and the bound is that of as many more dimensions), any other counts by its direction. Non-finite neurons
    are counted and left out of everything else. Nothing of the model changes. Time is O(N^2 D); memory is O(N D), the
    pairs are visited in blocks.
    """
    energy = Energy(s, half_space, distance)
    if not 0 < close_angle <= 90:
        raise ValueError(f"close_angle={close_angle}: choose an angle of at most 90 degrees, above 0")
    globs = (columns,) if isinstance(columns, str) else tuple(columns)
    rows, skipped = _rows(model, energy, close_angle, include, exclude, globs)
    if other is None:
        return Audit(rows, _total(rows), skipped, [], [])
    others, more_skipped = _rows(other, energy, close_angle, include, exclude, globs)
    by_name = {row.name: row for row in others}
    first = [row for row in rows if row.name in by_name]
    second = [by_name[row.name] for row in first]
    return Audit(
        [replace(row, change=_change(row, by_name.get(row.name))) for row in rows],
        replace(_total(rows), change=_change(_total(first), _total(second))),
        list(dict.fromkeys([*skipped, *more_skipped])),
        [row.name for row in rows if row.name not in by_name],
        [row.name for row in others if row.name not in {row.name for row in rows}],
    )


def _rows(
    source: Source,
    energy: Energy,
    close_angle: float,
    include: Selection | None,
    exclude: Selection | None,
    columns: tuple[str, ...],
) -> tuple[list[Row], list[Skipped]]:
    if isinstance(source, nn.Module):
        found = discover(source, include, exclude, columns=columns, frozen=True)
        weights: dict[str, Callable[[], Tensor]] = {layer.name: layer.read for layer in found}
        skipped = found.skipped
    else:
        if not isinstance(source, Mapping | str | os.PathLike):
            raise TypeError(f"{type(source).__name__}: give a module, a state dict, or the path of one")
        stored = source if isinstance(source, Mapping) else load(source)
        weights, skipped = stored_neurons(stored, include, exclude, columns)
    rows = []
    for name, read in weights.items():
        neurons = read()
        if neurons.numel():
            rows.append(_row(name, neurons, energy, close_angle))
        else:
            skipped.append(Skipped(name, f"empty, of shape {tuple(neurons.shape)}"))
    return rows, skipped


def _row(name: str, neurons: Tensor, energy: Energy, close_angle: float) -> Row:
    """[..., N, D] -> Row."""
    neurons = lift(neurons)
    count, dim = neurons.shape[-2:]
    finite = neurons.isfinite().all(dim=-1)  # [..., N]
    wide = torch.where(finite.unsqueeze(-1), neurons, 0.0).to(widest(neurons.device))
    largest = wide.abs().max()
    norms = torch.linalg.vector_norm(wide / torch.where(largest > 0, largest, 1.0), dim=-1)
    dead = finite & (norms <= _DEAD * norms.max())
    del wide
    limit = (2 * math.sin(math.radians(close_angle) / 2)) ** 2
    whole = neurons.reshape(-1, count, dim)
    kept = [part if bool(fine.all()) else part[fine] for part, fine in zip(whole, finite.view(-1, count), strict=True)]
    sets = [measure(part, energy, limit) for part in kept]
    mean_energy, expected, bound = (sum(values) / len(sets) for values in list(zip(*sets, strict=True))[:3])
    least = min(found.nearest for found in sets)
    return Row(
        name=name,
        num_neurons=count,
        fan_in=dim,
        num_groups=len(sets),
        energy=mean_energy,
        expected=expected,
        bound=bound,
        excess=_excess(mean_energy, expected, bound),
        smallest_angle=None if least > 4 else math.degrees(2 * math.atan2(math.sqrt(least), math.sqrt(4 - least))),
        num_close_pairs=sum(found.num_close for found in sets),
        num_dead=int(dead.sum()),
        num_nonfinite=int((~finite).sum()),
    )


def _excess(energy: float, expected: float, bound: float) -> float | None:
    return (energy - bound) / (expected - bound) if bound < expected < math.inf else None


def _total(rows: list[Row]) -> Row:
    ranged = [row for row in rows if row.excess is not None]
    return Row(
        name="total",
        num_neurons=sum(row.num_neurons * row.num_groups for row in rows),
        fan_in=None,
        num_groups=sum(row.num_groups for row in rows),
        energy=sum(row.energy for row in rows),
        expected=sum(row.expected for row in rows),
        bound=sum(row.bound for row in rows),
        excess=_excess(*(sum(getattr(row, name) for row in ranged) for name in ("energy", "expected", "bound"))),
        smallest_angle=min((row.smallest_angle for row in rows if row.smallest_angle is not None), default=None),
        num_close_pairs=sum(row.num_close_pairs for row in rows),
        num_dead=sum(row.num_dead for row in rows),
        num_nonfinite=sum(row.num_nonfinite for row in rows),
    )


def _change(before: Row, after: Row | None) -> Change | None:
    if after is None:
        return None

    def difference(name: str) -> Any:
        old, new = getattr(before, name), getattr(after, name)
        return None if old is None or new is None else new - old

    return Change(**{field.name: difference(field.name) for field in fields(Change)})


def _cell(record: Row | Change | None, field: str, form: str) -> str:
    value = getattr(record, field, None)
    return "-" if value is None else format(value, form)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
