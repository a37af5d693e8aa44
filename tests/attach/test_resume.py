"""A training that stops and goes on elsewhere: model, optimizer and attachment restore every bit."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from twins import loss_of, network, same, train

import comhe

METHODS: dict[str, dict[str, Any]] = {
    "rp-comhe": {"dim": 6, "redraw_every": 3},
    "ap-comhe": {"dim": 6, "redraw_every": 5},
    "ap-comhe-alter": {"dim": 6, "advance_every": 3},
    "adv-comhe": {"dim": 6},
    "ap-comhe-reference": {"dim": 6},
    "learned-comhe": {"dim": 6},
    "g-comhe-stochastic": {"channels": 4},
    "hs-mhe": {"jitter": 1e-3, "weight": lambda round_: 1 / (1 + round_)},
}
every_method = pytest.mark.parametrize(("method", "settings"), METHODS.items(), ids=METHODS)


PAST = r"the optimizer has a past that the attachment has not seen: call load_state_dict\(\.\.\.\)"


def start(method: str, settings: dict[str, Any], make, **how: Any) -> tuple[nn.Module, Optimizer, Any]:
    model = network(how.pop("model_seed", 0))
    optimizer = make(model.parameters())
    return model, optimizer, comhe.attach(method, model, optimizer, **settings, **how)


def carry(*savable: Any) -> list[Any]:
    """Through a file, as a checkpoint goes, and read as a careful reader would."""
    file = io.BytesIO()
    torch.save([each.state_dict() for each in savable], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("decoupled", [False, True])
@every_method
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(method, settings, decoupled):
    make = partial(AdamW, lr=0.01)
    unbroken = start(method, settings, make, decoupled=decoupled)
    train(*unbroken[:2], range(12))

    first = start(method, settings, make, decoupled=decoupled)
    train(*first[:2], range(7))
    resumed = start(method, settings, make, decoupled=decoupled, model_seed=1, seed=9)  # the state brings the seed
    for part, state in zip(resumed, carry(*first), strict=True):
        part.load_state_dict(state)
    train(*resumed[:2], range(7, 12))

    assert same(unbroken[0], resumed[0])
    assert same(unbroken[2].state_dict(), resumed[2].state_dict())
    assert torch.equal(unbroken[2].value, resumed[2].value)
    assert resumed[2].regularizer.round == 12


@pytest.mark.parametrize("method", ["ap-comhe-alter", "learned-comhe"])
def test_a_run_whose_round_lives_on_the_device_resumes_too(method):
    """A scaler moves the round of a fused optimizer there."""

    def scaled(model, optimizer, steps):
        scaler = GradScaler("cpu", init_scale=2.0**10)
        for step in steps:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()

    make, settings = partial(SGD, lr=0.05, momentum=0.9, fused=True), {"dim": 6, "redraw_every": 4}
    unbroken = start(method, settings, make)
    scaled(*unbroken[:2], range(10))
    first = start(method, settings, make)
    scaled(*first[:2], range(5))
    resumed = start(method, settings, make, model_seed=1)
    for part, state in zip(resumed, carry(*first), strict=True):
        part.load_state_dict(state)
    scaled(*resumed[:2], range(5, 10))
    assert same(unbroken[0], resumed[0])
    assert same(unbroken[2].state_dict(), resumed[2].state_dict())


def test_the_round_is_not_lost_when_state_is_loaded_into_a_run_under_way():
    make, settings = partial(SGD, lr=0.05), {"dim": 6}
    first = start("rp-comhe", settings, make)
    train(*first[:2], range(4))
    saved = carry(*first)
    train(*first[:2], range(4, 8))
    expected = [p.detach().clone() for p in first[0].parameters()]
    for part, state in zip(first, saved, strict=True):
        part.load_state_dict(state)
    train(*first[:2], range(4, 8))
    assert same(expected, [p.detach() for p in first[0].parameters()])


def test_the_state_holds_the_round_and_what_is_learned_and_no_random_basis():
    make = partial(SGD, lr=0.05)
    _, _, random = start("rp-comhe", {"dim": 6}, make)
    assert random.state_dict().keys() == {"_extra_state"}
    assert random.state_dict()["_extra_state"]["learned"] == {}
    _, _, moved = start("ap-comhe", {"dim": 6}, make)
    assert moved.state_dict()["_extra_state"]["learned"].keys() == {"hidden/12/0", "hidden/20/0"}


def test_a_state_of_other_layers_is_refused_by_name_and_changes_nothing():
    make = partial(SGD, lr=0.05)
    model, optimizer, handle = start("ap-comhe", {"dim": 6}, make)
    train(model, optimizer, range(3))
    state = handle.state_dict()
    other, other_optimizer, other_handle = start("ap-comhe", {"dim": 6, "include": ["0"]}, make)
    train(other, other_optimizer, [0])
    before = other_handle.state_dict()
    with pytest.raises(ValueError, match="the saved state is of other layers: 2 is missing here"):
        other_handle.load_state_dict(state)
    assert same(other_handle.state_dict(), before)
    _, _, projected = start("ap-comhe", {"dim": 14}, make)  # layer 0 goes unprojected
    with pytest.raises(ValueError, match="0 had basis hidden/12 and has unprojected/None"):
        projected.load_state_dict(state)


def test_a_state_saved_inside_a_wrapper_loads_outside():
    make, settings = partial(SGD, lr=0.05), {"dim": 6}
    model, optimizer, handle = start("ap-comhe", settings, make)
    train(model, optimizer, range(3))
    wrapped = torch.compile(network(), backend="eager")
    other = make(wrapped.parameters())
    resumed = comhe.attach("ap-comhe", wrapped, other, **settings)
    resumed.load_state_dict(handle.state_dict())
    assert same(resumed.state_dict(), handle.state_dict())


def test_an_optimizer_resumed_without_its_attachment_is_an_error():
    before = start("rp-comhe", METHODS["rp-comhe"], partial(AdamW, lr=0.01))
    train(*before[:2], range(3))
    saved = carry(*before)
    model, optimizer, handle = start("rp-comhe", METHODS["rp-comhe"], partial(AdamW, lr=0.01))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with pytest.raises(RuntimeError, match=PAST):
        train(model, optimizer, range(3, 4))
    handle.load_state_dict(saved[2])
    train(model, optimizer, range(3, 4))
    assert handle.regularizer.round == 4


def test_the_attachment_may_be_loaded_before_the_optimizer():
    before = start("rp-comhe", METHODS["rp-comhe"], partial(AdamW, lr=0.01))
    train(*before[:2], range(3))
    saved = carry(*before)
    model, optimizer, handle = start("rp-comhe", METHODS["rp-comhe"], partial(AdamW, lr=0.01))
    handle.load_state_dict(saved[2])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(3, 5))
    assert handle.regularizer.round == 5
    optimizer.load_state_dict(saved[1])  # a second time, alone
    with pytest.raises(RuntimeError, match=PAST):
        train(model, optimizer, range(5, 6))


@pytest.mark.parametrize(("kind", "settings"), [(AdamW, {}), (SGD, {"momentum": 0.9}), (Adagrad, {})])
def test_an_optimizer_resumed_before_it_is_attached_needs_the_state_too(kind, settings):
    make = partial(kind, lr=0.01, **settings)
    before = start("rp-comhe", METHODS["rp-comhe"], make)
    train(*before[:2], range(3))
    saved = carry(*before)
    model = network()
    optimizer = make(model.parameters())
    for part, state in zip((model, optimizer), saved[:2], strict=True):
        part.load_state_dict(state)
    handle = comhe.attach("rp-comhe", model, optimizer, **METHODS["rp-comhe"])
    with pytest.raises(RuntimeError, match=PAST):
        train(model, optimizer, [3])
    assert same(model, before[0])
    handle.load_state_dict(saved[2])
    train(model, optimizer, [3])
    train(*before[:2], [3])
    assert same(model, before[0])
    assert handle.regularizer.round == 4


def test_an_attachment_beside_an_optimizer_with_a_past_begins_anew_if_told_to():
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    handle = comhe.attach("hs-mhe", model, optimizer, anew=True)
    train(model, optimizer, [2])
    assert handle.regularizer.round == 1


def test_a_regularizer_that_was_resumed_itself_brings_its_round():
    make = partial(AdamW, lr=0.01)
    before = start("rp-comhe", METHODS["rp-comhe"], make)
    train(*before[:2], range(3))
    saved = carry(before[0], before[1], before[2].regularizer)
    model = network()
    optimizer, regularizer = make(model.parameters()), comhe.build("rp-comhe", model, **METHODS["rp-comhe"])
    for part, state in zip((model, optimizer, regularizer), saved, strict=True):
        part.load_state_dict(state)
    comhe.attach(regularizer, model, optimizer)
    train(model, optimizer, [3])
    train(*before[:2], [3])
    assert same(model, before[0])
