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
