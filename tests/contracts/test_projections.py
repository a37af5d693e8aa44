"""What every projection promises. They are found in the folder: a file added there is tested at once."""

from __future__ import annotations

import copy
import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from small_cnn import same_bits
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.overrides import TorchFunctionMode

import comhe
from comhe.energies import Energy
from comhe.projections import REGISTRY, Basis, Projection
from comhe.random import Stream

ENERGY = Energy(half_space=True)
LR = 0.1
DIM = 4


@dataclass(frozen=True)
class FakeLayer:
    """A layer as a projection knows it, and how many separate sets of neurons it has."""

    name: str
    num_neurons: int
    fan_in: int
    taps: int = 1
    num_sets: int = 0

    def neurons(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        sets = (self.num_sets,) if self.num_sets else ()
        # Lengths far from 1 and from each other: nothing may rest on unit neurons.
        neurons = torch.randn(*sets, self.num_neurons, self.fan_in, generator=generator, dtype=torch.float64)
        lengths = torch.linspace(-1, 1, self.num_neurons, dtype=torch.float64).exp2()
        return (neurons * lengths.unsqueeze(-1)).to(dtype)


# Channel counts no multiple of 8, fan-ins no power of two.
LAYERS = (
    FakeLayer("plain", 7, 11),
    FakeLayer("convolution", 6, 33, taps=3),
    FakeLayer("grouped", 5, 22, taps=2, num_sets=2),
)


def choices(annotation: Any, value: Any) -> Iterator[Any]:
    """Other values that a setting may take, told from its type and the value it has."""
    if typing.get_origin(annotation) is Literal:
        yield from typing.get_args(annotation)
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from choices(part, value)
    elif annotation is int:
        yield from (max(1, value // 2), value + 1)
    else:
        yield from {bool: (False, True), float: (0.05,), type(None): (None,)}.get(annotation, ())


def variants(cls: type[Projection]) -> Iterator[Projection]:
    """The class with its own settings but a small `dim`, and with each other setting changed in turn."""
    names = [f.name for f in dataclasses.fields(cls)]
    annotations = typing.get_type_hints(cls)
    small = {"dim": DIM} if "dim" in names else {}
    base = cls(**small)
    yield base
    for name in names:
        if name != "dim":
            value = getattr(base, name)
            for other in choices(annotations[name], value):
                if other != value:
                    yield cls(**small, **{name: other})


def label(projection: Projection) -> str:
    base = type(projection)()
    changed = [
        f"{f.name}={getattr(projection, f.name)}"
        for f in dataclasses.fields(projection)
        if f.name != "dim" and getattr(projection, f.name) != getattr(base, f.name)
    ]
    return "-".join([type(projection).__name__, *changed])


BASES = [next(variants(cls)) for cls in REGISTRY.values()]
VARIANTS = [projection for cls in REGISTRY.values() for projection in variants(cls)]

each_class = pytest.mark.parametrize("cls", REGISTRY.values(), ids=REGISTRY)
each_base = pytest.mark.parametrize("projection", BASES, ids=map(label, BASES))
each_variant = pytest.mark.parametrize("projection", VARIANTS, ids=map(label, VARIANTS))
each_layer = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)


class CountingStream(Stream):
    """A stream that knows whether it was read."""

    was_read = False

    def _blocks(self, count: int) -> Tensor:
        self.was_read = True
        return super()._blocks(count)


def draw(projection: Projection, layer: FakeLayer, seed: int = 0, epoch: int = 0) -> Basis:
    """A basis as the regularizer keeps it beside float64 weights."""
    drawn = projection.draw(layer, Stream(seed, layer.name, epoch))
    return tuple(t.double() if t.is_floating_point() else t for t in drawn)


def rate(neurons: Tensor, value: float = LR) -> Tensor:
    return torch.tensor(value, dtype=neurons.dtype)


def energy_of(projection: Projection, neurons: Tensor, basis: Basis, energy: Energy = ENERGY) -> Tensor:
    """The energy of a layer as the regularizer has it with `aggregate="mean"`."""
    basis = projection.refine(basis, [neurons], energy, rate(neurons))
    views = projection.views(neurons, basis)
    shares = projection.shares(basis)
    assert len(views) == len(shares)
    return sum(share * energy(view).mean() for share, view in zip(shares, views, strict=True))


def close(value: Tensor, other: Tensor, rtol: float = 1e-12) -> bool:
    return torch.allclose(value, other, rtol=rtol, atol=0)


def random_lengths(layer: FakeLayer) -> Tensor:
    """A positive factor for each neuron, no two alike."""
    generator = torch.Generator().manual_seed(5)
    sets = (layer.num_sets,) if layer.num_sets else ()
    return (4 * torch.rand(*sets, layer.num_neurons, 1, generator=generator, dtype=torch.float64) - 2).exp()


# Drawing


@each_class
def test_default_settings_make_a_projection(cls: type[Projection]) -> None:
    projection = cls()
    assert projection == cls()
    assert hash(projection) == hash(cls())
    with pytest.raises(dataclasses.FrozenInstanceError):
        projection.dim = 3


@each_class
def test_all_but_the_first_settings_are_given_by_name(cls: type[Projection]) -> None:
    """A value in the wrong place would silently be another setting."""
    positional = [f.name for f in dataclasses.fields(cls) if not f.kw_only]
    assert positional in (["dim", "num_views"], ["channels"], [])
    with pytest.raises(TypeError):
        cls(*[4] * (len(positional) + 1))


@each_layer
@each_variant
def test_basis_is_a_function_of_seed_key_and_epoch(projection: Projection, layer: FakeLayer) -> None:
    stream = CountingStream(3, "key", 1)
    basis = projection.draw(layer, stream)
    assert same_bits(basis, projection.draw(layer, Stream(3, "key", 1)))
    if stream.was_read:
        for other in (Stream(3, "key", 2), Stream(4, "key", 1), Stream(3, "yek", 1)):
            again = projection.draw(layer, other)
            assert not any(torch.equal(a, b) for a, b in zip(basis, again, strict=True))


@each_base
def test_drawing_leaves_the_global_generator_alone(projection: Projection) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = projection.draw(LAYERS[0], Stream(0, "key"))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert same_bits(first, projection.draw(LAYERS[0], Stream(0, "key")))


@each_variant
def test_basis_and_views_are_on_the_device_of_the_stream(projection: Projection) -> None:
    for layer in LAYERS:
        basis = projection.draw(layer, Stream(0, "key", 0, "meta"))
        assert all(t.device.type == "meta" for t in basis)
        views = projection.views(layer.neurons(dtype=torch.float32).to("meta"), basis)
        assert all(view.device.type == "meta" for view in views)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@each_base
def test_basis_numbers_follow_the_weights(projection: Projection, dtype: torch.dtype) -> None:
    model = nn.Linear(11, 6).to(dtype)
    reg = comhe.Regularizer(model, projection, lr=LR)
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    for _ in range(2):
        floats = [t for t in reg._bases.basis(0) if t.is_floating_point()]
        assert all(t.dtype == wanted for t in floats)
        assert reg().dtype == wanted
        reg.advance()


@each_variant
def test_layers_of_equal_keys_can_share_a_basis(projection: Projection) -> None:
    many = [
        FakeLayer("layer", num_neurons, fan_in, taps)
        for num_neurons in (5, 7)
        for fan_in in (22, 33)
        for taps in (1, 11)
    ]
    for one in many:
        basis = draw(projection, one)
        assert isinstance(hash(projection.basis_key(one)), int)
        for other in many:
            if projection.basis_key(one) == projection.basis_key(other):
                same = draw(projection, other)
                assert [t.shape for t in same] == [t.shape for t in basis]
                assert same_bits(same, basis)
                if one.fan_in == other.fan_in:
                    assert energy_of(projection, other.neurons(), basis).isfinite()


# Views


@each_layer
@each_variant
def test_views_are_point_sets(projection: Projection, layer: FakeLayer) -> None:
    neurons = layer.neurons()
    basis = draw(projection, layer)
    views = projection.views(neurons, basis)
    assert len(views) == len(projection.shares(basis)) >= 1
    for view in views:
        assert view.ndim == neurons.ndim + 1
        assert view.shape[:-3] == neurons.shape[:-2]
        assert view.dtype == torch.float64
        assert view.isfinite().all()
    # Neither more than each set by itself, nor mixed up with another one.
    if layer.num_sets:
        for index in range(layer.num_sets):
            alone = projection.views(neurons[index], basis)
            assert all(close(view[index], one) for view, one in zip(views, alone, strict=True))


@each_layer
@each_variant
def test_maps_equal_views(projection: Projection, layer: FakeLayer) -> None:
    neurons, basis = layer.neurons(), draw(projection, layer)
    maps = projection.maps(basis)
    if maps is None:
        assert projection.shares(basis) == (1.0,)
        return
    assert projection.shares(basis) == tuple(m.share for m in maps)
    for view, m in zip(projection.views(neurons, basis), maps, strict=True):
        torch.testing.assert_close(m(neurons), view, rtol=1e-12, atol=1e-12)
        # The map by its definition, without any code of the library.
        columns = torch.arange(layer.fan_in).unsqueeze(0) if m.columns is None else m.columns
        kept = torch.stack([neurons[..., c] for c in columns], dim=-3)
        right = kept if m.right is None else kept @ m.right.double().transpose(-1, -2)
        dense = right if m.left is None else m.left.double() @ right
        torch.testing.assert_close(view, dense, rtol=1e-12, atol=1e-12)


@each_base
def test_single_precision_agrees_with_double(projection: Projection) -> None:
    for layer in LAYERS:
        narrow = tuple(t.float() if t.is_floating_point() else t for t in draw(projection, layer))
        wide = tuple(t.double() if t.is_floating_point() else t for t in narrow)
        neurons = layer.neurons(dtype=torch.float32)
        value = energy_of(projection, neurons, narrow)
        assert value.dtype == torch.float32
        assert close(value.double(), energy_of(projection, neurons.double(), wide), rtol=1e-5)


# Scale


@each_layer
@each_variant
def test_scale_invariance_is_what_is_declared(projection: Projection, layer: FakeLayer) -> None:
    neurons, basis = layer.neurons(), draw(projection, layer)
    before = energy_of(projection, neurons, basis)
    together = energy_of(projection, 3.7 * neurons, basis)
    apart = energy_of(projection, random_lengths(layer) * neurons, basis)
    declared = projection.scale_invariance
    assert declared in ("neuron", "global", "none")
    # Only rounding where it is invariant, a change that can be seen where it is not.
    assert close(together, before) if declared != "none" else not close(together, before, rtol=1e-6)
    assert close(apart, before) if declared == "neuron" else not close(apart, before, rtol=1e-6)


@each_variant
def test_scale_invariance_holds_for_moved_bases(projection: Projection) -> None:
    layer = LAYERS[0]
    neurons, basis = layer.neurons(), draw(projection, layer)
    factor = {"neuron": random_lengths(layer), "global": 3.7, "none": 1.0}[projection.scale_invariance]
    moved = projection.advance(basis, [neurons], ENERGY, rate(neurons))
    scaled = projection.advance(basis, [factor * neurons], ENERGY, rate(neurons))
    for one, other in zip(moved, scaled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# Gradients


@each_layer
@each_variant
def test_gradient_is_that_of_the_energy(projection: Projection, layer: FakeLayer) -> None:
    """In the neurons and in the basis, through the unrolled steps."""
    drawn = draw(projection, layer)
    floats = [index for index, t in enumerate(drawn) if t.is_floating_point()]

    def value(neurons: Tensor, *parts: Tensor) -> Tensor:
        basis = list(drawn)
        for index, part in zip(floats, parts, strict=True):
            basis[index] = part
        return energy_of(projection, neurons, tuple(basis))

    inputs = [layer.neurons(), *(drawn[index] for index in floats)]
    inputs = [t.clone().requires_grad_() for t in inputs]
    # In random directions: one number for each input tensor, not one for each of its entries.
    assert gradcheck(value, inputs, eps=1e-6, atol=1e-6, rtol=1e-5, fast_mode=True)
    (gradient,) = torch.autograd.grad(value(*inputs), inputs[0])
    assert gradient.norm() > 1e-6


@each_variant
def test_unrolled_steps_can_be_differentiated_twice(projection: Projection) -> None:
    if type(projection).refine is Projection.refine:
        assert projection.refine((), [], ENERGY, rate(torch.zeros(1))) == ()
        return
    layer = FakeLayer("tiny", 4, 5)
    basis = draw(projection, layer)

    def refined(neurons: Tensor, matrix: Tensor) -> Tensor:
        return projection.refine((matrix,), [neurons], ENERGY, rate(neurons))[0]

    inputs = (layer.neurons().requires_grad_(), basis[0].clone().requires_grad_())
    assert gradcheck(refined, inputs, atol=1e-6, rtol=1e-5, fast_mode=True)
    assert gradgradcheck(refined, inputs, atol=1e-5, rtol=1e-4, fast_mode=True)


# Purity


class NoGlobalRandomness(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not getattr(func, "__name__", "").startswith(("rand", "normal", "bernoulli", "multinomial"))
        return func(*args, **(kwargs or {}))


@each_variant
def test_methods_are_pure(projection: Projection) -> None:
    for layer in LAYERS:
        neurons, basis = layer.neurons(), draw(projection, layer)
        inputs = [neurons, *basis]
        copies = [t.clone() for t in inputs]
        versions = [t._version for t in inputs]
        results = []
        with NoGlobalRandomness():
            for _ in range(2):
                moved = projection.advance(basis, [neurons], ENERGY, rate(neurons))
                refined = projection.refine(basis, [neurons], ENERGY, rate(neurons))
                views = projection.views(neurons, refined)
                results.append([*moved, *refined, *views])
        assert same_bits(*results)
        assert same_bits(inputs, copies)
        assert [t._version for t in inputs] == versions
        assert [t.shape for t in moved] == [t.shape for t in refined] == [t.shape for t in basis]
        assert [t.dtype for t in moved] == [t.dtype for t in refined] == [t.dtype for t in basis]


@each_variant
def test_only_what_it_declares_moves_a_basis(projection: Projection) -> None:
    layer = LAYERS[0]
    neurons, basis = layer.neurons(), draw(projection, layer)
    slow = projection.advance(basis, [neurons], ENERGY, rate(neurons))
    fast = projection.advance(basis, [neurons], ENERGY, rate(neurons, 2 * LR))
    if projection.advance_every is None:
        assert same_bits(slow, basis)
    else:
        assert not same_bits(slow, basis)
        assert all(t.isfinite().all() for t in slow)
    assert same_bits(slow, fast) is not projection.uses_lr


@each_variant
def test_a_shared_basis_sees_every_layer(projection: Projection) -> None:
    """Moved and unrolled steps depend on all layers that share the basis, whatever their order."""
    one, other = FakeLayer("one", 7, 11), FakeLayer("other", 5, 11)
    if projection.basis_key(one) != projection.basis_key(other):
        other = one
    neurons, basis = [one.neurons(), other.neurons(seed=1)], draw(projection, one)
    for step in (projection.advance, projection.refine):
        both = step(basis, neurons, ENERGY, rate(neurons[0]))
        swapped = step(basis, neurons[::-1], ENERGY, rate(neurons[0]))
        for a, b in zip(both, swapped, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        first = step(basis, neurons[:1], ENERGY, rate(neurons[0]))
        if not same_bits(first, basis):
            assert not any(torch.equal(a, b) for a, b in zip(both, first, strict=True))


# Edges


def one_neuron(neurons: Tensor) -> Tensor:
    return neurons[:1].clone()


def zero_neuron(neurons: Tensor) -> Tensor:
    return torch.cat([neurons, torch.zeros_like(neurons[:1])])


def duplicates(neurons: Tensor) -> Tensor:
    return torch.cat([neurons, neurons[:2], 2 * neurons[2:3]])


def antipodes(neurons: Tensor) -> Tensor:
    return torch.cat([neurons, -neurons[:2]])


def all_zero(neurons: Tensor) -> Tensor:
    return torch.zeros_like(neurons)


def huge_and_tiny(neurons: Tensor) -> Tensor:
    return torch.cat([1e15 * neurons[:2], 1e-15 * neurons[2:]])


EDGES = (one_neuron, zero_neuron, duplicates, antipodes, all_zero, huge_and_tiny)


def check_finite(projection: Projection, edge: Any, dtype: torch.dtype) -> None:
    """Through the unrolled step, and again after the basis has moved."""
    start = edge(LAYERS[0].neurons(dtype=dtype))
    layer = FakeLayer("edge", start.shape[-2], start.shape[-1])
    basis = tuple(t.to(dtype) if t.is_floating_point() else t for t in draw(projection, layer))
    neurons = start.clone().requires_grad_()
    for _ in range(2):
        value = energy_of(projection, neurons, basis)
        (gradient,) = torch.autograd.grad(value, neurons)
        assert value.isfinite()
        assert gradient.isfinite().all()
        basis = projection.advance(basis, [start], ENERGY, rate(start))
        assert all(t.isfinite().all() for t in basis if t.is_floating_point())


@pytest.mark.parametrize("edge", EDGES)
@each_variant
def test_value_gradient_and_steps_are_finite(projection: Projection, edge: Any) -> None:
    check_finite(projection, edge, torch.float32)


@pytest.mark.parametrize("edge", EDGES)
@each_base
def test_value_gradient_and_steps_are_finite_in_double_precision(projection: Projection, edge: Any) -> None:
    check_finite(projection, edge, torch.float64)


def with_close_pairs(neurons: Tensor) -> Tensor:
    """The first neuron has another one 1e-3 from it, the third one 1e-3 from its antipode, both of other lengths."""
    generator = torch.Generator().manual_seed(8)
    for index, factor in ((0, 2.0), (2, -3.0)):
        center = neurons[..., index, :]
        aside = torch.randn(center.shape, generator=generator, dtype=torch.float64)
        aside = aside * (center.norm(dim=-1, keepdim=True) / aside.norm(dim=-1, keepdim=True))
        neurons[..., index + 1, :] = factor * (center + 1e-3 * aside)
    return neurons


def loss_and_gradients(model: nn.Module, projection: Projection) -> list[Tensor]:
    """Of a regularizer in its third round, in float64.

    Steps are small, as large ones multiply any rounding on their way. Eight dimensions, as in four of them pairs 1e-3
    apart may come within 1e-4 of each other, where float32 goes on as a straight line.
    """
    if getattr(projection, "step_size", None):
        projection = dataclasses.replace(projection, step_size=SMALL_STEP)
    if hasattr(projection, "dim"):
        projection = dataclasses.replace(projection, dim=8)
    reg = comhe.Regularizer(model, projection, lr=SMALL_STEP)
    for _ in range(2):
        reg.advance()
    value = reg()
    return [t.detach().double() for t in (value, *torch.autograd.grad(value, list(model.parameters())))]


SMALL_STEP = 1e-6


def layers_of(neurons: Tensor) -> nn.Module:
    """A linear layer, or a convolution whose groups are the sets of neurons."""
    if neurons.ndim == 2:
        model: nn.Module = nn.Linear(*neurons.shape[::-1], bias=False)
    else:
        sets, count, fan_in = neurons.shape
        model = nn.Conv1d(sets * fan_in // 2, sets * count, 2, groups=sets, bias=False)
    model.weight = nn.Parameter(neurons.reshape(model.weight.shape))
    return model


@pytest.mark.parametrize("num_sets", [0, 2])
@each_variant
def test_close_pairs_keep_their_digits_in_single_precision(projection: Projection, num_sets: int) -> None:
    """The loss and its gradient, through unrolled steps and moved bases: 1e-5 of those in double precision."""
    neurons = with_close_pairs(FakeLayer("close", 8, 24, num_sets=num_sets).neurons()).float()
    value, gradient = loss_and_gradients(layers_of(neurons), projection)
    expected, of_expected = loss_and_gradients(layers_of(neurons.double()), projection)
    assert close(value, expected, rtol=1e-5)
    assert (gradient - of_expected).norm() < 1e-5 * of_expected.norm()


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**100])  # about 1e-30 and 1e30, and exact
@each_variant
def test_huge_and_tiny_weights_in_single_precision(projection: Projection, factor: float) -> None:
    """All of them, and where the projection allows it single neurons: the energy stays, the gradient is 1 / factor."""
    neurons = FakeLayer("scaled", 8, 24).neurons().float()
    expected, of_expected = loss_and_gradients(layers_of(neurons), projection)
    factors = [torch.full((8, 1), factor)]
    if projection.scale_invariance == "neuron":
        factors.append(torch.tensor([[factor], [1.0]]).repeat(4, 1))
    for scale in factors if projection.scale_invariance != "none" else []:
        value, gradient = loss_and_gradients(layers_of(scale * neurons), projection)
        assert close(value, expected, rtol=1e-5)
        assert (scale * gradient - of_expected).norm() < 1e-5 * of_expected.norm()


@each_base
def test_one_input_and_one_neuron_are_served(projection: Projection) -> None:
    cls = type(projection)
    small = cls(dim=1) if hasattr(projection, "dim") else cls()
    reg = comhe.Regularizer(nn.Linear(1, 1), small, include="weight", lr=LR)
    value = reg()
    value.backward()
    reg.advance()
    assert math.isfinite(value.item())


# In the regularizer


@each_class
def test_dim_above_the_fan_in_is_refused(cls: type[Projection]) -> None:
    if not hasattr(cls, "dim"):
        assert "dim" not in {f.name for f in dataclasses.fields(cls)}
        return
    model = nn.Sequential()
    model.add_module("wide", nn.Linear(40, 13))
    model.add_module("narrow", nn.Linear(12, 20))
    with pytest.raises(ValueError, match=r"narrow.*dim=13.*fan-in 12.*choose a smaller dim.*Identity"):
        comhe.Regularizer(model, cls(dim=13), lr=LR)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert comhe.Regularizer(model, cls(dim=12), lr=LR)().isfinite()


@each_variant
def test_counts_below_one_are_refused(projection: Projection) -> None:
    names = [
        name
        for name, annotation in typing.get_type_hints(type(projection)).items()
        if annotation is int and name in {f.name for f in dataclasses.fields(projection)}
    ]
    for name in names:
        with pytest.raises(ValueError, match=rf"{name}=0: choose at least 1"):
            dataclasses.replace(projection, **{name: 0})


def two_layers(seed: int) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def rounds(model: nn.Module, reg: comhe.Regularizer, count: int) -> list[Tensor]:
    losses = []
    for _ in range(count):
        losses.append(reg())
        learned = [p for p in (*model.parameters(), *reg.parameters()) if p.ndim > 1]
        gradients = torch.autograd.grad(losses[-1], learned)
        with torch.no_grad():
            for parameter, gradient in zip(learned, gradients, strict=True):
                parameter -= 0.01 * gradient
        reg.advance()
    return losses


def check_resumed(projection: Projection, redraw_every: Any) -> None:
    model = two_layers(0)
    reg = comhe.Regularizer(model, projection, lr=LR, seed=7, redraw_every=redraw_every)
    rounds(model, reg, 3)
    saved = copy.deepcopy((model.state_dict(), reg.state_dict()))
    expected = rounds(model, reg, 3)

    torch.manual_seed(99)
    other = two_layers(1)
    resumed = comhe.Regularizer(other, projection, lr=LR, redraw_every=redraw_every)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert same_bits(expected, rounds(other, resumed, 3))


@each_variant
def test_resumed_run_has_the_same_bits(projection: Projection) -> None:
    check_resumed(projection, "auto")


@pytest.mark.parametrize("redraw_every", [2, None])
@each_base
def test_resumed_run_has_the_same_bits_in_the_middle_of_a_period(projection: Projection, redraw_every: Any) -> None:
    check_resumed(projection, redraw_every)


@each_base
def test_compiles_once_over_many_redraws(projection: Projection) -> None:
    model = nn.Linear(11, 6)
    with torch.no_grad():
        model.weight.copy_(FakeLayer("layer", 6, 11).neurons())
    reg = comhe.Regularizer(model, projection, lr=LR, redraw_every=2)
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(reg, fullgraph=True, backend=backend)
    values = []
    for round_ in range(10):
        value, expected = compiled(), reg()
        gradient, wanted = (torch.autograd.grad(v, model.weight)[0] for v in (value, expected))
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=0)
        assert (gradient - wanted).norm() <= 1e-4 * wanted.norm()
        values.append(value.item())
        reg.advance()
        reg.set_weight(1.1 + round_ / 10)
    assert backend.frame_count == 1
    assert len(set(values)) == 10
