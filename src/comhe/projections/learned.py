from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from comhe.projections.gaussian import Gaussian


@dataclass(frozen=True)
class Learned(Gaussian):
    """A projection trained with the network by the gradient of the energy itself: the paper's negative result.

    The bases are parameters of the regularizer: give `reg.parameters()` to the optimizer as well (`attach` does). They
    start as a Gaussian projection and are never redrawn unless asked.
    """

    trainable: ClassVar[bool] = True

    num_views: int = 1

    @property
    def redraw_every(self) -> int | None:
        return None
