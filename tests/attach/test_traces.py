"""What an attachment leaves on the model (nothing), on the optimizer (two hooks) and in memory, and how it goes."""

from __future__ import annotations

import gc
import warnings
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from twins import SETTINGS, loss_of, network, same, train

import comhe

momentum = partial(SGD, lr=0.05, momentum=0.9)


def everything_on(model: nn.Module) -> list[Any]:
    """All that can be registered on a model."""
    return [
        [
            (name, id(module), sorted(module.__dict__), list(module._parameters), list(module._buffers))
            for name, module in model.named_modules()
        ],
        [
            (name, len(value))
            for module in model.modules()
            for name, value in vars(module).items()
            if "hooks" in name and value is not None
        ],
        [
            (name, id(parameter), len(parameter._backward_hooks or ()), parameter._post_accumulate_grad_hooks)
            for name, parameter in model.named_parameters()
        ],
        list(model.state_dict()),
        model.training,
    ]


def everything_on_optimizer(optimizer: Optimizer) -> list[Any]:
    hooks = [sorted(value) for name, value in vars(optimizer).items() if "hooks" in name]
    return [hooks, deepcopy(optimizer.state_dict()), [len(group["params"]) for group in optimizer.param_groups]]


METHODS = ["rp-comhe", "learned-comhe", "ap-comhe"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("decoupled", [False, True])
def test_nothing_is_registered_on_the_model(method, decoupled):
    model = network()
    optimizer = momentum(model.parameters())
    before, weights = everything_on(model), deepcopy(model.state_dict())
    handle = comhe.attach(method, model, optimizer, dim=6, decoupled=decoupled)
    assert everything_on(model) == before
    assert same(dict(model.state_dict()), dict(weights))
    train(model, optimizer, range(3))
    assert everything_on(model) == before
    handle.detach()
    assert everything_on(model) == before


def test_outputs_are_the_same_bits_with_and_without():
    """Before any step, after some, and after detaching: of the same weights."""
    plain, attached = network(), network()
    optimizer = momentum(attached.parameters())
    handle = comhe.attach("rp-comhe", attached, optimizer, **SETTINGS)
    inputs = torch.randn(7, 12)
    assert torch.equal(plain(inputs), attached(inputs))
    train(attached, optimizer, range(3))
    plain.load_state_dict(attached.state_dict())
    assert torch.equal(plain(inputs), attached(inputs))
    handle.detach()
    assert torch.equal(plain(inputs), attached(inputs))


def test_the_value_has_the_type_of_the_regularizer():
    default = torch.get_default_dtype()
    for dtype, others in ((torch.float64, torch.bfloat16), (torch.float32, torch.float64), (torch.bfloat16, default)):
        model = network(dtype=dtype)
        optimizer = momentum(model.parameters())
        torch.set_default_dtype(others)
        try:
            handle = comhe.attach("hs-mhe", model, optimizer)
            expected = comhe.build("hs-mhe", model)().detach()
            train(model, optimizer, [0])
        finally:
            torch.set_default_dtype(default)
        assert handle.value.dtype == expected.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(handle.value, expected)


def test_an_adopted_basis_keeps_no_gradient_after_the_step():
    """Else clipping by the optimizer's parameters would count it, where only the model's gradients were zeroed."""
    model = network()
    optimizer = momentum(model.parameters())
    handle = comhe.attach("learned-comhe", model, optimizer, dim=6)
    train(model, optimizer, [0])
    assert all(parameter.grad is None for parameter in handle.regularizer.parameters())


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_detach_leaves_the_optimizer_as_it_was(method, named):
    model = network()
    optimizer = momentum(model.named_parameters() if named else model.parameters())
    before = everything_on_optimizer(optimizer)
    handle = comhe.attach(method, model, optimizer, dim=6)
    assert everything_on_optimizer(optimizer) != before
    handle.detach()
    assert everything_on_optimizer(optimizer) == before


@pytest.mark.parametrize("method", METHODS)
def test_after_detach_training_goes_on_without_the_penalty(method):
    model, plain = network(), network()
    optimizer, other = momentum(model.parameters()), momentum(plain.parameters())
    handle = comhe.attach(method, model, optimizer, dim=6)
    train(model, optimizer, range(3))
    optimizer.load_state_dict(deepcopy(optimizer.state_dict()))  # makes new groups
    handle.detach()
    handle.detach()
    plain.load_state_dict(model.state_dict())
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(3, 6))
    train(plain, other, range(3, 6))
    assert same(model, plain)
    assert same(optimizer.state_dict(), other.state_dict())
    assert handle.regularizer.round == 3


def test_detach_between_two_learned_attachments_takes_only_its_own_bases():
    model = network()
    optimizer = SGD([{"params": model[:2].parameters()}, {"params": model[2:].parameters()}], lr=0.05)
    first = comhe.attach("learned-comhe", model, optimizer, dim=6, include="0")
    second = comhe.attach("learned-comhe", model, optimizer, dim=6, include="2")
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 5]
    first.detach()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 5]
    train(model, optimizer, [0])
    second.detach()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]


