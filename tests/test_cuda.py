"""On a GPU: captured graphs with redraws inside, steps that never wait, layers on several devices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW

import comhe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

METHODS: dict[str, dict[str, Any]] = {
    "rp-comhe": {"dim": 6, "num_views": 2},
    "ap-comhe": {"dim": 6, "redraw_every": 7},
    "ap-comhe-alter": {"dim": 6, "advance_every": 3, "redraw_every": 7},
    "adv-comhe": {"dim": 6},
    "g-comhe-stochastic": {"channels": 4},
    "srht-comhe": {"dim": 6},
    "count-sketch-comhe": {"dim": 6},
    "mlp-comhe": {"dim": 6},
    "bp-comhe": {"dim": 6, "redraw_every": 4},
}
every_method = pytest.mark.parametrize(("method", "settings"), METHODS.items(), ids=METHODS)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))


def loss_of(model: nn.Module, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    inputs, labels = torch.randn(8, 12, generator=draw), torch.randint(5, (8,), generator=draw)
    return cross_entropy(model(inputs.cuda()), labels.cuda())


def bases_of(regularizer: comhe.Regularizer) -> dict[str, Tensor]:
    return dict(regularizer._bases.named_buffers())


def assert_close(first: Any, second: Any) -> None:
    """The same kernels, possibly by another algorithm."""
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def captured(step: Callable[[], Any], warm_ups: int = 3) -> tuple[torch.cuda.CUDAGraph, Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


@every_method
def test_a_captured_step_redraws_moves_and_follows_its_schedule(method, settings):
    models = network().cuda(), network().cuda()
    in_graph, eager = (
        comhe.build(method, model, weight=lambda round_: 1.0 / (1 + round_), **settings) for model in models
    )

    def step(regularizer: comhe.Regularizer, model: nn.Sequential) -> list[Tensor]:
        loss = regularizer()
        gradients = torch.autograd.grad(loss, [model[0].weight, model[2].weight])
        regularizer.advance()
        return [loss.detach(), *gradients]

    graph, results = captured(partial(step, in_graph, models[0]))
    for _ in range(3):
        step(eager, models[1])
    for round_ in range(20):
        graph.replay()
        assert_close(results, step(eager, models[1]))
        assert_close(bases_of(in_graph), bases_of(eager))
        for model in models:
            draw = torch.Generator().manual_seed(round_)
            with torch.no_grad():
                for weight in model.parameters():
                    weight += 0.05 * torch.randn(weight.shape, generator=draw).cuda()
    assert in_graph.round == eager.round == 23
    assert in_graph.state_dict()["_extra_state"]["round"] == 23


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("method", ["rp-comhe", "ap-comhe-alter"])
def test_a_captured_training_step_with_an_attachment(method, decoupled):
    inputs, labels = torch.zeros(8, 12, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda")

    def start() -> tuple[nn.Module, Any, Callable[[], Tensor]]:
        model = network().cuda()
        optimizer = Adam(model.parameters(), lr=torch.tensor(0.01, device="cuda"), capturable=True)
        handle = comhe.attach(method, model, optimizer, decoupled=decoupled, **METHODS[method])

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, handle, step

    def feed(step: int) -> None:
        draw = torch.Generator().manual_seed(step)
        inputs.copy_(torch.randn(8, 12, generator=draw))
        labels.copy_(torch.randint(5, (8,), generator=draw))

    feed(0)
    (model, handle, step), (twin, twin_handle, twin_step) = start(), start()
    graph, loss = captured(step)
    for _ in range(3):
        twin_step()
    for round_ in range(10):
        feed(round_)
        graph.replay()
        assert_close(loss, twin_step())
        assert_close(handle.value, twin_handle.value)
        assert_close(dict(model.state_dict()), dict(twin.state_dict()))
    assert handle.regularizer.round == twin_handle.regularizer.round == 13


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("decoupled", [False, True])
@every_method
def test_after_the_first_step_nothing_waits_for_the_device(method, settings, decoupled):
    model = network().cuda()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = comhe.attach(method, model, optimizer, decoupled=decoupled, **settings)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step:
            with no_synchronisation():
                optimizer.step()
        else:
            optimizer.step()
    assert handle.value.is_cuda
    assert handle.value.isfinite()


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaled_run_with_an_overflow_is_the_unscaled_run_without_that_step(fused, decoupled):
    def start() -> tuple[nn.Sequential, AdamW, Any]:
        model = network().cuda()
        optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
        return model, optimizer, comhe.attach("ap-comhe", model, optimizer, decoupled=decoupled, dim=6)

    (scaled, optimizer, handle), (unscaled, other, twin) = start(), start()
    scaler = GradScaler("cuda", init_scale=2.0**12)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(loss_of(scaled, step)).backward()
        if step == 3:
            scaled[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        if step != 3:
            other.zero_grad()
            loss_of(unscaled, step).backward()
            other.step()
    assert scaler.get_scale() == 2.0**11
    assert handle.regularizer.round == twin.regularizer.round == 7
    assert_close(dict(scaled.state_dict()), dict(unscaled.state_dict()))


@every_method
def test_layers_on_two_devices_are_computed_where_they_are(method, settings):
    here, there = network().double(), network().double()
    there[2].cuda()
    regularizer, mixed = (comhe.build(method, model, **settings) for model in (here, there))
    for _ in range(4):
        # Normals drawn on two devices differ in the last place of float32.
        for mine, its in zip(bases_of(regularizer).values(), bases_of(mixed).values(), strict=True):
            torch.testing.assert_close(its.cpu(), mine, rtol=1e-6, atol=1e-6)
            its.copy_(mine)
        loss, other = regularizer(), mixed()
        assert other.device == there[0].weight.device == torch.device("cpu")
        torch.testing.assert_close(loss, other, rtol=1e-12, atol=0)
        gradients = torch.autograd.grad(loss, [here[0].weight, here[2].weight])
        others = torch.autograd.grad(other, [there[0].weight, there[2].weight])
        assert [gradient.device.type for gradient in others] == ["cpu", "cuda"]
        # An entry near zero has no digits of its own to compare.
        for gradient, of_mixed in zip(gradients, others, strict=True):
            assert (of_mixed.cpu() - gradient).norm() <= 1e-11 * gradient.norm()
        regularizer.advance()
        mixed.advance()
    energies = mixed.energies()
    assert [energies[name].device.type for name in ("0", "2")] == ["cpu", "cuda"]


def test_layers_of_equal_fan_in_share_a_moved_basis_across_devices():
    def square() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 16), nn.Linear(12, 10), nn.Linear(12, 5))

    here, there = square(), square()
    there[1].cuda()
    regularizer, mixed = (comhe.build("ap-comhe", model, dim=6) for model in (here, there))
    for skipped in (None, torch.zeros(1, device="cuda"), torch.ones(1, device="cuda"), None):
        assert_close(regularizer(), mixed())
        regularizer.advance(skipped=None if skipped is None else skipped.cpu())
        mixed.advance(skipped=skipped)
    assert regularizer.round == mixed.round == 3


@pytest.mark.parametrize("method", ["rp-comhe", "ap-comhe"])
def test_an_attachment_follows_a_model_that_moves(method):
    moved, there = network(), network().cuda()
    optimizer, other = (SGD(model.parameters(), lr=0.05) for model in (moved, there))
    handle = comhe.attach(method, moved, optimizer, dim=6)
    twin = comhe.attach(method, there, other, dim=6)
    moved.cuda()
    for step in range(4):
        for model, each in ((moved, optimizer), (there, other)):
            each.zero_grad()
            loss_of(model, step).backward()
            each.step()
    assert handle.value.is_cuda
    assert_close(handle.value, twin.value)
    assert_close(dict(moved.state_dict()), dict(there.state_dict()))
    assert all(basis.is_cuda for basis in bases_of(handle.regularizer).values())


@pytest.mark.parametrize("method", ["rp-comhe", "ap-comhe", "learned-comhe"])
def test_a_state_goes_from_one_device_to_the_other(method):
    here, there = network(), network().cuda()
    regularizer, other = (comhe.build(method, model, dim=6) for model in (here, there))
    for _ in range(3):
        regularizer.advance()
    other.load_state_dict(copy.deepcopy(regularizer.state_dict()))
    assert_close(regularizer(), other().cpu())
    back = comhe.build(method, here, dim=6)
    back.load_state_dict(other.state_dict())
    assert_close(back(), regularizer())


@every_method
def test_half_precision_and_tf32_change_no_bit(method, settings):
    model = network().cuda()
    regularizer = comhe.build(method, model, **settings)
    expected = regularizer()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.equal(regularizer(), expected)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
