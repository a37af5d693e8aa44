"""attach() in other people's training loops: clipping, accumulation, closures, optimizers made of others."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from twins import OPTIMIZERS, SETTINGS, loss_of, network, pair, same, train

import comhe

momentum = OPTIMIZERS["sgd"]


def test_the_gradient_comes_after_clipping():
    (by_hand, optimizer, regularizer), (attached, other, _) = pair(momentum)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(by_hand, step).backward()
        clip_grad_norm_(by_hand.parameters(), 0.1)
        regularizer().backward()
        optimizer.step()
        regularizer.advance()

        other.zero_grad()
        loss_of(attached, step).backward()
        assert clip_grad_norm_(attached.parameters(), 0.1) > 0.1
        other.step()
    assert same(by_hand, attached)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_weight_without_a_gradient_and_not_in_rows(make):
    """Fused optimizers walk through weight and gradient side by side, as they lie in memory."""

    def convolutions() -> nn.Module:
        torch.manual_seed(1)
        model = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Linear(4, 4)])
        return model.to(memory_format=torch.channels_last)

    by_hand, attached = convolutions(), convolutions()
    regularizer = comhe.build("hs-mhe", by_hand)
    optimizer, other = make(by_hand.parameters()), make(attached.parameters())
    comhe.attach("hs-mhe", attached, other)
    for _ in range(3):
        optimizer.zero_grad()
        regularizer().backward()
        optimizer.step()
        regularizer.advance()
        other.zero_grad()
        other.step()
    assert same(by_hand, attached)


def test_accumulated_gradients_get_the_penalty_once():
    (by_hand, optimizer, regularizer), (attached, other, handle) = pair(momentum)
    for step in range(10):
        optimizer.zero_grad()
        for part in range(4):
            (loss_of(by_hand, 4 * step + part) / 4).backward()
        regularizer().backward()
        optimizer.step()
        regularizer.advance()

        other.zero_grad()
        for part in range(4):
            (loss_of(attached, 4 * step + part) / 4).backward()
        other.step()
    assert same(by_hand, attached)
    assert handle.regularizer.round == 10


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_that_zeroes_the_gradients(by_name):
    (by_hand, optimizer, regularizer), (attached, other, _) = pair(momentum)
    for step in range(10):

        def by_hand_closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(by_hand, step)
            (loss + regularizer()).backward()
            return loss

        def closure(step=step):
            other.zero_grad()
            loss = loss_of(attached, step)
            loss.backward()
            return loss

        expected = optimizer.step(by_hand_closure)
        regularizer.advance()
        loss = other.step(closure=closure) if by_name else other.step(closure)
        assert torch.equal(loss, expected)  # what the closure returned, and no more
    assert same(by_hand, attached)


class EvaluatesTwice(SGD):
    """Keeps the gradient of the second of two calls, and hands over to its parent."""

    def step(self, closure):
        with torch.enable_grad():
            closure()
            loss = closure()
        super().step()
        return loss


def test_a_closure_that_is_called_twice_has_the_penalty_each_time():
    make = partial(EvaluatesTwice, lr=0.05, momentum=0.9)
    (by_hand, optimizer, regularizer), (attached, other, handle) = pair(make)
    for step in range(5):

        def by_hand_closure(step=step):
            optimizer.zero_grad()
            (loss_of(by_hand, step) + regularizer()).backward()

        def closure(step=step):
            other.zero_grad()
            loss_of(attached, step).backward()

        optimizer.step(by_hand_closure)
        regularizer.advance()
        other.step(closure)
    assert same(by_hand, attached)
    assert handle.regularizer.round == 5


class Failing(SGD):
    """Its step ends in an exception where `fails` says so."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise ValueError("out of luck")
        return super().step(closure)


@pytest.mark.parametrize("how", ["step", "closure", "hook"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_a_step_that_ends_in_an_exception_leaves_the_next_one_whole(decoupled, how):
    SGD([nn.Parameter(torch.zeros(1))], lr=1.0)  # as below
    ours, theirs = network(), network()
    make = partial(Failing, lr=0.05, momentum=0.9)
    optimizer, other = make(ours.parameters()), make(theirs.parameters())
    handle = comhe.attach("rp-comhe", ours, optimizer, decoupled=decoupled, **SETTINGS)
    comhe.attach("rp-comhe", theirs, other, decoupled=decoupled, **SETTINGS)

    def fail(*_):
        raise ValueError("out of luck")

    train(ours, optimizer, [0])
    train(theirs, other, [0])
    optimizer.fails = how == "step"
    hook = optimizer.register_step_pre_hook(fail) if how == "hook" else None
    with pytest.raises(ValueError, match="out of luck") as held:  # with its traceback the frames of the step live on
        optimizer.step(fail if how == "closure" else None)
    optimizer.fails = False
    if hook is not None:
        hook.remove()
    with torch.no_grad():
        for model in (ours, theirs):
            model[0].weight.mul_(1.5)  # the gradient of the failed step is not that of these weights
    train(ours, optimizer, range(1, 4))
    train(theirs, other, range(1, 4))
    assert held is not None
    assert same(ours, theirs)
    assert handle.regularizer.round == 4


class CallsItsParent(SGD):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_subclass_that_calls_its_parents_step_gets_the_penalty_once(decoupled):
    SGD([nn.Parameter(torch.zeros(1))], lr=1.0)  # from its first instance on, torch runs the parent's hooks too
    ours, theirs = network(), network()
    optimizer, other = CallsItsParent(ours.parameters(), lr=0.05), SGD(theirs.parameters(), lr=0.05)
    handle = comhe.attach("rp-comhe", ours, optimizer, decoupled=decoupled, **SETTINGS)
    comhe.attach("rp-comhe", theirs, other, decoupled=decoupled, **SETTINGS)
    train(ours, optimizer)
    train(theirs, other)
    assert same(ours, theirs)
    assert handle.regularizer.round == 10
