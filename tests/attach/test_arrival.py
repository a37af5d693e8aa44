"""The check, once, that the gradient reached the update: it speaks where it must, and nowhere else."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from twins import OPTIMIZERS, SETTINGS, network, same, train

import comhe


class WipesInside(SGD):
    """Zeroes gradients at the start of its step, as if it were the end of the last one."""

    def step(self, closure=None):
        self.zero_grad(set_to_none=self.to_none)
        return super().step(closure)


class NeverMoves(SGD):
    def step(self, closure=None):
        pass


class KeepsItsOwnGradients(SGD):
    """Collects gradients as backward makes them, and puts these into place before the update."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.own: dict[nn.Parameter, Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(self._keep)

    def _keep(self, parameter):
        self.own[parameter] = parameter.grad.clone()

    def step(self, closure=None):
        for parameter, own in self.own.items():
            parameter.grad.copy_(own)
        return super().step(closure)


def attached(make, dtype=torch.float32, **settings):
    model = network(dtype=dtype)
    optimizer = make(model.parameters())
    return model, optimizer, comhe.attach("rp-comhe", model, optimizer, **SETTINGS | settings)


LOST = "the regularizer's gradient did not reach the update of layer '0'"
STILL = f"{LOST}: the step did not move its weight"
TAKEN = f"{LOST}: the gradient was taken away again before the update"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(WipesInside, lr=0.1), STILL),
        (partial(NeverMoves, lr=0.1), STILL),
        (partial(KeepsItsOwnGradients, lr=0.1), TAKEN),
    ],
    ids=["wipes", "never-moves", "keeps-its-own"],
)
def test_an_optimizer_that_loses_the_gradient_is_told_once(make, message):
    WipesInside.to_none = False
    model, optimizer, handle = attached(make)
    with pytest.raises(RuntimeError, match=message + r"\. Use decoupled=True, or add"):
        train(model, optimizer, [0])
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    train(model, optimizer, [1, 2])
    assert handle.regularizer.round == 0
    comhe.attach("rp-comhe", model, optimizer, decoupled=True, anew=True, **SETTINGS)
    train(model, optimizer, [3, 4])


def test_gradients_set_to_none_before_the_update_are_noticed_too():
    WipesInside.to_none = True
    model, optimizer, _ = attached(partial(WipesInside, lr=0.1))
    with pytest.raises(RuntimeError, match=STILL):
        train(model, optimizer, [0])


def test_the_check_waits_for_a_rate_above_zero():
    model, optimizer, _ = attached(partial(NeverMoves, lr=0.0))
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(RuntimeError, match=STILL):
        train(model, optimizer, [3])


def test_the_check_happens_once():
    class WipesLater(SGD):
        wipes = False

        def step(self, closure=None):
            if self.wipes:
                self.zero_grad()
            return super().step(closure)

    model, optimizer, handle = attached(partial(WipesLater, lr=0.1))
    train(model, optimizer, [0])
    optimizer.wipes = True
    train(model, optimizer, [1])
    assert handle.regularizer.round == 2


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_no_alarm_for_an_honest_optimizer_even_where_its_step_is_lost_in_rounding(make):
    for dtype in (torch.float32, torch.bfloat16):
        for lr in (0.0, 1e-12, 1e-9, 1e-7, 1e-5, 1e-3):
            model = network(dtype=dtype)
            optimizer = make(model.parameters())
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(lr) if isinstance(group["lr"], Tensor) else lr
            handle = comhe.attach("hs-mhe", model, optimizer)
            train(model, optimizer, [0, 1])
            assert handle.regularizer.round == 2


def test_no_alarm_where_the_penalty_is_lost_in_rounding():
    model, optimizer, _ = attached(partial(SGD, lr=0.1), weight=1e-14)
    plain = network()
    train(model, optimizer, [0, 1])
    train(plain, SGD(plain.parameters(), lr=0.1), [0, 1])
    assert same(model, plain)


def test_a_closure_that_is_never_called_is_noticed():
    class Ignores(SGD):
        def step(self, closure=None):
            return super().step()

    _, optimizer, handle = attached(partial(Ignores, lr=0.1))
    with pytest.raises(RuntimeError, match="update of any layer: the optimizer did not call its closure"):
        optimizer.step(lambda: None)
    assert handle.regularizer.round == 0


class RemembersWeights(SGD):
    """Steps on a copy of its own, and writes that over the weight."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter].setdefault("kept", parameter.detach().clone().to(self.kept_in))
                kept -= group["lr"] * parameter.grad
                parameter.data.copy_(kept)


def test_a_decoupled_step_that_a_finer_copy_will_overwrite_is_noticed():
    RemembersWeights.kept_in = torch.float32
    model, optimizer, _ = attached(partial(RemembersWeights, lr=0.1), torch.bfloat16, decoupled=True)
    train(model, optimizer, [0])
    with pytest.raises(
        RuntimeError, match="update of layer '0': the optimizer has a copy of the weight in higher precision"
    ):
        train(model, optimizer, [1])
    assert not optimizer._optimizer_step_pre_hooks


def test_a_decoupled_step_that_is_taken_back_is_noticed():
    model, optimizer, _ = attached(partial(SGD, lr=0.1), decoupled=True)
    kept = []
    optimizer._optimizer_step_post_hooks[-1] = lambda *_: kept.append(model[0].weight.detach().clone())
    optimizer._optimizer_step_post_hooks.move_to_end(-1, last=False)
    train(model, optimizer, [0])
    with torch.no_grad():
        model[0].weight.copy_(kept[0])
    with pytest.raises(
        RuntimeError, match=r"update of layer '0': the weight was set back after it\. Use decoupled=False"
    ):
        train(model, optimizer, [1])


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_no_alarm_for_an_honest_optimizer_after_decoupled_steps(make):
    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer, handle = attached(make, dtype, decoupled=True)
        train(model, optimizer, range(4))
        assert handle.regularizer.round == 4


def test_no_alarm_where_the_gradient_was_ours_alone_and_is_zeroed_by_another_hook():
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad(set_to_none=False))
    handle = comhe.attach("hs-mhe", model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert handle.regularizer.round == 1


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_energy_falls_where_the_optimizer_maximises(decoupled):
    model = network()
    optimizer = SGD(model.parameters(), lr=0.5, maximize=True)
    handle = comhe.attach("hs-mhe", model, optimizer, decoupled=decoupled)
    before = sum(handle.regularizer.energies().values())
    for _ in range(20):
        optimizer.zero_grad()
        optimizer.step()
    assert sum(handle.regularizer.energies().values()) < 0.99 * before


def test_no_alarm_for_weight_decay_and_maximize():
    for make in (partial(SGD, lr=0.1, weight_decay=0.1, maximize=True), partial(AdamW, lr=0.1, maximize=True)):
        model, optimizer, _ = attached(make)
        train(model, optimizer, [0, 1])


def test_the_baseline_has_nothing_to_arrive():
    model = network()
    optimizer: Optimizer = NeverMoves(model.parameters(), lr=0.1)
    handle = comhe.attach("baseline", model, optimizer)
    train(model, optimizer, [0, 1])
    assert handle.value == 0
    assert handle.regularizer.round == 2