def test_a_parameter_is_attached_once_and_again_after_detach():
    model = network()
    optimizer = momentum(model.parameters())
    handle = comhe.attach("hs-mhe", model, optimizer)
    before = everything_on_optimizer(optimizer)
    for another in (optimizer, momentum(model.parameters())):
        with pytest.raises(ValueError, match=r"layer '0' is attached already: detach\(\) the first attachment"):
            comhe.attach("rp-comhe", model, another, **SETTINGS)
    assert everything_on_optimizer(optimizer) == before
    handle.detach()
    again = comhe.attach("rp-comhe", model, optimizer, anew=True, **SETTINGS)
    train(model, optimizer, [0])
    assert (handle.regularizer.round, again.regularizer.round) == (0, 1)


def test_an_attachment_that_nobody_holds_any_more_is_gone():
    model = network()
    gc.disable()
    try:
        for step in range(3):
            optimizer = momentum(model.parameters())
            comhe.attach("hs-mhe", model, optimizer)
            train(model, optimizer, [step])
            del optimizer
    finally:
        gc.enable()


def test_the_value_is_a_tensor_on_the_device_nan_at_first():
    model = network()
    optimizer = momentum(model.parameters())
    handle = comhe.attach("rp-comhe", model, optimizer, **SETTINGS)
    assert isinstance(handle.value, Tensor)
    assert handle.value.shape == ()
    assert handle.value.isnan()
    expected = comhe.build("rp-comhe", model, **SETTINGS)().detach()
    held = handle.value
    train(model, optimizer, [0])
    assert torch.equal(handle.value, expected)
    assert not handle.value.requires_grad
    assert held is handle.value  # the same tensor for good, unless the model changes its device


class NoSynchronisation(TorchDispatchMode):
    """Fails where the host would have to wait for a number of the device."""

    WAITS = frozenset({"_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "unique", "masked_select"})

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.WAITS, func
        return func(*args, **kwargs or {})


def test_the_guard_against_synchronisation_sees_one():
    with NoSynchronisation(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        float(torch.ones(()))


@pytest.fixture
def as_elsewhere(monkeypatch):
    """The executor of the CPU may look at its numbers, for which it does not wait; other devices do without it."""
    monkeypatch.setattr("comhe.regularizer.why_not", lambda family: "as on another device")


@pytest.mark.usefixtures("as_elsewhere")
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("method", ["rp-comhe", "ap-comhe-reference", "adv-comhe", "learned-comhe", "bp-comhe"])
def test_after_the_first_steps_nothing_waits_for_the_device(method, decoupled):
    """The first step, or decoupled the next one, looks once whether the gradient has taken effect."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = comhe.attach(method, model, optimizer, dim=6, decoupled=decoupled)
    train(model, optimizer, range(1 + decoupled))
    loss_of(model, 2).backward()
    with NoSynchronisation():
        optimizer.step()
        value = handle.value
    assert value.isfinite()


@pytest.mark.usefixtures("as_elsewhere")
@pytest.mark.parametrize("decoupled", [False, True])
def test_nothing_waits_under_a_scaler_and_with_a_rate_on_the_device(decoupled):
    model = network()
    optimizer = Adam(model.parameters(), lr=torch.tensor(0.01), fused=True)
    comhe.attach("ap-comhe-alter", model, optimizer, dim=6, decoupled=decoupled)
    scaler = GradScaler("cpu", init_scale=2.0**12)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step > decoupled:
            with NoSynchronisation():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()


@pytest.mark.usefixtures("as_elsewhere")
def test_nothing_waits_while_the_rate_is_zero():
    model = network()
    optimizer = SGD(model.parameters(), lr=0.0)
    comhe.attach("rp-comhe", model, optimizer, **SETTINGS)
    for step in range(2):
        loss_of(model, step).backward()
        with NoSynchronisation():
            optimizer.step()


FAILURES = {
    "method": ("rp-comh", {}, "did you mean 'rp-comhe'"),
    "override": ("rp-comhe", {"dimm": 3}, "did you mean 'dim'"),
    "setting": ("rp-comhe", {"dim": 0}, "choose at least 1"),
    "energy": ("learned-comhe", {"s": -1.0}, "choose a finite s >= 0"),
    "no layer": ("rp-comhe", {"exclude": "*"}, "no layer of Sequential to regularise"),
    "rotation": ("rotation", {}, "call comhe.build"),
    "small fan-in": ("rp-comhe", {"dim": 16, "small_fan_in": "error"}, "no larger than dim=16"),
    "relative": ("learned-comhe", {"dim": 3, "relative": True}, "choose dim > s"),
}


@pytest.mark.parametrize(("method", "settings", "message"), FAILURES.values(), ids=FAILURES)
def test_a_failed_attach_leaves_nothing_behind(method, settings, message):
    model = network()
    optimizer = momentum(model.parameters())
    train(model, optimizer, [0])
    before = everything_on(model), everything_on_optimizer(optimizer)
    with pytest.raises((ValueError, TypeError), match=message):
        comhe.attach(method, model, optimizer, **settings)
    after = everything_on(model), everything_on_optimizer(optimizer)
    assert same(after, before)
    comhe.attach("learned-comhe", model, optimizer, dim=6, anew=True)
    train(model, optimizer, [1])


def test_no_warning_is_given():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = network()
        optimizer = momentum(model.parameters())
        comhe.attach("learned-comhe", model, optimizer, dim=6)
        train(model, optimizer, [0, 1])
