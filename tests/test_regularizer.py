"""The stateful shell: what forward reads, what advance changes, and what each setting does."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import comhe
from comhe.projections import Adversarial, Gaussian
from comhe.rules import Rule


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)


def everything_in(regularizer: comhe.Regularizer, model: nn.Module) -> dict[str, Any]:
    buffers = {f"buffer {name}": tensor.clone() for name, tensor in regularizer.named_buffers()}
    parameters = {f"parameter {name}": tensor.detach().clone() for name, tensor in regularizer.named_parameters()}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = {"modes": torch.tensor([part.training for part in model.modules()])}
    return buffers | parameters | weights | modes | {"generator": torch.get_rng_state()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_forward_changes_nothing_and_advance_what_it_must():
    model = network()
    nn.utils.parametrizations.spectral_norm(model[0])
    regularizer = comhe.build("ap-comhe", model, dim=6, jitter=1e-3, weight=lambda round_: round_ + 1.0)
    before = everything_in(regularizer, model)
    first, second = regularizer(), regularizer()
    first.backward()
    assert torch.equal(first, second)
    assert same(everything_in(regularizer, model), before)
    assert regularizer.round == 0

    regularizer.advance()
    after = everything_in(regularizer, model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in changed if not name.startswith("buffer")} == set()
    assert "buffer _bases.twin" in changed
    assert len(changed) == 1 + 2 + 2  # the round, two bases, the schedules of the hidden and the unprojected rule
    assert regularizer.round == 1
    assert not torch.equal(regularizer(), first)


def test_advance_neither_computes_a_loss_nor_records_a_graph():
    model = network()
    regularizer = comhe.build("ap-comhe", model, dim=6)
    regularizer.advance()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(tensor.requires_grad for tensor in regularizer.buffers())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["rp-comhe", "ap-comhe", "bp-comhe", "hs-mhe", "srip", "learned-comhe"])
def test_the_loss_is_float64_for_a_float64_model_and_float32_below(method, dtype):
    model = network(dtype)
    settings = {} if method in ("hs-mhe", "srip") else {"dim": 6}
    loss = comhe.build(method, model, **settings)()
    assert loss.shape == ()
    assert loss.dtype == (dtype if dtype == torch.float64 else torch.float32)
    loss.backward()
    assert model[0].weight.grad.dtype == dtype
    assert model[0].weight.grad.any()
    assert model[4].weight.grad is None


@pytest.mark.parametrize("s", [None, 0.0, 1.0])
@pytest.mark.parametrize("half_space", [None, True, False])
def test_energies_are_those_of_the_weights_themselves(s, half_space):
    model = network()
    rules = [Rule("0", Gaussian(dim=6), s=3.0, half_space=False), Rule("2", penalty="mma", distance="angle")]
    regularizer = comhe.Regularizer(model, rules, jitter=0.1)
    found = regularizer.energies(s, half_space)
    own = {"0": (3.0, False, "chord"), "2": (2.0, True, "angle")}
    assert list(found) == ["0", "2"]
    for name, (its_s, its_space, distance) in own.items():
        expected = comhe.energy(
            model[int(name)].weight,
            its_s if s is None else s,
            half_space=its_space if half_space is None else half_space,
            distance=distance,
        )
        assert torch.equal(found[name], expected.detach())
        assert not found[name].requires_grad


def test_the_strength_can_be_a_schedule_of_the_round():
    model = network(torch.float64)
    energy = comhe.energy(model[0].weight, half_space=True).detach()
    ramp = comhe.Regularizer(model, Rule("0", weight=lambda round_: (round_ / 4).clamp(max=1.0)))
    switched = comhe.Regularizer(model, Rule("0", weight=lambda round_: 2.0 if round_ >= 2 else 0.0))
    for round_ in range(7):
        torch.testing.assert_close(ramp().detach(), min(round_ / 4, 1.0) * energy)
        torch.testing.assert_close(switched().detach(), (2.0 if round_ >= 2 else 0.0) * energy)
        ramp.advance()
        switched.advance()
    # On the device too, where the round is a tensor that the host has not seen.
    on_device = comhe.Regularizer(model, Rule("0", weight=lambda round_: round_ / 4))
    on_device.advance(skipped=torch.zeros(1))
    on_device.advance(skipped=torch.ones(1))
    torch.testing.assert_close(on_device().detach(), energy / 4)


def test_the_strength_can_be_changed_by_the_rules_place_or_name():
    model = network(torch.float64)
    regularizer = comhe.Regularizer(model, [Rule("0", name="front"), Rule("2"), Rule("9*", name="unused")])
    first, second = (comhe.energy(model[i].weight, half_space=True) for i in (0, 2))
    for name, weights in {"front": (3.0, 1.0), 1: (3.0, 0.5), 0: (0.0, 0.5), "1": (0.0, 2.0)}.items():
        changed = weights[0] if name in ("front", 0) else weights[1]
        regularizer.set_weight(changed, name)
        torch.testing.assert_close(regularizer(), weights[0] * first + weights[1] * second)
    for name in ("back", 7, "unused", 2):
        with pytest.raises(ValueError, match=rf"no rule {name!r} with layers.* Choose one of: 1, front"):
            regularizer.set_weight(1.0, name)
    with pytest.raises(ValueError, match="weight=nan: choose a finite number"):
        regularizer.set_weight(float("nan"))
    torch.testing.assert_close(regularizer(), 2.0 * second)


def test_a_strength_that_is_set_ends_the_schedule():
    model = network(torch.float64)
    regularizer = comhe.Regularizer(model, Rule("0", weight=lambda round_: round_ * 1.0))
    regularizer.set_weight(0.5)
    regularizer.advance()
    torch.testing.assert_close(regularizer(), 0.5 * comhe.energy(model[0].weight, half_space=True))


def test_a_strength_that_is_set_is_part_of_the_state():
    model, rules = network(), [Rule("0", name="front"), Rule("2", weight=3.0)]
    regularizer, resumed, untouched = (comhe.Regularizer(model, rules) for _ in range(3))
    regularizer.set_weight(0.5, "front")
    resumed.load_state_dict(regularizer.state_dict())
    assert torch.equal(resumed(), regularizer())
    assert not torch.equal(untouched(), regularizer())


def test_what_has_weight_zero_is_not_computed():
    model = network()
    calls = []

    def counted(neurons: Tensor) -> Tensor:
        calls.append(neurons.shape)
        return neurons.square().sum(dim=(-2, -1))

    regularizer = comhe.Regularizer(model, [Rule("0", penalty=counted, weight=0.0), Rule("2", penalty=counted)])
    regularizer()
    assert calls == [torch.Size([1, 16, 20])]
    assert not comhe.Regularizer(model, Rule(penalty=counted, weight=0.0))().requires_grad


def test_a_weight_that_becomes_zero_stays_in_the_graph():
    model = network()
    regularizer = comhe.Regularizer(model, Rule())
    regularizer.set_weight(0.0)
    regularizer().backward()
    assert regularizer() == 0
    assert not model[0].weight.grad.any()


def test_weights_through_zero_do_not_recompile():
    """Nor do rules that fall silent one by one."""
    compiled = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    model = network()
    regularizer = comhe.Regularizer(model, [Rule(str(i)) for i in (0, 2, 4)])
    torch.compiler.reset()
    value = torch.compile(regularizer, backend=count, fullgraph=True)
    for step in range(27):
        weights = [step % 3, step // 3 % 3, step // 9]
        for rule, weight in enumerate(weights):
            regularizer.set_weight(float(weight), rule)
        energies = regularizer.energies().values()
        torch.testing.assert_close(
            value(), sum(w * e for w, e in zip(weights, energies, strict=True)) + torch.zeros(())
        )
    assert compiled == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_schedule_that_leaves_the_numbers_is_refused(value):
    regularizer = comhe.Regularizer(network(), Rule(weight=lambda round_: 1.0 if round_ < 2 else value))
    regularizer.advance()
    with pytest.raises(ValueError, match=f"weight={value} at round 2: a schedule must give finite numbers"):
        regularizer.advance()


def test_a_seed_is_an_integer():
    for seed in ("a", 1.5, True):
        with pytest.raises(TypeError, match=f"seed={seed!r}: choose an integer"):
            comhe.build("rp-comhe", network(), dim=4, seed=seed)


def test_the_type_of_the_value_does_not_depend_on_the_default_one():
    default = torch.get_default_dtype()
    model = network()
    expected = comhe.build("rp-comhe", model, dim=4)()
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            value = comhe.build("rp-comhe", model, dim=4)()
        finally:
            torch.set_default_dtype(default)
        assert torch.equal(value, expected)
        assert value.dtype == expected.dtype


def test_its_text_says_how_far_it_is():
    regularizer = comhe.Regularizer(network(), Rule())
    regularizer.advance()
    assert repr(regularizer).startswith("Regularizer(\n  layers=3, round=1")


def test_jitter_parts_exact_duplicates():
    def steps(jitter: float) -> Tensor:
        model = network()
        with torch.no_grad():
            model[0].weight[7] = model[0].weight[3]
        regularizer = comhe.Regularizer(model, Rule("0"), jitter=jitter)
        for _ in range(5):
            (gradient,) = torch.autograd.grad(regularizer(), model[0].weight)
            assert gradient.isfinite().all()
            with torch.no_grad():
                model[0].weight -= 1e-3 * gradient / gradient.norm()
            regularizer.advance()
        return (model[0].weight[7] - model[0].weight[3]).detach().norm()

    assert steps(0.0) == 0
    assert steps(1e-3) > 1e-3


def test_jitter_is_a_pure_function_of_seed_and_round():
    model = network()
    make = partial(comhe.Regularizer, model, [Rule(["0", "2"])])
    noisy, twin, other_seed, quiet = make(jitter=0.1), make(jitter=0.1), make(jitter=0.1, seed=1), make()
    values = []
    for _ in range(3):
        assert torch.equal(noisy(), noisy())
        assert torch.equal(noisy(), twin())
        assert not torch.equal(noisy(), other_seed())
        values.append(noisy().detach())
        noisy.advance()
        twin.advance(skipped=torch.zeros(1))
    assert len({value.item() for value in values}) == 3
    assert not any(torch.equal(value, quiet()) for value in values)
    assert same(noisy.energies(), quiet.energies())

    resumed = make(jitter=0.1)
    resumed.load_state_dict(noisy.state_dict())
    assert torch.equal(resumed(), noisy())


def test_jitter_is_relative_to_each_neuron():
    model = network(torch.float64)
    regularizer = comhe.Regularizer(model, Rule("0"), jitter=1e-2)
    before = regularizer()
    with torch.no_grad():
        model[0].weight *= torch.logspace(-6, 6, 20, dtype=torch.float64).unsqueeze(-1)
    torch.testing.assert_close(regularizer(), before)


def test_a_projection_that_steps_with_the_networks_rate_asks_for_it():
    model = network()
    projection = Adversarial(dim=6, step_size=None)
    regularizer = comhe.Regularizer(model, projection)
    with pytest.raises(ValueError, match=r"give Regularizer\(lr=...\) or call set_lr\(...\)"):
        regularizer()
    regularizer.set_lr(0.05)
    fixed = comhe.Regularizer(model, Adversarial(dim=6, step_size=0.05))
    given = comhe.Regularizer(model, projection, lr=0.05)
    assert torch.equal(regularizer(), fixed())
    assert torch.equal(given(), fixed())
    for lr in (0.05, torch.tensor(0.05, dtype=torch.float64)):
        regularizer.advance(lr=lr)
        fixed.advance()
        assert torch.equal(regularizer(), fixed())
    regularizer.set_lr(0.5)
    assert not torch.equal(regularizer(), fixed())


def test_restricting_the_layers_leaves_the_random_bases():
    model = network()
    whole = comhe.Regularizer(model, Gaussian(dim=6))
    part = comhe.Regularizer(model, Gaussian(dim=6), serves=lambda layer: layer.name == "2")
    assert [layer.name for layer in part.layers] == ["2"]
    expected = comhe.Regularizer(model, Gaussian(dim=6), include="2")()
    assert torch.equal(part(), expected)
    bases = dict(whole.named_buffers())
    assert all(torch.equal(tensor, bases[name]) for name, tensor in part.named_buffers())
    assert "_bases.0/20/0" in dict(part.named_buffers())


def test_a_model_and_its_regularizer_are_copied_together():
    model = network()
    regularizer = comhe.build("ap-comhe", model, dim=6)
    regularizer.advance()
    twin_model, twin = copy.deepcopy((model, regularizer))
    assert torch.equal(twin(), regularizer())
    with torch.no_grad():
        twin_model[0].weight.normal_()
    assert not torch.equal(twin(), regularizer())
    assert not any("weight" in name and "_weight_" not in name for name in dict(regularizer.named_parameters()))


def test_bases_follow_a_model_that_turns_to_float64():
    model = network()
    regularizer = comhe.Regularizer(model, Gaussian(dim=6))
    model.double()
    assert regularizer().dtype == torch.float64
    regularizer.advance()
    twin = comhe.Regularizer(model, Gaussian(dim=6))
    twin.advance()
    assert torch.equal(regularizer(), twin())


class Halved(nn.Module):
    """A parametrization by a product, counting how often it is computed."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("factor", torch.eye(size) / 2)
        self.num_calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.num_calls += 1
        return self.factor @ weight


def test_a_parametrized_weight_of_several_layers_is_computed_once():
    attention = nn.MultiheadAttention(8, 2)
    halved = Halved(24)
    nn.utils.parametrize.register_parametrization(attention, "in_proj_weight", halved)
    regularizer = comhe.Regularizer(attention, Adversarial(dim=4))
    assert [layer.name for layer in regularizer.layers][:3] == [f"in_proj_weight.{part}" for part in "qkv"]
    for use in (regularizer, regularizer.energies, regularizer.advance):
        halved.num_calls = 0
        use()
        assert halved.num_calls == 1


def test_autocast_does_not_reach_a_parametrization():
    attention = nn.MultiheadAttention(8, 2)
    nn.utils.parametrize.register_parametrization(attention, "in_proj_weight", Halved(24))
    regularizer = comhe.Regularizer(attention, Gaussian(dim=4))
    plain, energies = regularizer(), regularizer.energies()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(regularizer(), plain)
        assert regularizer.energies() == energies


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.MultiheadAttention])
def test_a_layer_whose_weights_hold_several_sets_is_compiled_whole(kind):
    torch.manual_seed(0)
    module = kind(8, 8)
    regularizer = comhe.Regularizer(module, Gaussian(dim=4))
    torch._dynamo.reset()
    compiled = torch.compile(regularizer, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(), regularizer(), rtol=1e-6, atol=0.0)
        regularizer.advance()
