"""attach() under a gradient scaler: the penalty is neither lost nor scaled, and a skipped step does not advance."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW
from twins import SETTINGS, loss_of, network, same, train

import comhe

OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "sgd-fused": partial(SGD, lr=0.05, momentum=0.9, fused=True),
    "adamw": partial(AdamW, lr=0.01),
    "adamw-fused": partial(AdamW, lr=0.01, fused=True),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_mode = pytest.mark.parametrize("decoupled", [False, True], ids=["in-loss", "decoupled"])
OVERFLOW = 3


def train_scaled(model, optimizer, scaler, steps, clip=None, overflow=OVERFLOW):
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == overflow:
            model[0].weight.grad[0, 0] = torch.inf
        if clip is not None:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


@every_mode
@every_optimizer
def test_a_scaled_run_with_an_overflow_is_the_unscaled_run_without_that_step(make, decoupled):
    """Powers of two: scaling and unscaling leave every bit."""
    scaled, unscaled = network(), network()
    optimizer, other = make(scaled.parameters()), make(unscaled.parameters())
    handle = comhe.attach("rp-comhe", scaled, optimizer, decoupled=decoupled, **SETTINGS)
    twin = comhe.attach("rp-comhe", unscaled, other, decoupled=decoupled, **SETTINGS)
    scaler = GradScaler("cpu", init_scale=2.0**12)
    train_scaled(scaled, optimizer, scaler, range(8))
    train(unscaled, other, [step for step in range(8) if step != OVERFLOW])
    assert scaler.get_scale() == 2.0**11
    assert same(scaled, unscaled)
    assert handle.regularizer.round == twin.regularizer.round == 7
    assert same(handle.state_dict(), twin.state_dict())
    assert same(dict(handle.regularizer._bases.named_buffers()), dict(twin.regularizer._bases.named_buffers()))

    unregularised = network()
    train(unregularised, make(unregularised.parameters()), [step for step in range(8) if step != OVERFLOW])
    assert not same(scaled, unregularised)


@every_mode
@every_optimizer
def test_a_skipped_step_changes_neither_weights_nor_round_nor_bases(make, decoupled):
    model = network()
    optimizer = make(model.parameters())
    handle = comhe.attach("ap-comhe", model, optimizer, decoupled=decoupled, dim=6)
    scaler = GradScaler("cpu", init_scale=2.0**12)
    train_scaled(model, optimizer, scaler, range(OVERFLOW))

    def snapshot():
        bases = {name: basis.clone() for name, basis in handle.regularizer._bases.named_buffers()}
        return {name: value.clone() for name, value in model.state_dict().items()}, bases

    before = snapshot()
    train_scaled(model, optimizer, scaler, [OVERFLOW])
    assert same(snapshot(), before)
    assert handle.regularizer.round == OVERFLOW
    train_scaled(model, optimizer, scaler, [OVERFLOW + 1])
    assert handle.regularizer.round == OVERFLOW + 1
    after = snapshot()
    assert not same(after[0], before[0])
    assert not same(after[1], before[1])


@every_optimizer
def test_clipping_after_unscaling(make):
    scaled, unscaled = network(), network()
    optimizer, other = make(scaled.parameters()), make(unscaled.parameters())
    comhe.attach("rp-comhe", scaled, optimizer, **SETTINGS)
    comhe.attach("rp-comhe", unscaled, other, **SETTINGS)
    train_scaled(scaled, optimizer, GradScaler("cpu", init_scale=2.0**12), range(8), clip=0.1)
    for step in (step for step in range(8) if step != OVERFLOW):
        other.zero_grad()
        loss_of(unscaled, step).backward()
        clip_grad_norm_(unscaled.parameters(), 0.1)
        other.step()
    assert same(scaled, unscaled)


@pytest.mark.parametrize("method", ["ap-comhe-alter", "adv-comhe", "g-comhe-stochastic", "learned-comhe"])
def test_moved_redrawn_and_learned_bases_under_a_scaler(method):
    """A fused optimizer takes the round to the device, where periods are followed without asking the host."""
    settings = {"channels": 4} if method.startswith("g-") else {"dim": 6}
    periods = {"advance_every": 2} if method == "ap-comhe-alter" else {}
    settings |= periods | {"redraw_every": 4}
    scaled, unscaled = network(), network()
    optimizer, other = (SGD(model.parameters(), lr=0.05, fused=True) for model in (scaled, unscaled))
    handle = comhe.attach(method, scaled, optimizer, **settings)
    twin = comhe.attach(method, unscaled, other, **settings)
    train_scaled(scaled, optimizer, GradScaler("cpu", init_scale=2.0**12), range(10))
    train(unscaled, other, [step for step in range(10) if step != OVERFLOW])
    assert same(scaled, unscaled)
    assert same(handle.state_dict(), twin.state_dict())


def test_a_scale_that_half_precision_cannot_hold():
    model = network(dtype=torch.float16)
    optimizer = Adam(model.parameters(), lr=0.01, fused=True)
    comhe.attach("hs-mhe", model, optimizer)
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].weight.grad.clone()))
    scaler = GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(loss_of(model, 0) * 1e-3).backward()
    without = model[0].weight.grad.clone()
    scaler.step(optimizer)

    twin = network(dtype=torch.float16)
    (gradient,) = torch.autograd.grad(comhe.build("hs-mhe", twin)(), twin[0].weight)
    expected = without + (gradient.float() * 2.0**16).half()
    assert torch.isfinite(expected).all()
    assert torch.equal(seen[0], expected)


def test_a_scaled_penalty_beyond_half_precision_is_held_at_its_largest_number():
    """The scaler has looked for overflows before, and would not skip the step."""
    model = network(dtype=torch.float16)
    optimizer = Adam(model.parameters(), lr=0.01, fused=True)
    comhe.attach("hs-mhe", model, optimizer, weight=1e3)
    scaler = GradScaler("cpu", init_scale=2.0**16)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step) * 1e-3).backward()
        scaler.step(optimizer)
        assert model[0].weight.grad.abs().max() == torch.finfo(torch.float16).max / 2.0**16  # unscaled by the step
        scaler.update()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


class Wipes(SGD):
    """A fused optimizer that throws its gradients away."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.zero_()
        return super().step(closure)


def test_the_arrival_is_checked_under_a_scaler_too_and_not_by_a_skipped_step():
    model = network()
    optimizer = Wipes(model.parameters(), lr=0.05, fused=True)
    comhe.attach("rp-comhe", model, optimizer, **SETTINGS)
    scaler = GradScaler("cpu", init_scale=2.0**12)
    train_scaled(model, optimizer, scaler, [0], overflow=0)
    with pytest.raises(RuntimeError, match=r"did not reach the update of layer '0': the step did not move its weight"):
        train_scaled(model, optimizer, scaler, [1])


def test_a_frozen_layer_among_scaled_ones():
    scaled, unscaled = network(), network()
    for model in (scaled, unscaled):
        nn.Module.requires_grad_(model[0], False)
    make = OPTIMIZERS["sgd-fused"]
    optimizer, other = make(scaled[2:].parameters()), make(unscaled[2:].parameters())
    comhe.attach("rp-comhe", scaled, optimizer, **SETTINGS)
    comhe.attach("rp-comhe", unscaled, other, **SETTINGS)
    train_scaled(scaled, optimizer, GradScaler("cpu", init_scale=2.0**12), range(3))
    train(unscaled, other, range(3))
    assert same(scaled, unscaled)
