"""Bases through the rounds: shared or not, redrawn, moved, restarted, on the host and on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import comhe
from comhe.projections import REGISTRY, AnglePreserving, Gaussian, Learned, Projection
from comhe.random import Stream
from comhe.rules import Rule


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Layers 0 and 2 have the same fan-in, 4 another."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10), nn.Tanh(), nn.Linear(10, 12)).to(dtype)


def bases_of(regularizer: comhe.Regularizer) -> dict[str, Tensor]:
    bases = regularizer._bases
    return {
        name: t.detach().clone() for name, t in [*bases.named_buffers(), *bases.named_parameters()] if name != "twin"
    }


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def gaussian(seed: int, key: str, epoch: int, *shape: int) -> Tensor:
    return Stream(seed, key, epoch).normal(*shape)


def perturb(model: nn.Module, step: int) -> None:
    """As a training step would."""
    draw = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=draw).to(weight.dtype)


def test_layers_of_equal_fan_in_share_a_basis_or_have_their_own():
    shared = comhe.Regularizer(network(), Gaussian(dim=4, num_views=2), seed=5)
    own = comhe.Regularizer(network(), Gaussian(dim=4, num_views=2), seed=5, shared=False)
    assert same(
        bases_of(shared), {"0/16/0": gaussian(5, "0/16", 0, 2, 4, 16), "0/10/0": gaussian(5, "0/10", 0, 2, 4, 10)}
    )
    names = {"0/16/0/0": "0/16/0", "0/16/2/0": "0/16/2", "0/10/4/0": "0/10/4"}
    expected = {name: gaussian(5, key, 0, 2, 4, int(key.split("/")[1])) for name, key in names.items()}
    assert same(bases_of(own), expected)
    assert not torch.equal(expected["0/16/0/0"], expected["0/16/2/0"])


def test_rules_do_not_share_bases():
    rules = [Rule("0", Gaussian(dim=4), name="front"), Rule("2", Gaussian(dim=4))]
    bases = bases_of(comhe.Regularizer(network(), rules))
    assert same(bases, {"front/16/0": gaussian(0, "front/16", 0, 5, 4, 16), "1/16/0": gaussian(0, "1/16", 0, 5, 4, 16)})


@pytest.mark.parametrize("period", [1, 3, None, "auto"])
def test_a_basis_is_redrawn_every_so_many_rounds_as_a_function_of_the_round(period):
    regularizer = comhe.Regularizer(network(), Gaussian(dim=4), seed=2**63 + 1, redraw_every=period)
    every = 1 if period == "auto" else period
    for round_ in range(8):
        expected = gaussian(2**63 + 1, "0/16", round_ // every if every else 0, 5, 4, 16)
        assert torch.equal(bases_of(regularizer)["0/16/0"], expected)
        regularizer.advance()


def test_auto_leaves_the_period_to_each_projection():
    rules = [Rule("0", Gaussian(dim=4)), Rule("2", AnglePreserving(dim=4)), Rule("4", Learned(dim=4))]
    regularizer = comhe.Regularizer(network(), rules)
    assert [family.redraw_every for family in regularizer.plan.families] == [1, 1000, None]
    assert [family.redraw_every for family in comhe.Regularizer(network(), rules, redraw_every=7).plan.families] == [
        7
    ] * 3


def test_a_moved_basis_moves_every_so_many_rounds_and_restarts_at_a_redraw():
    model = network()
    projection = AnglePreserving(dim=4, advance_every=3, num_steps=2, mode="alternating")
    regularizer = comhe.Regularizer(model, projection, seed=1, redraw_every=7)
    energy = regularizer.plan.rules[0].energy
    expected = gaussian(1, "0/16", 0, 1, 4, 16)
    for round_ in range(1, 23):
        perturb(model, round_)
        regularizer.advance()
        if round_ % 7 == 0:  # a redraw wins over a move
            expected = gaussian(1, "0/16", round_ // 7, 1, 4, 16)
        elif round_ % 3 == 0:
            weights = [model[0].weight.detach(), model[2].weight.detach()]
            (expected,) = projection.advance((expected,), weights, energy, torch.tensor(0.0))
        assert torch.equal(bases_of(regularizer)["0/16/0"], expected), round_


def test_a_learned_basis_is_a_parameter_and_restarts_at_a_redraw_in_place():
    regularizer = comhe.Regularizer(network(), Learned(dim=4), redraw_every=3)
    parameters = dict(regularizer.named_parameters())
    assert parameters.keys() == {"_bases.0/16/0", "_bases.0/10/0"}
    regularizer().backward()
    assert all(parameter.grad.any() for parameter in parameters.values())
    for round_ in range(1, 5):
        with torch.no_grad():
            for parameter in parameters.values():
                parameter += 1.0
        moved = bases_of(regularizer)
        regularizer.advance()
        if round_ == 3:
            assert torch.equal(bases_of(regularizer)["0/16/0"], gaussian(0, "0/16", 1, 1, 4, 16))
        else:
            assert same(bases_of(regularizer), moved)
    assert all(parameter is dict(regularizer.named_parameters())[name] for name, parameter in parameters.items())


def test_new_numbers_are_written_into_the_old_tensors():
    regularizer = comhe.Regularizer(network(), Gaussian(dim=4))
    before = {name: tensor.data_ptr() for name, tensor in regularizer.named_buffers()}
    regularizer.advance()
    regularizer.advance(skipped=torch.zeros(1))
    assert {name: tensor.data_ptr() for name, tensor in regularizer.named_buffers()} == before


def settings_of(cls: type[Projection]) -> dict[str, Any]:
    fields = cls.__dataclass_fields__
    wanted = {"dim": 4, "channels": 4, "advance_every": 3, "num_steps": 2}
    return {name: value for name, value in wanted.items() if name in fields}


VARIANTS = {
    **{name: cls(**settings_of(cls)) for name, cls in REGISTRY.items()},
    "AnglePreserving-alternating": AnglePreserving(dim=4, mode="alternating", advance_every=3),
    "AnglePreserving-network's rate": AnglePreserving(dim=4, step_size=None, weight_decay=1e-2),
    "Group-stochastic": REGISTRY["Group"](channels=4, stochastic=True),
}


@pytest.mark.parametrize("redraw_every", [7, "auto"])
@pytest.mark.parametrize("projection", VARIANTS.values(), ids=VARIANTS)
def test_the_path_on_the_device_has_the_bits_of_the_path_on_the_host(projection, redraw_every):
    models = network(), network()
    make = {"redraw_every": redraw_every, "lr": 0.05, "weight": lambda round_: 1.0 / (1 + round_)}
    on_host, on_device = (comhe.Regularizer(model, projection, **make) for model in models)
    for round_ in range(25):
        assert torch.equal(on_host(), on_device()), round_
        for model in models:
            perturb(model, round_)
        on_host.advance(lr=0.05 / (1 + round_))
        on_device.advance(lr=0.05 / (1 + round_), skipped=torch.zeros(()) if round_ % 2 else torch.zeros(1))
        assert same(bases_of(on_host), bases_of(on_device)), round_
    assert on_host.round == on_device.round == 25


@pytest.mark.parametrize("projection", VARIANTS.values(), ids=VARIANTS)
def test_a_skipped_step_leaves_everything_as_it_was(projection):
    model = network()
    regularizer = comhe.Regularizer(model, projection, redraw_every=5, lr=0.05, weight=lambda round_: round_ + 1.0)
    for round_ in range(1, 12):
        before = {name: tensor.clone() for name, tensor in regularizer.named_buffers()} | bases_of(regularizer)
        perturb(model, round_)
        for skipped in (torch.ones(1), torch.tensor(2.0)):
            regularizer.advance(skipped=skipped)
            after = dict(regularizer.named_buffers()) | bases_of(regularizer)
            assert same(before, after)
            assert regularizer.round == round_ - 1
        regularizer.advance(skipped=torch.zeros(1))
        assert regularizer.round == round_


def test_host_and_device_rounds_can_alternate():
    models = network(), network()
    projection = AnglePreserving(dim=4, advance_every=3)
    mixed, plain = (comhe.Regularizer(model, projection, redraw_every=7) for model in models)
    for round_ in range(16):
        for model in models:
            perturb(model, round_)
        mixed.advance(skipped=torch.zeros(1) if round_ % 4 == 1 else None)
        plain.advance()
        assert same(bases_of(mixed), bases_of(plain))
    resumed = comhe.Regularizer(models[0], projection, redraw_every=7)
    resumed.load_state_dict(mixed.state_dict())
    assert same(bases_of(resumed), bases_of(plain))
    mixed.load_state_dict(comhe.Regularizer(models[0], projection, redraw_every=7).state_dict())
    assert mixed.round == 0


@pytest.mark.parametrize(("name", "backend"), [("Gaussian", "aot_eager"), ("AnglePreserving-alternating", "eager")])
def test_a_compiled_step_that_advances_inside_equals_the_eager_one(name, backend):
    models = network(torch.float64), network(torch.float64)
    plain, compiled = (
        comhe.Regularizer(model, VARIANTS[name], redraw_every=4, weight=lambda round_: 1.0 / (1 + round_))
        for model in models
    )

    def step(regularizer: comhe.Regularizer) -> Tensor:
        regularizer.advance()
        return regularizer()

    torch.compiler.reset()
    count = CompileCounterWithBackend(backend)
    run = torch.compile(step, backend=count, fullgraph=True)
    for round_ in range(9):
        losses = step(plain), run(compiled)
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
        gradients = [torch.autograd.grad(loss, model[0].weight)[0] for loss, model in zip(losses, models, strict=True)]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
        for model in models:
            perturb(model, round_)
    assert count.frame_count == 1
    assert compiled.round == plain.round == 9
    assert same(bases_of(compiled), bases_of(plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_is_never_differentiated_with_the_basis_of_another_round(dtype):
    model = network(dtype)
    regularizer = comhe.Regularizer(model, Gaussian(dim=4))
    (expected,) = torch.autograd.grad(regularizer(), model[0].weight)
    loss = regularizer()
    regularizer.advance()
    # The gradient was computed with the value; what would need the basis again is refused.
    assert torch.equal(torch.autograd.grad(loss, model[0].weight, retain_graph=True)[0], expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, model[0].weight, create_graph=True)


def test_a_basis_is_as_precise_as_the_weights_and_at_least_float32():
    for dtype, expected in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        regularizer = comhe.Regularizer(network(dtype), Gaussian(dim=4))
        assert bases_of(regularizer)["0/16/0"].dtype == expected
        regularizer.advance()
        regularizer.to(torch.float16)
        assert bases_of(regularizer)["0/16/0"].dtype == expected
        torch.testing.assert_close(bases_of(regularizer)["0/16/0"].float(), gaussian(0, "0/16", 1, 5, 4, 16))
