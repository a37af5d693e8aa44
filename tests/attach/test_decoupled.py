"""attach(decoupled=True): p -= lr x weight x gradient after the update, never seen by the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from twins import OPTIMIZERS, SETTINGS, loss_of, network, pair, same, state_of, train

import comhe

adamw = partial(AdamW, lr=0.01)


def hidden(model: nn.Sequential) -> list[Tensor]:
    return [model[0].weight, model[2].weight]


def step_by_hand(model: nn.Sequential, optimizer: Optimizer, regularizer: comhe.Regularizer, step: int) -> None:
    """The gradient is that of the weights before the step."""
    gradients = torch.autograd.grad(regularizer(), hidden(model))
    train(model, optimizer, [step])
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    with torch.no_grad():
        for weight, gradient in zip(hidden(model), gradients, strict=True):
            weight -= rates[id(weight)] * gradient
    regularizer.advance()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_optimizer_is_followed_by_a_step_of_our_own(make):
    (by_hand, optimizer, regularizer), (attached, other, handle) = pair(make, decoupled=True)
    for step in range(10):
        step_by_hand(by_hand, optimizer, regularizer, step)
    train(attached, other)
    assert same(by_hand, attached)
    assert same(state_of(optimizer), state_of(other))
    assert handle.regularizer.round == regularizer.round == 10


def test_groups_have_their_own_rates_and_schedules():
    def make(model: nn.Sequential) -> tuple[SGD, LambdaLR]:
        each = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2:].parameters()}]
        optimizer = SGD(each, lr=0.02, momentum=0.9)
        return optimizer, LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1 / (1 + step)])

    by_hand, attached = network(), network()
    (optimizer, schedule), (other, other_schedule) = make(by_hand), make(attached)
    regularizer = comhe.build("rp-comhe", by_hand, **SETTINGS)
    comhe.attach("rp-comhe", attached, other, decoupled=True, **SETTINGS)
    for step in range(5):
        step_by_hand(by_hand, optimizer, regularizer, step)
        train(attached, other, [step])
        schedule.step()
        other_schedule.step()
    assert same(by_hand, attached)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw-fused", "rmsprop"])
def test_neither_gradients_nor_moments_see_the_penalty(name):
    plain, attached = network(), network()
    optimizer, other = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](attached.parameters())
    comhe.attach("rp-comhe", attached, other, decoupled=True, **SETTINGS)
    train(plain, optimizer, [0])
    train(attached, other, [0])
    assert not same(plain, attached)
    assert same(state_of(optimizer), state_of(other))
    assert same([p.grad for p in plain.parameters()], [p.grad for p in attached.parameters()])


def test_under_adam_the_two_modes_differ_tenfold():
    def moved(decoupled: bool | None) -> Tensor:
        model = network()
        optimizer = AdamW(model.parameters(), lr=0.01)
        if decoupled is not None:
            comhe.attach("rp-comhe", model, optimizer, decoupled=decoupled, **SETTINGS | {"weight": 0.01})
        train(model, optimizer, [0])
        return model[0].weight.detach()

    plain = moved(None)
    in_loss, decoupled = ((moved(mode) - plain).norm() for mode in (False, True))
    assert in_loss > 10 * decoupled > 0


def closed(optimizer: Optimizer, model: nn.Module, step: int) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    return closure


def test_a_closure_is_left_as_it_is():
    ours, theirs = network(), network()
    optimizer, other = adamw(ours.parameters()), adamw(theirs.parameters())
    comhe.attach("rp-comhe", ours, optimizer, decoupled=True, **SETTINGS)
    comhe.attach("rp-comhe", theirs, other, decoupled=True, **SETTINGS)
    for step in range(4):
        optimizer.step(closed(optimizer, ours, step))
        train(theirs, other, [step])
    assert same(ours, theirs)


def test_the_strength_follows_set_weight():
    (by_hand, optimizer, regularizer), (attached, other, handle) = pair(adamw, decoupled=True)
    for each in (regularizer, handle.regularizer):
        each.set_weight(7.0, "hidden")
    step_by_hand(by_hand, optimizer, regularizer, 0)
    train(attached, other, [0])
    assert same(by_hand, attached)

    handle.regularizer.set_weight(0.0, "hidden")
    plain = network()
    plain.load_state_dict(attached.state_dict())
    continued = adamw(plain.parameters())
    continued.load_state_dict(deepcopy(other.state_dict()))
    train(plain, continued, [1])
    train(attached, other, [1])
    assert same(plain, attached)
    assert handle.value == 0
