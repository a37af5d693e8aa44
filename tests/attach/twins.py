"""Two trainings from the same start on the same batches, one of them attached, so that their bits can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import comhe

# Large enough that a gradient that is lost, doubled or scaled changes the weights at once.
SETTINGS: dict[str, Any] = {"dim": 6, "num_views": 2, "weight": 0.5, "seed": 3}


OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "sgd-foreach": partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-3, foreach=True),
    "sgd-fused": partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-3, fused=True),
    "nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "nesterov-foreach": partial(SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": partial(Adam, lr=0.01, amsgrad=True),
    "adamw": partial(AdamW, lr=0.01),
    "adamw-foreach": partial(AdamW, lr=0.01, foreach=True),
    "adamw-fused": partial(AdamW, lr=0.01, fused=True),
    "rmsprop": partial(RMSprop, lr=0.01, momentum=0.5),
    "adagrad": partial(Adagrad, lr=0.05),
    "tensor-lr": lambda parameters: Adam(parameters, lr=torch.tensor(0.01), foreach=False),
}


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two hidden layers and a classifier."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss of the batch of a step."""
    draw = torch.Generator().manual_seed(1000 + step)
    inputs, labels = torch.randn(8, 12, generator=draw), torch.randint(5, (8,), generator=draw)
    return cross_entropy(model(inputs.to(next(model.parameters()).dtype)).float(), labels)


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int] = range(10)) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def train_in_loss(
    model: nn.Module, optimizer: Optimizer, regularizer: comhe.Regularizer, steps: Iterable[int] = range(10)
) -> None:
    for step in steps:
        optimizer.zero_grad()
        (loss_of(model, step) + regularizer()).backward()
        optimizer.step()
        regularizer.advance(lr=optimizer.param_groups[0]["lr"])


def pair(make: Callable[..., Optimizer], *, decoupled: bool = False, method: str = "rp-comhe", **settings: Any):
    """(model, optimizer, regularizer) to be trained by hand and (model, optimizer, attachment)."""
    settings = settings or SETTINGS
    by_hand, attached = network(), network()
    regularizer = comhe.build(method, by_hand, **settings)
    optimizer = make(attached.parameters())
    handle = comhe.attach(method, attached, optimizer, decoupled=decoupled, **settings)
    return (by_hand, make([*by_hand.parameters(), *regularizer.parameters()]), regularizer), (
        attached,
        optimizer,
        handle,
    )


def state_of(optimizer: Optimizer) -> list[Any]:
    """The moments, in the order of the parameters."""
    return [
        value.clone() if isinstance(value, Tensor) else value
        for state in optimizer.state_dict()["state"].values()
        for _, value in sorted(state.items())
    ]


def same(first: Any, second: Any) -> bool:
    """Equal bits in every tensor of two structures, and equal values elsewhere."""
    if isinstance(first, nn.Module):
        first, second = dict(first.state_dict()), dict(second.state_dict())
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)
