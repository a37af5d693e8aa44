"""Squared distances of all pairs of neurons on the sphere, right for close pairs and differentiable to any order.

1 - cos from a product of unit vectors has an absolute error of one rounding, so 1/d^2 is off by 10 % at d = 1e-3 in
float32. Unit vectors are therefore held in the device's widest type, and so is their product: on the CPU where a pair
is close (|cos| > 0.95), on a GPU always, as looking for one would stop the stream. Results in the widest type itself
take a product of two parts, one of them exact. Nothing is gathered: a collapsed layer costs what others do, but for
the wider product. docs/derivations.md, "Close pairs", has the error bounds.

Two bilinear maps suffice, and each is the other's derivative. With s_ij = +-1 the side on which the pair is close,

    pair_products(u, v)_ij = (u_i - s_ij u_j) . (v_i - s_ij v_j)
    laplacian(A, u)_i      = sum_j A_ij (u_i - s_ij u_j) + sum_j A_ji (u_i - s_ji u_j)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from comhe.products import full_precision, widest

CLOSE_COSINE = 0.95
# Pairs computed at a time on the CPU, where sets can be taken apart: their matrices then stay in the cache.
CACHED_PAIRS = 1 << 20
# Binary digits of unit vectors whose products add up without rounding: twice as many, and a sum of at most 1, fit.
_HEAD_DIGITS = {torch.float64: 25, torch.float32: 11}


class Pairs(NamedTuple):
    """All pairs of N points: everything an energy needs to know of them."""

    nearest: Tensor  # [..., N, N] squared chord to the nearer of +-partner, 2 on the diagonal
    side: Tensor  # [..., N, N] +1 where the nearer one is the partner itself, else -1, in a byte
    apart: Tensor  # [..., N, N] bool: a direction leads from one to the other; not on the diagonal, nor for duplicates
    close: Tensor  # 0-d bool: products are in the widest type


def sphere(points: Tensor, norm_eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Rows on the unit sphere, [..., N, D] in the widest type, and what their squared norm lacks to 1, [..., N].

    A zero row stays zero (lacking 1): it is then orthogonal to all and its gradient is exactly zero. A row that is not
    finite becomes NaN. With `norm_eps` the norm is sqrt(norm^2 + norm_eps), as in the reference code, and no longer
    independent of scale.
    """
    wide, _ = _scaled(points, norm_eps)
    square = (wide * wide).sum(dim=-1, keepdim=True)
    alive = square != 0  # true of NaN, which goes on
    norm = torch.sqrt(torch.where(alive, square, 1.0) + norm_eps)
    unit = torch.where(alive, wide / norm, 0.0)
    lacking = torch.where(alive, norm_eps / (square + norm_eps) if norm_eps else 0.0, 1.0)
    return unit, lacking.squeeze(-1)


def inverse_norms(points: Tensor, norm_eps: float = 0.0) -> Tensor:
    """1 / norm of each row, [..., N, 1] in the widest type; 0 for a zero row."""
    wide, scale = _scaled(points, norm_eps)
    square = (wide * wide).sum(dim=-1, keepdim=True)
    alive = square != 0
    return torch.where(alive, torch.rsqrt(torch.where(alive, square, 1.0) + norm_eps) / scale, 0.0)


