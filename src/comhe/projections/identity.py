from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from comhe.projections._base import Basis, Layer, Map, Projection


@dataclass(frozen=True)
class Identity(Projection):
    """No projection: the energy of the neurons themselves, MHE (Eq. 1)."""

    def basis_key(self, layer: Layer) -> Hashable:
        return None

    def maps(self, basis: Basis) -> tuple[Map, ...]:
        return (Map(),)
