"""The one place where matrices are multiplied: full float32 (or float64), whatever the ambient precision.

A TF32 flag set inside `forward` does not reach a compiled graph, and autocast sends even float32 operands back to half
precision. So the product is a custom op that sets both when it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def lift(tensor: Tensor) -> Tensor:
    """The tensor in the precision of computation: float64 stays, everything lower becomes float32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def widest(device: torch.device) -> torch.dtype:
    """The widest type of the device, for the few operations that float32 cannot hold (Apple's MPS has no float64)."""
    return torch.float32 if device.type == "mps" else torch.float64


class _FullPrecision:
    """The flags belong to the process, and each device's backward runs in a thread: the last one to leave restores."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._lowered: list[tuple[Any, str]] = []

    def enter(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
            for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # type: ignore[attr-defined]
                precision = backend.fp32_precision
                if precision not in ("none", "ieee"):
                    self._lowered.append((backend, precision))
                    backend.fp32_precision = "ieee"

    def leave(self) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth > 0:
                return
            for backend, precision in self._lowered:
                backend.fp32_precision = "none"  # follows torch.backends.fp32_precision, perhaps as it did before
                if backend.fp32_precision != precision:
                    backend.fp32_precision = precision
            self._lowered.clear()


_FULL_PRECISION = _FullPrecision()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Autocast off and no TF32 or bfloat16 inside float32 products, for the duration."""
    _FULL_PRECISION.enter()
    try:
        with no_autocast(device):
            yield
    finally:
        _FULL_PRECISION.leave()


def no_autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, enabled=False)


@torch.library.custom_op("comhe::product", mutates_args=())
def _product(a: Tensor, b: Tensor) -> Tensor:
    with full_precision(a.device):
        return torch.matmul(a, b)


@_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


def _keep_operands(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    wants_a, wants_b = ctx.needs_input_grad
    return (
        _ordered_as(a, grad, b.mT).sum_to_size(a.shape) if wants_a else None,
        _ordered_as(b, a.mT, grad).sum_to_size(b.shape) if wants_b else None,
    )


def _ordered_as(operand: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """left @ right, in memory by columns where the operand is: transposed back its rows lie in one piece again.

    Besides the copies this saves, PyTorch 2.13 compiles sums along rows that do not lie so to wrong code on the CPU
    (pytorch/pytorch#196681).
    """
    by_columns = operand.stride(-2) == 1 and operand.stride(-1) > 1
    return product(right.mT, left.mT).mT if by_columns else product(left, right)


_product.register_autograd(_product_backward, setup_context=_keep_operands)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for [..., n, k] and [..., k, m], leading dimensions broadcast, differentiable to any order.

    Two types are multiplied in the wider of both, at least float32.
    """
    dtype = torch.promote_types(lift(a).dtype, lift(b).dtype)
    result: Tensor = _product(a.to(dtype), b.to(dtype))
    return result
