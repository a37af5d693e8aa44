"""Whom attach() serves, through which wrappers, and whom it refuses with which remedy."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer, SparseAdam
from torch.optim.lr_scheduler import StepLR
from twins import SETTINGS, network, same, train, train_in_loss

import comhe
from comhe.parametrizations import report

momentum = partial(SGD, lr=0.05, momentum=0.9)


def assert_close(first: nn.Module, second: nn.Module) -> None:
    """Where a gradient is a sum of three and more, in the loss ours comes first among them and here last."""
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


class Accelerated(Optimizer):
    """As Accelerate wraps one: an optimizer itself, which never runs its base class's constructor."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


def lightning(optimizer: Optimizer) -> Optimizer:
    """As Lightning wraps one: of its class, with its attributes, its own step, and a property `optimizer`."""

    class LightningOptimizer:
        def __init__(self, optimizer):
            self.__dict__ |= {name: value for name, value in vars(optimizer).items() if name != "step"}
            self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})
            self._optimizer = optimizer

        @property
        def optimizer(self):
            return self._optimizer

        def step(self, closure=None):
            return self._optimizer.step(closure=closure)

    return LightningOptimizer(optimizer)


class Engine:
    """As engines keep one: no optimizer itself."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


class SharpnessAware(Optimizer):
    """As SAM is written everywhere: two closures, and the step of a base optimizer where the weights were."""

    def __init__(self, base):
        super().__init__(base.param_groups, base.defaults)
        self.base_optimizer = base
        self.param_groups = base.param_groups

    def step(self, closure=None):
        self.base_optimizer.step()


WRAPPERS = {
    "sam": SharpnessAware,
    "accelerate": Accelerated,
    "lightning": lightning,
    "engine": Engine,
    "nested": lambda optimizer: Engine(Engine(Accelerated(optimizer))),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("decoupled", [False, True])
def test_the_optimizer_inside_a_wrapper_is_served(wrap, decoupled):
    bare, wrapped = network(), network()
    optimizer, inner = momentum(bare.parameters()), momentum(wrapped.parameters())
    other = wrap(inner)
    comhe.attach("rp-comhe", bare, optimizer, decoupled=decoupled, **SETTINGS)
    handle = comhe.attach("rp-comhe", wrapped, other, decoupled=decoupled, **SETTINGS)
    assert handle.optimizer is inner
    train(bare, optimizer)
    train(wrapped, other)
    assert same(bare, wrapped)
    assert handle.regularizer.round == 10
    handle.detach()
    assert not inner._optimizer_step_pre_hooks


def test_a_scheduler_on_top_of_the_wrapper_changes_nothing():
    bare, wrapped = network(), network()
    optimizer, other = momentum(bare.parameters()), Accelerated(momentum(wrapped.parameters()))
    comhe.attach("rp-comhe", bare, optimizer, **SETTINGS)
    schedules = [StepLR(optimizer, 2), StepLR(other.optimizer, 2)]
    comhe.attach("rp-comhe", wrapped, other, **SETTINGS)
    for step in range(5):
        train(bare, optimizer, [step])
        train(wrapped, other, [step])
        for schedule in schedules:
            schedule.step()
    assert same(bare, wrapped)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (LBFGS, ValueError, r"LBFGS evaluates its closure many times a step: add comhe.build\(...\)\(\) to the loss"),
        (SparseAdam, ValueError, "SparseAdam takes sparse gradients only, a regularizer's is dense: use Adam"),
        (lambda _: "sgd", TypeError, "optimizer=str: give a torch.optim.Optimizer"),
        (lambda _: None, TypeError, "optimizer=NoneType: give a torch.optim.Optimizer"),
        (lambda _: network(), TypeError, "optimizer=Sequential: give a torch.optim.Optimizer"),
        (lambda parameters: Engine(LBFGS(parameters)), ValueError, "LBFGS"),
        (lambda _: Engine(object()), TypeError, "optimizer=object: give a torch.optim.Optimizer"),
    ],
    ids=["lbfgs", "sparse-adam", "string", "none", "model", "inside", "engine-of-nothing"],
)
def test_what_cannot_be_attached_to_is_refused(make, kind, message):
    model = network()
    optimizer = make(list(model.parameters()))
    with pytest.raises(kind, match=message):
        comhe.attach("hs-mhe", model, optimizer)
    comhe.attach("hs-mhe", model, momentum(model.parameters()))


def test_an_optimizer_of_another_model_is_refused():
    model = network()
    with pytest.raises(ValueError, match=r"no layer of Sequential to regularise .*0: not served here: its parameters"):
        comhe.attach("hs-mhe", model, momentum(network().parameters()))


def test_frozen_layers_are_skipped_also_those_frozen_later():
    model = network()
    model[0].requires_grad_(False)
    optimizer = momentum(model.parameters())
    handle = comhe.attach("rp-comhe", model, optimizer, **SETTINGS)
    assert [layer.name for layer in handle.regularizer.layers] == ["2"]
    assert ("0", "frozen (requires_grad=False)") in handle.regularizer.explain().skipped
    handle.detach()
    model[0].requires_grad_(True)
    handle = comhe.attach("rp-comhe", model, optimizer, **SETTINGS)
    for later, others in ((2, [0]), (0, [])):
        model[later].requires_grad_(False)
        optimizer.state.clear()  # what is left of the momentum would move it on
        before = {i: model[i].weight.clone() for i in (0, 2)}
        train(model, optimizer, [later])
        assert [i for i in (0, 2) if not torch.equal(model[i].weight, before[i])] == others
    assert handle.regularizer.round == 2


def test_a_regularizer_made_before_is_taken_as_it_is():
    by_hand, attached = network(), network()
    regularizers = [comhe.build("rp-comhe", model, **SETTINGS) for model in (by_hand, attached)]
    optimizer, other = momentum(by_hand.parameters()), momentum(attached.parameters())
    handle = comhe.attach(regularizers[1], attached, other)
    assert handle.regularizer is regularizers[1]
    train_in_loss(by_hand, optimizer, regularizers[0])
    train(attached, other)
    assert same(by_hand, attached)
    with pytest.raises(TypeError, match="dim, s: settings belong to the regularizer that was given"):
        comhe.attach(regularizers[1], attached, other, dim=3, s=1.0)


def test_learned_bases_that_the_optimizer_holds_already_stay_there():
    by_hand, attached = network(), network()
    regularizers = [comhe.build("learned-comhe", model, dim=6) for model in (by_hand, attached)]
    optimizer, other = (
        momentum([{"params": model.parameters()}, {"params": regularizer.parameters(), "lr": 0.5}])
        for model, regularizer in zip((by_hand, attached), regularizers, strict=True)
    )
    handle = comhe.attach(regularizers[1], attached, other)
    train_in_loss(by_hand, optimizer, regularizers[0])
    train(attached, other)
    assert same(by_hand, attached)
    assert same(list(regularizers[0].parameters()), list(regularizers[1].parameters()))
    handle.detach()
    assert [len(group["params"]) for group in other.param_groups] == [6, 2]


def test_a_regularizer_with_layers_that_the_optimizer_does_not_hold_is_refused():
    model = network()
    regularizer = comhe.build("rp-comhe", model, **SETTINGS)
    optimizer = momentum(model[2:].parameters())
    with pytest.raises(ValueError, match="0: not among this optimizer's parameters; attach by the method's name"):
        comhe.attach(regularizer, model, optimizer)
    handle = comhe.attach("rp-comhe", model, optimizer, **SETTINGS)
    assert [layer.name for layer in handle.regularizer.layers] == ["2"]


@pytest.mark.parametrize(("method", "settings"), [("rotation", {}), ("lr-bp-comhe", {"rank": 4, "weight": 0.5})])
def test_methods_that_replace_weights_are_refused_and_the_remedy_works(method, settings):
    model = network()
    optimizer = momentum(model.parameters())
    with pytest.raises(ValueError, match=rf"call comhe.build\('{method}', model\) first, then make the optimizer"):
        comhe.attach(method, model, optimizer, **settings)
    assert report(model) == []

    by_hand, attached = network(), network()
    regularizers = [comhe.build(method, each, **settings) for each in (by_hand, attached)]
    optimizer, other = momentum(by_hand.parameters()), momentum(attached.parameters())
    handle = comhe.attach(regularizers[1], attached, other)
    before = [parameter.clone() for parameter in attached.parameters()]
    train_in_loss(by_hand, optimizer, regularizers[0], range(4))
    train(attached, other, range(4))
    assert_close(by_hand, attached)
    assert not any(torch.equal(old, new) for old, new in zip(before, attached.parameters(), strict=True))
    assert handle.regularizer.round == 4
    handle.detach()
    assert comhe.merge(attached) == ["0", "2"]


def test_a_parametrized_weight_is_served_through_its_originals():
    by_hand, attached = network(), network()
    for model in (by_hand, attached):
        torch.manual_seed(0)  # the power iteration starts at random
        nn.utils.parametrizations.weight_norm(model[0])
        nn.utils.parametrizations.spectral_norm(model[2])
        model.eval()  # training would move the power iteration's vectors in every forward pass
    regularizer = comhe.build("rp-comhe", by_hand, **SETTINGS)
    optimizer = momentum(by_hand.parameters())
    other = momentum(attached.parameters())
    handle = comhe.attach("rp-comhe", attached, other, **SETTINGS)
    train_in_loss(by_hand, optimizer, regularizer, range(3))
    train(attached, other, range(3))
    assert_close(by_hand, attached)
    assert handle.regularizer.round == 3


class UsesAWeightTwice(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, inputs):
        return self.last(self.inner(self.inner(self.first(inputs).tanh()).tanh()))


def test_a_weight_used_twice_in_the_forward_pass():
    by_hand, attached = UsesAWeightTwice(), UsesAWeightTwice()
    regularizer = comhe.build("rp-comhe", by_hand, **SETTINGS)
    optimizer, other = momentum(by_hand.parameters()), momentum(attached.parameters())
    comhe.attach("rp-comhe", attached, other, **SETTINGS)
    train_in_loss(by_hand, optimizer, regularizer, range(3))
    train(attached, other, range(3))
    assert_close(by_hand, attached)


def test_a_group_without_a_learning_rate_is_refused():
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match="SGD has a group without a learning rate"):
        comhe.attach("hs-mhe", model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks
