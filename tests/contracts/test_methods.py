"""What every method promises, on a small network with every kind of layer that methods treat apart."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_cnn
import torch
from small_cnn import HIDDEN, bases, build, is_silent, same_bits, train, weights_of, with_basis
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import comhe
from comhe.methods import ALIASES, METHODS, find_method

HERE = Path(__file__).parent
LIBRARY = Path(comhe.__file__).parents[1]

each_method = pytest.mark.parametrize("name", METHODS)
each_method_with_basis = pytest.mark.parametrize("name", with_basis())


def model_and_reg(name: str, **overrides: Any) -> tuple[nn.Module, comhe.Regularizer]:
    model = small_cnn.small_cnn()
    return model, build(name, model, **overrides)


def gradients(model: nn.Module, value: Tensor) -> dict[str, Tensor | None]:
    if not value.requires_grad:
        return {name: None for name, _ in model.named_parameters()}
    found = torch.autograd.grad(value, weights_of(model), allow_unused=True)
    return dict(zip((name for name, p in model.named_parameters() if p.requires_grad), found, strict=True))


def measure(name: str, reg: comhe.Regularizer) -> dict[str, Tensor]:
    """What a method lowers, layer by layer, free of random bases: a penalty itself, or the unprojected energy."""
    penalty = find_method(name).settings.get("penalty")
    if penalty is None:
        return reg.energies()
    return {layer.name: comhe.penalties.PENALTIES[penalty](layer.read().detach()).sum() for layer in reg.layers}


def smallest_angle(neurons: Tensor) -> Tensor:
    """Between lines through the origin, as half space has it; in degrees, the smallest over all sets."""
    unit = nn.functional.normalize(neurons.detach().double(), dim=-1)
    cosine = (unit @ unit.mT).abs() - 2 * torch.eye(unit.shape[-2])
    return torch.rad2deg(torch.acos(cosine.amax()))


# Loss and gradient


@each_method
def test_finds_the_hidden_layers_and_leaves_the_rest_alone(name: str) -> None:
    model, reg = model_and_reg(name)
    wanted = [*HIDDEN, "classifier"] if find_method(name).classifier_weight else [*HIDDEN]
    found = list(dict.fromkeys(layer.name.removesuffix(".y1").removesuffix(".y2") for layer in reg.layers))
    assert found == wanted
    value = reg()
    assert value.shape == ()
    assert value.dtype == torch.float32
    assert value.isfinite()
    if is_silent(name):
        assert value == 0
        assert not value.requires_grad
        return
    for parameter, gradient in gradients(model, value).items():
        layer, kind = parameter.split(".")[0], parameter.split(".")[-1]
        if kind == "bias" or layer not in wanted:
            assert gradient is None
        else:
            assert gradient is not None, parameter
            assert gradient.isfinite().all()
            assert gradient.norm() > 0, parameter


@pytest.mark.parametrize("alias", ALIASES)
def test_alias_is_the_method(alias: str) -> None:
    (model, reg), (other, aliased) = model_and_reg(ALIASES[alias]), model_and_reg(alias)
    assert str(reg.explain()) == str(aliased.explain())
    assert same_bits(train(model, reg, 2), train(other, aliased, 2))


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"rp-comeh.*did you mean 'rp-comhe'.*hs-mhe"):
        comhe.build("rp-comeh", small_cnn.small_cnn())


@each_method
def test_forward_changes_nothing(name: str) -> None:
    model, reg = model_and_reg(name)
    before = copy.deepcopy((model.state_dict(), reg.state_dict(), bases(reg)))
    assert torch.equal(reg(), reg())
    with torch.no_grad():
        reg()
    assert reg.round == 0
    assert same_bits(before[0].values(), model.state_dict().values())
    assert same_bits(before[2], bases(reg))
    assert before[1].keys() == reg.state_dict().keys()
    reg.advance()
    assert reg.round == 1
    assert same_bits(before[0].values(), model.state_dict().values())


@each_method
def test_learning_rate_enters_where_the_code_has_it(name: str) -> None:
    (_, slow), (_, fast) = model_and_reg(name), model_and_reg(name)
    slow.advance(lr=0.02)
    fast.advance(lr=0.2)
    uses_it = name in ("ap-comhe-reference", "adv-comhe-reference")
    assert same_bits(bases(slow), bases(fast)) is not uses_it
    assert torch.equal(slow(), fast()) is not uses_it
    if uses_it:
        with pytest.raises(ValueError, match="learning rate"):
            build(name, small_cnn.small_cnn(), lr=None)()


# Descent


def descend(model: nn.Module, reg: comhe.Regularizer, num_steps: int) -> None:
    """Steps of a fixed length against the regularizer's gradient alone."""
    learned = weights_of(model)
    for _ in range(num_steps):
        found = torch.autograd.grad(reg(), learned, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(learned, found, strict=True):
                if gradient is not None and gradient.norm() > 0:
                    parameter -= 0.1 * parameter.norm() * gradient / gradient.norm()
        reg.advance()


@pytest.mark.parametrize("name", [name for name in METHODS if not is_silent(name)])
def test_descent_lowers_the_energy_and_opens_the_angles(name: str) -> None:
    """From crowded neurons: the unprojected energy, or the penalty, of every single layer."""
    model = small_cnn.small_cnn(alike=2.0)
    reg = build(name, model)
    before = measure(name, reg)
    angles = {layer.name: smallest_angle(layer.read()) for layer in reg.layers}
    descend(model, reg, 10)
    after = measure(name, reg)
    for layer in reg.layers:
        assert after[layer.name] < before[layer.name], layer.name
        # Two penalties that pull lengths towards 1 may close one angle on the way.
        if name not in ("orthonormal", "srip"):
            assert smallest_angle(layer.read()) > angles[layer.name], layer.name


@pytest.mark.parametrize("name", [name for name in METHODS if is_silent(name)])
def test_silent_methods_pull_at_nothing(name: str) -> None:
    model = small_cnn.small_cnn().double()  # so that a small change can be told from rounding
    reg = build(name, model)
    energies, neurons = reg.energies(), [layer.read().detach().clone() for layer in reg.layers]
    assert not reg().requires_grad
    train(model, reg, 5)
    assert reg() == 0
    for layer, before in zip(reg.layers, neurons, strict=True):
        assert (layer.read() - before).norm() > 1e-3 * before.norm()  # the task moves the weights
        change = (reg.energies()[layer.name] - energies[layer.name]).abs() / energies[layer.name]
        # Only under rotation does the energy stay, to rounding.
        assert change < 1e-13 if name == "rotation" else change > 1e-9


# Resuming


@pytest.mark.parametrize(
    ("name", "redraw_every"), [*((name, "auto") for name in METHODS), *((name, 2) for name in with_basis())]
)
def test_resumed_run_has_the_same_bits(name: str, redraw_every: Any) -> None:
    model, reg = model_and_reg(name, redraw_every=redraw_every, seed=2**63 + 5)
    train(model, reg, 2)
    file = io.BytesIO()
    torch.save((model.state_dict(), reg.state_dict()), file)
    expected, expected_bases = train(model, reg, 5), bases(reg)

    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    torch.manual_seed(1234)
    other = small_cnn.small_cnn(seed=1)
    resumed = build(name, other, redraw_every=redraw_every)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert resumed.round == 2
    assert same_bits(expected, train(other, resumed, 5))
    assert same_bits(expected_bases, bases(resumed))
    assert same_bits(model.state_dict().values(), other.state_dict().values())


RESUME = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from small_cnn import bases, build, small_cnn, train
torch.manual_seed(77)
found = {}
for name, (weights, state) in torch.load(sys.argv[2], weights_only=True).items():
    model = small_cnn(seed=1)
    reg = build(name, model)
    model.load_state_dict(weights)
    reg.load_state_dict(state)
    found[name] = train(model, reg, 5), bases(reg)
torch.save(found, sys.argv[3])
"""


def test_new_process_resumes_with_the_same_bits(tmp_path: Path) -> None:
    saved, expected = {}, {}
    for name in METHODS:
        model, reg = model_and_reg(name, seed=11)
        train(model, reg, 3)
        saved[name] = copy.deepcopy((model.state_dict(), reg.state_dict()))
        expected[name] = train(model, reg, 5), bases(reg)
    torch.save(saved, tmp_path / "saved.pt")
    environment = {**small_cnn.environment(), "PYTHONPATH": str(LIBRARY), "PYTHONHASHSEED": "3"}
    command = [sys.executable, "-c", RESUME, str(HERE), str(tmp_path / "saved.pt"), str(tmp_path / "found.pt")]
    subprocess.run(command, check=True, env=environment)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    for name in METHODS:
        for ours, theirs in zip(expected[name], found[name], strict=True):
            assert same_bits(ours, theirs), name


@each_method_with_basis
def test_basis_changes_from_round_to_round_and_comes_back_on_resume(name: str) -> None:
    """A generator seeded anew at each draw never changes the basis: the paper's worst row."""
    _, reg = model_and_reg(name)
    families = [family for family in reg.plan.families if family.has_basis]
    changing = all(1 in (family.redraw_every, family.moves_every) for family in families)
    seen, states = [bases(reg)], [copy.deepcopy(reg.state_dict())]
    places = [t.data_ptr() for index in range(len(reg.plan.families)) for t in reg._bases.basis(index)]
    for _ in range(4):
        reg.advance()
        # In the same memory: a captured graph reads the new numbers.
        assert places == [t.data_ptr() for index in range(len(reg.plan.families)) for t in reg._bases.basis(index)]
        seen.append(bases(reg))
        states.append(copy.deepcopy(reg.state_dict()))
    if name == "g-comhe":  # runs of channels are no random basis
        assert all(same_bits(seen[0], other) for other in seen)
    elif changing:
        for earlier in range(5):
            for later in range(earlier):
                assert not any(torch.equal(a, b) for a, b in zip(seen[earlier], seen[later], strict=True) if a.ndim > 1)
    else:
        assert name in ("ap-comhe-alter", "learned-comhe")
        assert same_bits(seen[0], seen[4])
    for t, state in enumerate(states):
        _, resumed = model_and_reg(name, seed=9)
        resumed.load_state_dict(state)
        assert resumed.round == t
        assert same_bits(seen[t], bases(resumed))


def test_alternating_basis_moves_every_ten_rounds_and_is_redrawn() -> None:
    _, reg = model_and_reg("ap-comhe-alter", redraw_every=30)
    seen = []
    for _ in range(31):
        seen.append(bases(reg))
        reg.advance()
    changes = [t for t in range(1, 31) if not same_bits(seen[t], seen[t - 1])]
    assert changes == [10, 20, 30]
    fresh = model_and_reg("ap-comhe-alter", redraw_every=1)[1]
    fresh.advance()
    assert same_bits(seen[30], bases(fresh))  # the draw of epoch 1


# Compiling


def compiled_equals_eager(name: str, model: nn.Module, reg: comhe.Regularizer, backend: str, num_rounds: int) -> int:
    """Compiled and eager side by side over redraws and changes of weight; how many graphs were compiled."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(reg, fullgraph=True, backend=counter)
    labels = sorted({family.label for family in reg.plan.families})
    for round_ in range(num_rounds):
        value = compiled()
        if round_ % (num_rounds // 10) == 0:
            expected = reg()
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)
            for mine, wanted in zip(gradients(model, value).values(), gradients(model, expected).values(), strict=True):
                assert (mine is None) is (wanted is None)
                assert mine is None or (mine - wanted).norm() <= 1e-4 * wanted.norm() + 1e-9
        reg.advance(lr=0.1 / (1 + round_))
        with torch.no_grad():
            for parameter in weights_of(model):
                parameter *= 1.01
        for label in labels if not is_silent(name) else ():
            reg.set_weight(0.5 + round_ / num_rounds, label)
    return counter.frame_count


def two_layers() -> nn.Module:
    """A layer and a classifier: each layer more takes the compiler as long again."""
    model = nn.Sequential(nn.Linear(40, 9), nn.Linear(9, 5))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@each_method
def test_compiles_once(name: str) -> None:
    model = two_layers()
    reg = build(name, model)
    assert compiled_equals_eager(name, model, reg, "aot_eager", 30) == 1


def test_compiles_once_over_a_thousand_redraws_and_changes_of_weight() -> None:
    model = two_layers()
    reg = build("rp-comhe", model)
    assert compiled_equals_eager("rp-comhe", model, reg, "aot_eager", 1000) == 1
    assert reg.round == 1000


@pytest.mark.slow  # the C++ compiler takes up to a minute
@pytest.mark.parametrize("name", ["rp-comhe", "hs-mhe", "ap-comhe"])
def test_default_backend_compiles_once(name: str) -> None:
    model = two_layers()
    reg = build(name, model)
    # A cache would outlive changes of the library: its key knows nothing of how our operators are differentiated.
    with torch._inductor.config.patch(force_disable_caches=True):
        assert compiled_equals_eager(name, model, reg, "inductor", 1000 if name == "rp-comhe" else 30) == 1


# Precision


@each_method
def test_autocast_changes_no_bit(name: str) -> None:
    (model, reg), (other, casting) = model_and_reg(name), model_and_reg(name)
    for _ in range(2):
        plain = reg()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
            value = casting()
            grads = gradients(other, value)
        assert same_bits([plain], [value])
        for mine, wanted in zip(grads.values(), gradients(model, plain).values(), strict=True):
            assert (mine is None) is (wanted is None)
            assert mine is None or same_bits([mine], [wanted])
        reg.advance()
        with torch.autocast("cpu", torch.bfloat16):
            casting.advance()
        assert same_bits(bases(reg), bases(casting))


@each_method
def test_bfloat16_weights_are_computed_in_float32(name: str) -> None:
    model, reg = model_and_reg(name)
    model.bfloat16()
    reg.bfloat16()
    rounded, wide = model_and_reg(name)
    rounded.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
    for _ in range(2):
        value, expected = reg(), wide()
        assert value.dtype == torch.float32
        assert all(t.dtype == torch.float32 for t in bases(reg) if t.is_floating_point())
        if name == "rotation":
            assert torch.equal(value, expected)
        else:
            assert same_bits([value], [expected])
        reg.advance()
        wide.advance()
    assert same_bits(bases(reg), bases(wide))


@each_method
def test_build_before_or_after_double(name: str) -> None:
    before = small_cnn.small_cnn()
    early = build(name, before)
    before.double()
    after = small_cnn.small_cnn().double()
    late = build(name, after)
    # What the parametrizations start from is computed in the precision they find.
    after.load_state_dict(before.state_dict())
    for _ in range(3):
        value, expected = early(), late()
        assert same_bits([value], [expected])
        assert value.dtype == (torch.float32 if is_silent(name) else torch.float64)
        early.advance()
        late.advance()
        assert same_bits(bases(early), bases(late))


# Following the model


@each_method
def test_deepcopy_is_a_pair_of_its_own(name: str) -> None:
    model, reg = model_and_reg(name)
    train(model, reg, 1)
    other, copied = copy.deepcopy((model, reg))
    assert same_bits(train(model, reg, 2), train(other, copied, 2))
    before = copy.deepcopy((model.state_dict(), bases(reg)))
    value = reg().detach().clone()
    train(other, copied, 2)
    assert same_bits(model.state_dict().values(), before[0].values())
    assert same_bits(bases(reg), before[1])
    assert torch.equal(reg(), value)
    assert (reg.round, copied.round) == (3, 5)
    assert is_silent(name) or not torch.equal(copied(), value)


@each_method
def test_assigned_state_is_followed(name: str) -> None:
    model, reg = model_and_reg(name)
    source, expected = small_cnn.small_cnn(seed=3), small_cnn.small_cnn(seed=3)
    build(name, source)
    fresh = build(name, expected)
    model.load_state_dict(copy.deepcopy(source.state_dict()), assign=True)
    fresh_value = fresh()
    assert same_bits([reg()], [fresh_value])
    assert same_bits(train(model, reg, 2), train(expected, fresh, 2))


@each_method
def test_state_of_a_wrapped_model_loads_into_the_plain_one(name: str) -> None:
    model = small_cnn.small_cnn()
    wrapped = torch.compile(checkpoint_wrapper(model))
    reg = build(name, wrapped)
    assert "_orig_mod._checkpoint_wrapped_module.fc" in dict(wrapped.named_modules())
    train(model, reg, 2)
    weights, state = copy.deepcopy((model.state_dict(), reg.state_dict()))
    plain, resumed = model_and_reg(name, seed=5)
    assert [layer.name for layer in reg.layers] == [layer.name for layer in resumed.layers]
    plain.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert same_bits(train(model, reg, 1), train(plain, resumed, 1))
    # And back.
    reg.load_state_dict(copy.deepcopy(resumed.state_dict()))
    assert same_bits([reg()], [resumed()])


@each_method
def test_other_layers_are_reported_by_name(name: str) -> None:
    _, reg = model_and_reg(name)
    state = copy.deepcopy(reg.state_dict())
    fewer = build(name, small_cnn.small_cnn(), exclude="fc")
    before = bases(fewer)
    with pytest.raises(ValueError, match=r"fc.* is missing here"):
        fewer.load_state_dict(state)
    assert fewer.round == 0
    assert same_bits(before, bases(fewer))
    with pytest.raises(ValueError, match=r"fc.* is not in the saved state"):
        reg.load_state_dict(fewer.state_dict())


def test_other_sharing_is_reported_by_name() -> None:
    _, reg = model_and_reg("rp-comhe")
    _, apart = model_and_reg("rp-comhe", shared=False)
    with pytest.raises(ValueError, match=r"conv2 had basis hidden/72 and has hidden/72/conv2"):
        apart.load_state_dict(reg.state_dict())
