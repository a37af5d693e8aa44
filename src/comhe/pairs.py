"""Squared distances of all pairs of neurons on the sphere, right for close pairs and differentiable to any order.

1 - cos from a product of unit vectors has an absolute error of one rounding, so 1/d^2 is off by 10 % at d = 1e-3 in
float32. A pair with |cos| > 0.95 is therefore recomputed from the difference of its unit vectors, held in the device's
widest type. On a GPU the whole product is formed in that type instead, and nothing needs recomputing.
docs/derivations.md, "Close pairs", has the error bounds.

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
_PAIR_ELEMENTS = 1 << 24  # numbers held at a time while differences of close pairs are formed


class Pairs(NamedTuple):
    """All pairs of N points: everything an energy needs to know of them."""

    nearest: Tensor  # [..., N, N] squared chord to the nearer of +-partner, 2 on the diagonal
    same_side: Tensor  # [..., N, N] bool: the nearer one is the partner itself
    side: Tensor  # [..., N, N] +1 or -1, the same as a number, in a byte
    close: Tensor  # [..., N, N] bool: computed from differences


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
    nearest, side, close = _nearest(unit, dtype)
    missing = lacking.to(dtype)
    nearest = nearest + (missing.unsqueeze(-1) + missing.unsqueeze(-2))
    self_pair = torch.eye(unit.shape[-2], dtype=torch.bool, device=unit.device)
    return Pairs(torch.where(self_pair, 2.0, nearest), side > 0, side, close)


def pull(weights: Tensor, unit: Tensor, found: Pairs) -> Tensor:
    """laplacian(weights, unit): half the gradient, in the unit vectors, of sum_ij weights_ij nearest_ij."""
    force: Tensor = _laplacian(weights, unit, found.side, found.close)
    return force


def _multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    with full_precision(a.device):
        return torch.matmul(a.to(dtype), b.to(dtype))


def _product_dtype(unit: Tensor, dtype: torch.dtype) -> torch.dtype:
    """On a GPU the widest product is right for every pair by itself, and searching close ones would stop the stream."""
    return unit.dtype if unit.is_cuda else dtype


def _batched(matrices: Tensor) -> Tensor:
    return matrices.view(-1, *matrices.shape[-2:])


def _close_pairs(close: Tensor, num_columns: int) -> tuple[tuple[Tensor, Tensor, Tensor], ...]:
    """(batch, i, j) of the close pairs with i < j, in portions of bounded size."""
    batch, i, j = _batched(close).nonzero(as_tuple=True)
    once = i < j
    batch, i, j = batch[once], i[once], j[once]
    size = max(1, _PAIR_ELEMENTS // max(1, num_columns))
    return tuple(zip(batch.split(size), i.split(size), j.split(size), strict=True))


def _from_products(u: Tensor, v: Tensor, products: Tensor, side: Tensor, close: Tensor, dtype: torch.dtype) -> Tensor:
    """pair_products(u, v) in `dtype`, given the matrix of the u_i . v_j."""
    diagonal = (u * v).sum(dim=-1).to(products.dtype)
    both = products + products.mT
    result = (diagonal.unsqueeze(-1) + diagonal.unsqueeze(-2) - side * both).to(dtype).contiguous()
    if u.is_cuda:
        return result
    flat_u, flat_v, flat_side, flat = map(_batched, (u.contiguous(), v.contiguous(), side.contiguous(), result))
    for batch, i, j in _close_pairs(close, u.shape[-1]):
        sign = flat_side[batch, i, j].unsqueeze(-1)
        du = flat_u[batch, i] - sign * flat_u[batch, j]
        dv = flat_v[batch, i] - sign * flat_v[batch, j]
        exact = (du * dv).sum(dim=-1).to(dtype)
        flat[batch, i, j] = exact
        flat[batch, j, i] = exact
    return result


@torch.library.custom_op("comhe::nearest", mutates_args=())
def _nearest(unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """pair_products(unit, unit), which side each pair is close on, and which pairs are close."""
    cosine = _multiply(unit, unit.mT, _product_dtype(unit, dtype))
    side = torch.where(cosine >= 0, 1, -1).to(torch.int8)
    close = cosine.abs() > CLOSE_COSINE
    close = close | close.mT
    return _from_products(unit, unit, cosine, side, close, dtype), side, close


@_nearest.register_fake
def _(unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    square = (*unit.shape[:-1], unit.shape[-2])
    side, close = (unit.new_empty(square, dtype=kind) for kind in (torch.int8, torch.bool))
    return unit.new_empty(square, dtype=dtype), side, close


@torch.library.custom_op("comhe::pair_products", mutates_args=())
def _pair_products(u: Tensor, v: Tensor, side: Tensor, close: Tensor, dtype: torch.dtype) -> Tensor:
    products = _multiply(u, v.mT, _product_dtype(u, dtype))
    return _from_products(u, v, products, side, close, dtype)


@_pair_products.register_fake
def _(u: Tensor, v: Tensor, side: Tensor, close: Tensor, dtype: torch.dtype) -> Tensor:
    return u.new_empty(side.shape, dtype=dtype)


@torch.library.custom_op("comhe::laplacian", mutates_args=())
def _laplacian(weights: Tensor, u: Tensor, side: Tensor, close: Tensor) -> Tensor:
    u, dtype = u.contiguous(), _product_dtype(u, weights.dtype)
    far = weights.to(dtype) if u.is_cuda else torch.where(close, 0.0, weights)
    degree = (far.sum(dim=-1) + far.sum(dim=-2)).to(u.dtype)
    signed = far * side
    result = degree.unsqueeze(-1) * u - _multiply(signed + signed.mT, u, dtype)
    if u.is_cuda:
        return result
    flat_u, flat_weights, flat_side, flat = map(_batched, (u, weights.contiguous(), side.contiguous(), result))
    for batch, i, j in _close_pairs(close, u.shape[-1]):
        sign = flat_side[batch, i, j].unsqueeze(-1)
        weight = (flat_weights[batch, i, j] + flat_weights[batch, j, i]).unsqueeze(-1)
        force = weight * (flat_u[batch, i] - sign * flat_u[batch, j])
        flat.index_put_((batch, i), force, accumulate=True)
        flat.index_put_((batch, j), -sign * force, accumulate=True)
    return result


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
