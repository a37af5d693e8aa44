"""Plain text tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns under their names; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(names), *cells]) for i in range(len(names))]
    numeric = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(names))]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(names), line(["-" * w for w in widths]), *map(line, cells)])


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
