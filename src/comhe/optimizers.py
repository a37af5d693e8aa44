"""What an attachment has to know of an optimizer."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam

# What runs an optimizer's hooks around its step.
_STEP = Optimizer.profile_hook_step(lambda: None).__code__


def innermost(optimizer: Any) -> Optimizer:
    """The optimizer inside wrappers that keep it as `.optimizer`, or as `.base_optimizer` (SAM)."""
    while True:
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "base_optimizer", None)
        if inner is None:
            break
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer={type(optimizer).__name__}: give a torch.optim.Optimizer")
    if isinstance(optimizer, LBFGS):
        raise ValueError("LBFGS evaluates its closure many times a step: add comhe.build(...)() to the loss instead")
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__} has a group without a learning rate: give it one, or use the loss form"
        )
    if isinstance(optimizer, SparseAdam):
        raise ValueError("SparseAdam takes sparse gradients only, a regularizer's is dense: use Adam")
    return optimizer


def parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def of_group(optimizer: Optimizer, setting: str) -> dict[int, Any]:
    """The setting of its group for each parameter."""
    return {id(p): group.get(setting) for group in optimizer.param_groups for p in group["params"]}


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether its state tells of steps, taken or loaded. (Adagrad has a state, at step 0, from the start.)"""
    return any(
        "step" not in state or bool((step > 0).any() if isinstance(step := state["step"], Tensor) else step > 0)
        for state in optimizer.state.values()
        if state
    )


def is_within_a_step(optimizer: Optimizer) -> bool:
    """Whether the step whose hooks run now was called by another one; else an earlier step ended in an exception."""
    count, frame = 0, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        count += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
    return count > 1
