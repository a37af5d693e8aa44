"""Four maps from any square matrix X [D, D] to an orthogonal one, differentiable and exact to rounding.

All take and give float32 or float64 and cost O(D^3) time and O(D^2) memory. Gram-Schmidt reads all of X and
keeps the sign of its determinant; the others read X below the diagonal alone and have determinant 1. Cayley
and the exponential are computed in the device's widest type, since LU and products obey TF32 flags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from comhe.products import widest

MapName = Literal["gram-schmidt", "cayley", "householder", "exponential"]


def gram_schmidt(x: Tensor) -> Tensor:
    """The columns of `x` made orthonormal one after the other; identity at the identity.

    The loop of Gram and Schmidt loses orthogonality with the square of x's condition. The orthogonal factor
    of x = Q U with U's diagonal positive is the same matrix, and Householder reflections find it to
    rounding. A singular `x` still gives an orthogonal matrix, with a gradient that is not finite: there the
    loop divides by zero.
    """
    q: Tensor
    q, upper = torch.linalg.qr(x)
    return q * torch.where(upper.diagonal() < 0, -1.0, 1.0).to(q.dtype)


def cayley(x: Tensor) -> Tensor:
    """(I - A/2)^-1 (I + A/2) with A = L - L', L the part of `x` below its diagonal; identity at zero.

    Reaches every rotation without the eigenvalue -1. The half gives it the slope of the exponential at zero.
    """
    half = _skew(x).to(widest(x.device)) / 2
    identity = torch.eye(x.shape[-1], dtype=half.dtype, device=x.device)
    # I - A/2 is never singular, so a check of its factorisation would only make the host wait.
    wide: Tensor = torch.linalg.solve_ex(identity - half, identity + half, check_errors=False).result
    return wide.to(x.dtype)


def householder(x: Tensor) -> Tensor:
    """Minus the product of D reflections, the i-th along (0, .., 0, 1, x[i+1:, i]); identity at zero.

    At zero each reflection flips one axis; the minus sign turns all of them back.
    """
    below = x.tril(-1)
    tau = 2 / (1 + below.square().sum(dim=-2))
    reflections: Tensor = torch.linalg.householder_product(below, tau)
    return -reflections


def exponential(x: Tensor) -> Tensor:
    """exp(L - L'), L the part of `x` below its diagonal; identity at zero, every rotation is reached."""
    wide: Tensor = torch.linalg.matrix_exp(_skew(x).to(widest(x.device)))
    return wide.to(x.dtype)


def _skew(x: Tensor) -> Tensor:
    below = x.tril(-1)
    return below - below.mT


def _zeros(size: int) -> Tensor:
    return torch.zeros(size, size)


class OrthogonalMap(NamedTuple):
    """A map and where it is the identity."""

    apply: Callable[[Tensor], Tensor]
    start: Callable[[int], Tensor]


MAPS: dict[str, OrthogonalMap] = {
    "gram-schmidt": OrthogonalMap(gram_schmidt, torch.eye),
    "cayley": OrthogonalMap(cayley, _zeros),
    "householder": OrthogonalMap(householder, _zeros),
    "exponential": OrthogonalMap(exponential, _zeros),
}