def _scaled(points: Tensor, norm_eps: float) -> tuple[Tensor, Tensor]:
    """Rows in the widest type over their largest entry, so that squares neither overflow nor vanish, and that entry."""
    wide = points.to(widest(points.device))
    if norm_eps:
        return wide, torch.ones_like(wide[..., :1])
    largest = wide.detach().abs().amax(dim=-1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    return wide / largest, largest


def pairs(unit: Tensor, lacking: Tensor, dtype: torch.dtype) -> Pairs:
    """The pairs of unit vectors [..., N, D], distances in `dtype`."""
    chord, side, close = _nearest(unit, dtype)
    missing = lacking.to(dtype)
    nearest = chord + (missing.unsqueeze(-1) + missing.unsqueeze(-2))
    self_pair = torch.eye(unit.shape[-2], dtype=torch.bool, device=unit.device)
    return Pairs(torch.where(self_pair, 2.0, nearest), side, chord != 0, close)


def pull(weights: Tensor, unit: Tensor, found: Pairs) -> Tensor:
    """laplacian(weights, unit): half the gradient, in the unit vectors, of sum_ij weights_ij nearest_ij."""
    force: Tensor = _laplacian(weights, unit, found.side, found.close)
    return force


def _multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    with full_precision(a.device):
        return torch.matmul(a.to(dtype), b.to(dtype))


def _product_dtype(unit: Tensor, close: Tensor, dtype: torch.dtype) -> torch.dtype:
    return unit.dtype if unit.is_cuda or close else dtype


def _sides(cosine: Tensor) -> Tensor:
    return (cosine >= 0).to(torch.int8).mul_(2).sub_(1)


def _squares(products: Tensor, side: Tensor) -> Tensor:
    """pair_products(u, v), given the matrix of the u_i . v_j. Its own diagonal is taken: equal rows then cancel."""
    diagonal = products.diagonal(dim1=-2, dim2=-1)
    return diagonal.unsqueeze(-1) + diagonal.unsqueeze(-2) - side * (products + products.mT)


def _any_close(cosine: Tensor) -> Tensor:
    others = cosine.abs()
    others.diagonal(dim1=-2, dim2=-1).zero_()
    return (others > CLOSE_COSINE).any()


def _chords(unit: Tensor) -> tuple[Tensor, Tensor]:
    """Squared chords and sides from one product in the type of `unit`, for results in a narrower one."""
    cosine = _multiply(unit, unit.mT, unit.dtype)
    side = _sides(cosine)
    return _squares(cosine, side), side


def _exact_chords(unit: Tensor) -> tuple[Tensor, Tensor]:
    """The same for results in the type of `unit`: head @ head' rounds nothing away, and what it lacks is small."""
    head, rest = _split(unit)
    exact = _multiply(head, head.mT, unit.dtype)
    lacking = _multiply(unit - rest / 2, rest.mT, unit.dtype)  # u u' = exact + lacking + lacking'
    side = _sides(exact)
    return _squares(exact, side) + 2 * _squares(lacking, side), side


def between(u: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, bool]:
    """Squared chords from unit rows [n, D] to the nearer of +- each of [m, D], sides, and whether a pair is close.

    For a part of a larger matrix of pairs: as in `pairs`, but for zero rows, and without a derivative.
    """
    cosine = _multiply(u, v.mT, dtype)
    close = u.is_cuda or bool(torch.linalg.vector_norm(cosine, torch.inf) > CLOSE_COSINE)
    if not close:
        side = _sides(cosine)
        return _rectangle(cosine, side, *(_norms(rows.to(dtype)) for rows in (u, v))), side, close
    if dtype == u.dtype:
        (head, rest), (other_head, other_rest) = _split(u), _split(v)
        exact = _multiply(head, other_head.mT, dtype)
        lacking = _multiply(head, other_rest.mT, dtype) + _multiply(rest, v.mT, dtype)
        side = _sides(exact)
        square = _rectangle(exact, side, _norms(head), _norms(other_head)) + _rectangle(
            lacking, side, _lacking_norms(head, rest, u), _lacking_norms(other_head, other_rest, v)
        )
        digits = _HEAD_DIGITS[u.dtype]
    else:
        cosine = _multiply(u, v.mT, u.dtype)
        side, digits = _sides(cosine), 0
        square = _rectangle(cosine, side, _norms(u), _norms(v))
    return _without_noise(square, u, digits).to(dtype), side, close


def _split(unit: Tensor) -> tuple[Tensor, Tensor]:
    """Leading digits, whose products are exact, and the rest."""
    scale = 2.0 ** _HEAD_DIGITS[unit.dtype]
    head = torch.round(unit * scale) / scale
    return head, unit - head


def _without_noise(square: Tensor, unit: Tensor, digits: int) -> Tensor:
    """What rounding leaves of a distance of zero is none: the slope there is huge, its direction would be noise."""
    noise = 2 * torch.finfo(unit.dtype).eps * unit.shape[-1] ** 0.5 * 2.0**-digits
    return torch.where(square <= noise, 0.0, square)


def _norms(rows: Tensor) -> Tensor:
    return (rows * rows).sum(dim=-1)


def _lacking_norms(head: Tensor, rest: Tensor, rows: Tensor) -> Tensor:
    return (head * rest).sum(dim=-1) + (rest * rows).sum(dim=-1)


def _rectangle(products: Tensor, side: Tensor, norms: Tensor, others: Tensor) -> Tensor:
    return norms.unsqueeze(-1) + others.unsqueeze(-2) - 2 * side * products


@torch.library.custom_op("comhe::nearest", mutates_args=())
def _nearest(unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """pair_products(unit, unit), which side each pair is close on, and whether products must be in the widest type."""
    if unit.is_cuda:
        close = torch.ones((), dtype=torch.bool, device=unit.device)
    else:
        cosine = _multiply(unit, unit.mT, dtype)
        close = _any_close(cosine)
        if not close:
            side = _sides(cosine)
            return _squares(cosine, side), side, close
    square, side = _exact_chords(unit) if dtype == unit.dtype else _chords(unit)
    digits = _HEAD_DIGITS[unit.dtype] if dtype == unit.dtype else 0
    return _without_noise(square, unit, digits).to(dtype), side, close


@_nearest.register_fake
def _(unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    square = (*unit.shape[:-1], unit.shape[-2])
    return (
        unit.new_empty(square, dtype=dtype),
        unit.new_empty(square, dtype=torch.int8),
        unit.new_empty((), dtype=torch.bool),
    )


@torch.library.custom_op("comhe::pair_products", mutates_args=())
def _pair_products(u: Tensor, v: Tensor, side: Tensor, close: Tensor, dtype: torch.dtype) -> Tensor:
    return _squares(_multiply(u, v.mT, _product_dtype(u, close, dtype)), side).to(dtype)


@_pair_products.register_fake
def _(u: Tensor, v: Tensor, side: Tensor, close: Tensor, dtype: torch.dtype) -> Tensor:
    return u.new_empty(side.shape, dtype=dtype)


@torch.library.custom_op("comhe::laplacian", mutates_args=())
def _laplacian(weights: Tensor, u: Tensor, side: Tensor, close: Tensor) -> Tensor:
    weights = weights.to(_product_dtype(u, close, weights.dtype))
    degree = (weights.sum(dim=-1) + weights.sum(dim=-2)).to(u.dtype)
    signed = weights * side
    return (degree.unsqueeze(-1) * u - _multiply(signed + signed.mT, u, weights.dtype)).contiguous()


@_laplacian.register_fake
def _(weights: Tensor, u: Tensor, side: Tensor, close: Tensor) -> Tensor:
    return torch.empty_like(u, memory_format=torch.contiguous_format)


def _keep_nearest(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], *output[1:])


def _nearest_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return 2 * _laplacian(grad, *ctx.saved_tensors), None


def _keep_pair_products(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])


def _pair_products_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    u, v, side, close = ctx.saved_tensors
    wants_u, wants_v = ctx.needs_input_grad[:2]
    return (
        _laplacian(grad, v, side, close) if wants_u else None,
        _laplacian(grad, u, side, close) if wants_v else None,
        None,
        None,
        None,
    )


def _keep_laplacian(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _laplacian_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weights, u, side, close = ctx.saved_tensors
    wants_weights, wants_u = ctx.needs_input_grad[:2]
    return (
        _pair_products(grad, u, side, close, weights.dtype) if wants_weights else None,
        _laplacian(weights, grad, side, close) if wants_u else None,
        None,
        None,
    )


_nearest.register_autograd(_nearest_backward, setup_context=_keep_nearest)
_pair_products.register_autograd(_pair_products_backward, setup_context=_keep_pair_products)
_laplacian.register_autograd(_laplacian_backward, setup_context=_keep_laplacian)
