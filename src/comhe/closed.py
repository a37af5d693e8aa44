"""The energy at s = 2 between chords, in cosines and in few passes over the pairs, for the CPU.

    full space   1 / (2 - 2g),    slope in g   2 e^2
    half space   1 / (1 - g^2),   slope in g   2 g e^2    (e the energy itself)

In float32 this is right to a few 1e-6 while no pair is close (|g| <= 0.95); whoever calls looks for that first. What
of a force lies along the point itself is taken off in the end, so that no sum of slopes is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from comhe.pairs import CACHED_PAIRS, CLOSE_COSINE

if TYPE_CHECKING:
    from comhe.energies import Energy


def is_closed(energy: Energy) -> bool:
    return energy.s == 2 and energy.distance == "chord" and not energy.norm_eps


def energies_of(cosine: Tensor, half_space: bool, out: Tensor) -> Tensor:
    if half_space:
        return torch.mul(cosine, cosine, out=out).neg_().add_(1).reciprocal_()
    return torch.mul(cosine, -2, out=out).add_(2).reciprocal_()


def half_slopes_of(cosine: Tensor, each: Tensor, half_space: bool) -> Tensor:
    """Half the slopes in the cosine, where the energies `each` or the cosines were."""
    each.square_()
    return cosine.mul_(each) if half_space else each


def closed(points: Tensor, energy: Energy) -> tuple[Tensor, Tensor, Tensor]:
    """Of sets [B, N, K] in float32 the energies [B], their gradient, and which sets have a close pair, [B] bool.

    What is said of the latter is not right enough; the diagonal of a set counts nothing.
    """
    count = points.shape[-2]
    largest = points.abs().amax(dim=-1, keepdim=True)
    scaled = points / torch.where(largest > 0, largest, 1.0)
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    alive = norm != 0  # true of NaN, which goes on
    unit = torch.where(alive, scaled / norm, 0.0)
    totals, forces, close = [], torch.empty_like(unit), []
    size = max(1, CACHED_PAIRS // (count * count))
    buffers = points.new_empty(2, min(size, len(points)), count, count)
    for first in range(0, len(points), size):
        some = unit[first : first + size]
        cosine, each = buffers[:, : len(some)]
        torch.bmm(some, some.mT, out=cosine)
        cosine.diagonal(dim1=-2, dim2=-1).zero_()
        close.append(torch.linalg.vector_norm(cosine, torch.inf, dim=(-2, -1)) > CLOSE_COSINE)
        energies_of(cosine, energy.half_space, out=each)
        each.diagonal(dim1=-2, dim2=-1).zero_()
        totals.append(each.sum(dim=-1).double().sum(dim=-1))
        torch.bmm(half_slopes_of(cosine, each, energy.half_space), some, out=forces[first : first + size])
    lacking = torch.where(alive, 0.0, 1.0).squeeze(-1)
    value = energy.reduced(torch.cat(totals), lacking).float()
    forces -= (forces * unit).sum(dim=-1, keepdim=True) * unit
    # Twice for the half slopes, twice as a pair stands at both of its ends, and twice in half space.
    factor = 8.0 if energy.half_space else 4.0
    if energy.reduction == "mean":
        factor /= energy.num_ordered_pairs(count)
    forces *= torch.where(alive, factor / (norm * largest), 0.0)
    return value, forces, torch.cat(close)
