"""attach(): the numbers of the penalty in the loss, bit for bit, whatever the optimizer and the method."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from twins import OPTIMIZERS, SETTINGS, loss_of, network, pair, same, state_of, train, train_in_loss

import comhe
from comhe.methods import METHODS

ATTACHABLE = [name for name, method in METHODS.items() if not method.parametrization]
momentum = OPTIMIZERS["sgd"]


def of_method(name: str) -> dict:
    settings = {"seed": 3, "weight": 0.5} | (
        {"lr": 0.05} if name in ("ap-comhe-reference", "adv-comhe-reference") else {}
    )
    if METHODS[name].projection == "Group":
        return settings | {"channels": 4}
    return settings | ({"dim": 6} if METHODS[name].projection not in ("Identity",) else {})


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_optimizer_gives_the_bits_of_the_penalty_in_the_loss(make):
    (by_hand, optimizer, regularizer), (attached, other, handle) = pair(make)
    train_in_loss(by_hand, optimizer, regularizer)
    train(attached, other)
    assert same(by_hand, attached)
    assert same(state_of(optimizer), state_of(other))
    assert handle.regularizer.round == regularizer.round == 10

    unregularised = network()
    train(unregularised, make(unregularised.parameters()))
    assert not same(unregularised[0], attached[0])
    assert not same(unregularised[2], attached[2])


@pytest.mark.parametrize("name", ATTACHABLE)
def test_any_method_gives_the_bits_of_the_penalty_in_the_loss(name):
    (by_hand, optimizer, regularizer), (attached, other, handle) = pair(momentum, method=name, **of_method(name))
    steps = range(12)  # the alternating projection moves after ten
    train_in_loss(by_hand, optimizer, regularizer, steps)
    train(attached, other, steps)
    assert same(by_hand, attached)
    assert same(handle.state_dict(), dict(regularizer.state_dict()))


def test_convolutions_and_float64_too():
    def convolutional() -> nn.Sequential:
        torch.manual_seed(1)
        first, second = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        return nn.Sequential(first, nn.Tanh(), second, nn.Flatten(), nn.Linear(128, 3)).double()

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(step)
        inputs = torch.randn(5, 2, 4, 4, generator=draw, dtype=torch.float64)
        return cross_entropy(model(inputs), torch.randint(3, (5,), generator=draw))

    by_hand, attached = convolutional(), convolutional()
    regularizer = comhe.build("rp-comhe", by_hand, dim=8)
    optimizer, other = momentum(by_hand.parameters()), momentum(attached.parameters())
    comhe.attach("rp-comhe", attached, other, dim=8)
    for step in range(4):
        optimizer.zero_grad()
        (loss(by_hand, step) + regularizer()).backward()
        optimizer.step()
        regularizer.advance()
        other.zero_grad()
        loss(attached, step).backward()
        other.step()
    assert same(by_hand, attached)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw-foreach"])
def test_a_compiled_optimizer_step(name):
    (by_hand, optimizer, regularizer), (attached, other, handle) = pair(OPTIMIZERS[name])
    torch.compiler.reset()
    compiled, compiled_other = (torch.compile(o.step, backend="aot_eager") for o in (optimizer, other))
    for step in range(10):
        optimizer.zero_grad()
        (loss_of(by_hand, step) + regularizer()).backward()
        compiled()
        regularizer.advance()
        other.zero_grad()
        loss_of(attached, step).backward()
        compiled_other()
    assert same(by_hand, attached)
    assert handle.regularizer.round == 10


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_hooks_are_not_compiled(decoupled):
    seen = []

    def penalty(neurons):
        seen.append(torch.compiler.is_compiling())
        return neurons.square().sum(dim=(-2, -1))

    model = network()
    optimizer = momentum(model.parameters())
    regularizer = comhe.Regularizer(model, comhe.Rule(penalty=penalty, weight=1e-3))
    comhe.attach(regularizer, model, optimizer, decoupled=decoupled)
    torch.compiler.reset()

    @torch.compile(backend="eager")
    def step(batch):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    for batch in range(3):
        step(batch)
    assert len(seen) == 3 * len(regularizer.layers)
    assert not any(seen)


def test_parameter_groups_with_learning_rates_of_their_own():
    def groups(model: nn.Sequential) -> SGD:
        each = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2:].parameters()}]
        return SGD(each, lr=0.02, momentum=0.9)

    by_hand, attached = network(), network()
    optimizer, other = groups(by_hand), groups(attached)
    regularizer = comhe.build("rp-comhe", by_hand, **SETTINGS)
    comhe.attach("rp-comhe", attached, other, **SETTINGS)
    train_in_loss(by_hand, optimizer, regularizer)
    train(attached, other)
    assert same(by_hand, attached)


def test_two_optimizers_are_served_apart_and_together_make_one():
    by_hand, attached = network(), network()
    regularizer = comhe.build("rp-comhe", by_hand, **SETTINGS)

    def two(model: nn.Sequential) -> tuple[SGD, AdamW]:
        return SGD(model[0].parameters(), lr=0.1, momentum=0.9), AdamW(model[2:].parameters(), lr=0.01)

    optimizers, others = two(by_hand), two(attached)
    handles = [comhe.attach("rp-comhe", attached, other, **SETTINGS) for other in others]
    assert [[layer.name for layer in handle.regularizer.layers] for handle in handles] == [["0"], ["2"]]
    for step in range(10):
        (loss_of(by_hand, step) + regularizer()).backward()
        loss_of(attached, step).backward()
        for each in (*optimizers, *others):
            each.step()
            each.zero_grad()
        regularizer.advance()
    assert same(by_hand, attached)
    bases = {name: value for handle in handles for name, value in handle.regularizer._bases.named_buffers()}
    assert same(bases, dict(regularizer._bases.named_buffers()))


@pytest.mark.parametrize("name", ["ap-comhe-reference", "adv-comhe-reference"])
def test_a_projection_that_steps_with_the_networks_rate_follows_the_schedule(name):
    by_hand, attached = network(), network()
    regularizer = comhe.build(name, by_hand, dim=6, lr=0.5)
    optimizer, other = momentum(by_hand.parameters()), momentum(attached.parameters())
    handle = comhe.attach(name, attached, other, dim=6)
    schedule, other_schedule = (LambdaLR(o, lambda step: 0.8**step) for o in (optimizer, other))
    for step in range(6):
        optimizer.zero_grad()
        regularizer.set_lr(schedule.get_last_lr()[0])
        (loss_of(by_hand, step) + regularizer()).backward()
        optimizer.step()
        regularizer.advance()
        schedule.step()
        train(attached, other, [step])
        other_schedule.step()
    assert same(by_hand, attached)
    assert same(handle.state_dict(), dict(regularizer.state_dict()))


def test_a_projection_that_steps_with_the_networks_rate_takes_that_of_the_first_layers_group():
    def groups(model: nn.Sequential) -> SGD:
        return SGD([{"params": model[0].parameters()}, {"params": model[2:].parameters(), "lr": 0.7}], lr=0.02)

    by_hand, attached = network(), network()
    regularizer = comhe.build("ap-comhe-reference", by_hand, dim=6, lr=0.02)
    optimizer, other = groups(by_hand), groups(attached)
    handle = comhe.attach("ap-comhe-reference", attached, other, dim=6)
    train_in_loss(by_hand, optimizer, regularizer, range(3))
    train(attached, other, range(3))
    assert same(by_hand, attached)
    assert same(handle.state_dict(), dict(regularizer.state_dict()))


@pytest.mark.parametrize("named", [False, True])
def test_learned_bases_are_trained_with_the_first_layers_group_and_its_schedule(named):
    def parameters(model: nn.Module):
        return [*(model.named_parameters() if named else model.parameters())]

    by_hand, attached = network(), network()
    regularizer = comhe.build("learned-comhe", by_hand, dim=6)
    extra = [*(regularizer.named_parameters() if named else regularizer.parameters())]
    optimizer = momentum([*parameters(by_hand), *extra])
    other = momentum(parameters(attached))
    schedules = [LambdaLR(optimizer, lambda step: 0.8**step), LambdaLR(other, lambda step: 0.8**step)]
    handle = comhe.attach("learned-comhe", attached, other, dim=6)
    for (group,) in (optimizer.param_groups, other.param_groups):
        assert len(group["params"]) == 8
        assert group.get("param_names", [""] * 8)[6:] == ([name for name, _ in extra] if named else [""] * 2)
    before = handle.regularizer.state_dict()["_extra_state"]["learned"]
    for step in range(6):
        train_in_loss(by_hand, optimizer, regularizer, [step])
        # The bases are nobody's but the attachment's: zeroing the model's gradients leaves theirs, and is enough.
        attached.zero_grad()
        loss_of(attached, step).backward()
        other.step()
        for schedule in schedules:
            schedule.step()
    assert same(by_hand, attached)
    learned = handle.regularizer.state_dict()["_extra_state"]["learned"]
    assert same(learned, regularizer.state_dict()["_extra_state"]["learned"])
    assert not same(learned, before)


def test_sparse_gradients_of_an_embedding():
    def embedding() -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Flatten(), nn.Linear(16, 3))

    by_hand, attached = embedding(), embedding()
    optimizer, other = SGD(by_hand.parameters(), lr=0.1), SGD(attached.parameters(), lr=0.1)
    regularizer = comhe.build("hs-mhe", by_hand, include="0")
    comhe.attach("hs-mhe", attached, other, include="0")
    words, labels = torch.tensor([[1, 2], [3, 1], [7, 7]]), torch.tensor([0, 1, 2])
    for _ in range(3):
        for model, each in ((by_hand, optimizer), (attached, other)):
            each.zero_grad()
            loss = cross_entropy(model(words), labels)
            (loss + regularizer() if model is by_hand else loss).backward()
            each.step()
        regularizer.advance()
    assert same(by_hand, attached)
