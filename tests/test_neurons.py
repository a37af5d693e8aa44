"""How each kind of layer holds its neurons: checked against what its forward pass does with them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from comhe.discovery import discover
from comhe.energies import energy
from comhe.neurons import Layer


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(module: nn.Module) -> nn.Module:
    """The module in float64, every parameter drawn anew, so that no entry is zero or equal to another."""
    module = module.double()
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=100 + index))
    return module


# Layers of libraries that are not installed here, and of one's own.


class GraphConvolution(nn.Module):
    """Kipf's layer: the weight is [in, out]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(in_features, out_features))

    def forward(self, x: Tensor) -> Tensor:
        return normal(5, 5, seed=7) @ (x @ self.weight)


class Conv1D(nn.Module):
    """As in transformers, for GPT-2: a linear layer stored transposed."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.empty(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class OwnLinear(nn.Module):
    """Stored as torch does, but no subclass of nn.Linear."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Experts(nn.Module):
    """All experts in one parameter [E, N, D]."""

    def __init__(self, num_experts: int, num_neurons: int, fan_in: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(num_experts, num_neurons, fan_in))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("end,bd->ben", self.up, x).flatten(1)


class Table(nn.Module):
    """A raw parameter whose rows are neurons."""

    def __init__(self, num_neurons: int, fan_in: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.empty(num_neurons, fan_in))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.codes.T


class Bags(nn.EmbeddingBag):
    """One token a bag."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, torch.arange(len(x)))


def channels_last(module: nn.Module) -> nn.Module:
    return module.to(memory_format=torch.channels_last)


# Each output unit must be fed by exactly one neuron.


class Case(NamedTuple):
    module: Callable[[], nn.Module]
    inputs: Tensor
    shape: tuple[int, ...]  # of the neurons
    taps: int = 1
    units: int = 1  # the dimension of the output that counts units
    options: dict = {}  # noqa: RUF012


IMAGE, LINE, BOX = normal(2, 6, 7, 7), normal(2, 6, 9), normal(1, 4, 5, 5, 5)
CASES = {
    "linear": Case(lambda: nn.Linear(4, 3), normal(5, 4), (3, 4)),
    "linear, square": Case(lambda: nn.Linear(4, 4), normal(5, 4), (4, 4)),
    "bilinear": Case(lambda: FixedPartner(nn.Bilinear(4, 2, 3), normal(5, 2, seed=1)), normal(5, 4), (3, 8)),
    "conv 1d": Case(lambda: nn.Conv1d(6, 5, 3), LINE, (5, 18), 3),
    "conv 2d": Case(lambda: nn.Conv2d(6, 5, (3, 2), stride=2, padding=1), IMAGE, (5, 36), 6),
    "conv 2d, channels last": Case(lambda: channels_last(nn.Conv2d(6, 5, 3)), IMAGE, (5, 54), 9),
    "conv 2d, 1 x 1": Case(lambda: nn.Conv2d(6, 6, 1), IMAGE, (6, 6), 1),
    "conv 3d": Case(lambda: nn.Conv3d(4, 3, 2), BOX, (3, 32), 8),
    "conv 1d, grouped": Case(lambda: nn.Conv1d(6, 4, 3, groups=2), LINE, (2, 2, 9), 3),
    "conv 2d, grouped": Case(lambda: nn.Conv2d(6, 9, 3, groups=3), IMAGE, (3, 3, 18), 9),
    "conv 2d, grouped, channels last": Case(lambda: channels_last(nn.Conv2d(6, 9, 3, groups=3)), IMAGE, (3, 3, 18), 9),
    "conv 3d, grouped": Case(lambda: nn.Conv3d(4, 6, 2, groups=2), BOX, (2, 3, 16), 8),
    "conv 2d, depthwise": Case(lambda: nn.Conv2d(6, 6, 3, groups=6), IMAGE, (6, 9), 9, options={"include": "layer"}),
    "conv 2d, depthwise, two filters a channel": Case(lambda: nn.Conv2d(6, 12, 3, groups=6), IMAGE, (6, 2, 9), 9),
    "transposed 1d": Case(lambda: nn.ConvTranspose1d(6, 5, 3), LINE, (5, 18), 3),
    "transposed 2d": Case(lambda: nn.ConvTranspose2d(6, 5, (3, 2), stride=2), IMAGE, (5, 36), 6),
    "transposed 2d, channels last": Case(lambda: channels_last(nn.ConvTranspose2d(6, 5, 3)), IMAGE, (5, 54), 9),
    "transposed 3d": Case(lambda: nn.ConvTranspose3d(4, 3, 2), BOX, (3, 32), 8),
    "transposed 1d, grouped": Case(lambda: nn.ConvTranspose1d(6, 4, 3, groups=2), LINE, (2, 2, 9), 3),
    "transposed 2d, grouped": Case(lambda: nn.ConvTranspose2d(6, 9, 3, groups=3), IMAGE, (3, 3, 18), 9),
    "transposed 2d, grouped, channels last": Case(
        lambda: channels_last(nn.ConvTranspose2d(6, 9, 3, groups=3)), IMAGE, (3, 3, 18), 9
    ),
    "transposed 3d, grouped": Case(lambda: nn.ConvTranspose3d(4, 6, 2, groups=2), BOX, (2, 3, 16), 8),
    "transposed 2d, depthwise": Case(
        lambda: nn.ConvTranspose2d(6, 6, 3, groups=6), IMAGE, (6, 9), 9, options={"include": "layer"}
    ),
    "embedding": Case(lambda: nn.Embedding(5, 3), torch.arange(5), (5, 3), units=0),
    "embedding bag": Case(lambda: Bags(5, 3), torch.arange(5), (5, 3), units=0),
    "graph convolution, [in, out]": Case(lambda: GraphConvolution(4, 3), normal(5, 4), (3, 4)),
    "graph convolution, square": Case(
        lambda: GraphConvolution(4, 4), normal(5, 4), (4, 4), options={"columns": "layer"}
    ),
    "Conv1D of transformers": Case(lambda: Conv1D(nf=3, nx=4), normal(5, 4), (3, 4)),
    "Conv1D of transformers, square": Case(
        lambda: Conv1D(nf=4, nx=4), normal(5, 4), (4, 4), options={"columns": ["lay*"]}
    ),
    "a linear layer of one's own": Case(lambda: OwnLinear(4, 3), normal(5, 4), (3, 4)),
    "experts": Case(lambda: Experts(2, 3, 4), normal(5, 4), (2, 3, 4), options={"include": "layer.up"}),
    "a raw parameter": Case(lambda: Table(3, 4), normal(5, 4), (3, 4), options={"include": "layer.codes"}),
}


class FixedPartner(nn.Bilinear):
    """A bilinear layer whose second input is fixed."""

    def __init__(self, module: nn.Bilinear, partner: Tensor) -> None:
        super().__init__(module.in1_features, module.in2_features, module.out_features)
        self.partner = partner

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, self.partner)


def only_layer(module: nn.Module, **options: object) -> Layer:
    (layer,) = discover(nn.ModuleDict({"layer": module}), **options)
    return layer


def labels(layer: Layer) -> Tensor:
    """The neurons with each weight's flat index in place of its value."""
    weight = getattr(layer.module, layer.parameter)
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(torch.arange(weight.numel()).view(weight.shape))
        found = layer.read().detach().long().clone()
        weight.copy_(kept)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_neuron_is_what_feeds_one_unit(name: str) -> None:
    case = CASES[name]
    layer = only_layer(randomised(case.module()), **case.options)
    assert tuple(layer.read().shape) == case.shape
    assert (layer.num_neurons, layer.fan_in) == case.shape[-2:]
    assert layer.num_groups == math.prod(case.shape[:-2])
    assert layer.taps == case.taps

    neurons = labels(layer).flatten(0, -2)  # a neuron a row, whatever group it is in
    outputs = layer.module(case.inputs).movedim(case.units, 0)
    weight = getattr(layer.module, layer.parameter)
    assert len(neurons) == len(outputs)
    for i in range(len(outputs)):
        # The sum with random weights: of a padded or strided layer every tap is used somewhere.
        (gradient,) = torch.autograd.grad(
            (outputs[i] * normal(*outputs[i].shape, seed=i)).sum(), weight, retain_graph=True
        )
        feeding = gradient.flatten().nonzero().flatten()
        assert neurons[i].sort().values.tolist() == feeding.tolist()


@pytest.mark.parametrize("name", CASES)
def test_moving_a_neuron_moves_one_unit(name: str) -> None:
    case = CASES[name]
    layer = only_layer(randomised(case.module()), **case.options)
    neurons = labels(layer).flatten(0, -2)
    weight = getattr(layer.module, layer.parameter)
    with torch.no_grad():
        before = layer.module(case.inputs).movedim(case.units, 0).flatten(1)
        kept = weight.clone()
        for i in range(len(neurons)):
            moved = kept.flatten().clone()
            moved[neurons[i]] += 1
            weight.copy_(moved.view(weight.shape))
            after = layer.module(case.inputs).movedim(case.units, 0).flatten(1)
            assert (before != after).any(dim=-1).nonzero().flatten().tolist() == [i]


@pytest.mark.parametrize("name", CASES)
def test_reads_are_differentiable(name: str) -> None:
    case = CASES[name]
    layer = only_layer(randomised(case.module()), **case.options)
    (leaf,) = layer.leaves()
    assert leaf is getattr(layer.module, layer.parameter)
    assert (layer.device, layer.dtype) == (leaf.device, leaf.dtype)
    neurons = layer.read()
    (gradient,) = torch.autograd.grad(neurons, leaf, labels(layer).double())
    assert torch.equal(gradient.flatten(), torch.arange(leaf.numel()).double())


def test_taps_are_runs_of_the_neuron() -> None:
    """Weights of one input channel lie side by side: what the group projection counts on."""
    for module, channels in ((nn.Conv2d(6, 5, 3), 6), (nn.ConvTranspose2d(6, 9, 3, groups=3), 2)):
        layer = only_layer(module)
        transposed = isinstance(module, nn.ConvTranspose2d)
        by_channel = labels(layer).unflatten(-1, (channels, layer.taps)) // 9
        for neuron, row in enumerate(by_channel.flatten(0, -3)):
            for channel in row:
                assert len(set(channel.tolist())) == 1  # one kernel
            kernels = row[:, 0].tolist()
            if transposed:
                group = neuron // 3
                assert kernels == [(2 * group + i) * 3 + neuron % 3 for i in range(2)]
            else:
                assert kernels == [6 * neuron + i for i in range(6)]


# Fused weights: the forward pass is built again from the parts, by their names.


def parts(module: nn.Module) -> dict[str, Tensor]:
    return {layer.name: layer.read().detach() for layer in discover(module)}


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(-2, -3)


@pytest.mark.parametrize("fused", [True, False])
def test_attention(fused: bool) -> None:
    sizes = {} if fused else {"kdim": 5, "vdim": 3}
    module = randomised(nn.MultiheadAttention(8, 2, batch_first=True, **sizes))
    query, key, value = (
        normal(2, 4, 8),
        normal(2, 6, sizes.get("kdim", 8), seed=1),
        normal(2, 6, sizes.get("vdim", 8), seed=2),
    )
    expected, _ = module(query, key, value)

    w = parts(module)
    names = [f"in_proj_weight.{p}" for p in "qkv"] if fused else [f"{p}_proj_weight" for p in "qkv"]
    assert list(w) == [*names, "out_proj"]
    biases = module.in_proj_bias.chunk(3)
    q, k, v = (heads(x @ w[name].T + bias, 2) for x, name, bias in zip((query, key, value), names, biases, strict=True))
    mixed = torch.softmax(q @ k.mT / math.sqrt(4), dim=-1) @ v
    found = mixed.transpose(-2, -3).flatten(-2) @ w["out_proj"].T + module.out_proj.bias
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def lstm_cell(w: dict[str, Tensor], suffix: str, module: nn.Module, x: Tensor, h: Tensor, c: Tensor) -> tuple:
    biases = (getattr(module, f"bias_ih{suffix}") + getattr(module, f"bias_hh{suffix}")).chunk(4)
    gate = {
        name: x @ w[f"weight_ih{suffix}.{name}"].T + h @ w[f"weight_hh{suffix}.{name}"].T + bias
        for name, bias in zip(("input", "forget", "cell", "output"), biases, strict=True)
    }
    c = gate["forget"].sigmoid() * c + gate["input"].sigmoid() * gate["cell"].tanh()
    h = gate["output"].sigmoid() * c.tanh()
    return (h @ w[f"weight_hr{suffix}"].T if f"weight_hr{suffix}" in w else h), c


def gru_cell(w: dict[str, Tensor], suffix: str, module: nn.Module, x: Tensor, h: Tensor) -> Tensor:
    names = ("reset", "update", "new")
    bias = dict(zip(names, getattr(module, f"bias_ih{suffix}").chunk(3), strict=True))
    bias_h = dict(zip(names, getattr(module, f"bias_hh{suffix}").chunk(3), strict=True))
    from_x = {name: x @ w[f"weight_ih{suffix}.{name}"].T + bias[name] for name in names}
    from_h = {name: h @ w[f"weight_hh{suffix}.{name}"].T + bias_h[name] for name in names}
    reset = (from_x["reset"] + from_h["reset"]).sigmoid()
    update = (from_x["update"] + from_h["update"]).sigmoid()
    new = (from_x["new"] + reset * from_h["new"]).tanh()
    return (1 - update) * new + update * h


def rnn_cell(w: dict[str, Tensor], suffix: str, module: nn.Module, x: Tensor, h: Tensor) -> Tensor:
    bias = getattr(module, f"bias_ih{suffix}") + getattr(module, f"bias_hh{suffix}")
    return (x @ w[f"weight_ih{suffix}"].T + h @ w[f"weight_hh{suffix}"].T + bias).tanh()


SEQUENCE, STATE, MEMORY = normal(5, 2, 3), normal(2, 4, seed=1), normal(2, 4, seed=2)


@pytest.mark.parametrize("proj_size", [0, 2])
def test_lstm(proj_size: int) -> None:
    module = randomised(nn.LSTM(3, 4, num_layers=2, proj_size=proj_size))
    h = [normal(2, proj_size or 4, seed=seed) for seed in (1, 2)]
    c = [normal(2, 4, seed=seed) for seed in (3, 4)]
    expected, _ = module(SEQUENCE, (torch.stack(h), torch.stack(c)))
    w = parts(module)
    assert len(w) == 2 * (8 + bool(proj_size))
    outputs = []
    for x in SEQUENCE:
        for level in range(2):
            h[level], c[level] = lstm_cell(w, f"_l{level}", module, x, h[level], c[level])
            x = h[level]
        outputs.append(x)
    torch.testing.assert_close(torch.stack(outputs), expected, rtol=1e-12, atol=1e-12)


def test_gru() -> None:
    module = randomised(nn.GRU(3, 4))
    expected, _ = module(SEQUENCE, STATE.unsqueeze(0))
    w, h, outputs = parts(module), STATE, []
    assert list(w) == [f"weight_{of}_l0.{gate}" for of in ("ih", "hh") for gate in ("reset", "update", "new")]
    for x in SEQUENCE:
        h = gru_cell(w, "_l0", module, x, h)
        outputs.append(h)
    torch.testing.assert_close(torch.stack(outputs), expected, rtol=1e-12, atol=1e-12)


def test_bidirectional_rnn() -> None:
    module = randomised(nn.RNN(3, 4, bidirectional=True))
    expected, _ = module(SEQUENCE, torch.stack((STATE, MEMORY)))
    w = parts(module)
    assert len(w) == 4
    for suffix, state, order, half in (
        ("_l0", STATE, 1, expected[..., :4]),
        ("_l0_reverse", MEMORY, -1, expected[..., 4:]),
    ):
        h, outputs = state, []
        for x in SEQUENCE.flip(0) if order < 0 else SEQUENCE:
            h = rnn_cell(w, suffix, module, x, h)
            outputs.append(h)
        torch.testing.assert_close(torch.stack(outputs[::order]), half, rtol=1e-12, atol=1e-12)


def test_cells() -> None:
    x = SEQUENCE[0]
    lstm, gru, rnn = (randomised(kind(3, 4)) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell))
    for found, expected in (
        (lstm_cell(parts(lstm), "", lstm, x, STATE, MEMORY), lstm(x, (STATE, MEMORY))),
        (gru_cell(parts(gru), "", gru, x, STATE), gru(x, STATE)),
        (rnn_cell(parts(rnn), "", rnn, x, STATE), rnn(x, STATE)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("module", "step"),
    [
        (lambda: nn.LSTMCell(3, 4), lambda m: torch.stack(m(SEQUENCE[0], (STATE, MEMORY)))),
        (lambda: nn.GRUCell(3, 4), lambda m: m(SEQUENCE[0], STATE).unsqueeze(0)),
        (lambda: nn.RNNCell(3, 4), lambda m: m(SEQUENCE[0], STATE).unsqueeze(0)),
    ],
    ids=["lstm", "gru", "rnn"],
)
def test_moving_a_gates_neuron_moves_one_hidden_unit(module: Callable, step: Callable) -> None:
    module = randomised(module())
    for layer in discover(module):
        neurons = labels(layer)
        assert neurons.shape[0] == 4
        weight = getattr(module, layer.parameter)
        with torch.no_grad():
            before, kept = step(module), weight.clone()
            for i in range(4):
                moved = kept.flatten().clone()
                moved[neurons[i]] += 1
                weight.copy_(moved.view(weight.shape))
                moved_units = (step(module) != before).any(dim=0).any(dim=0)
                assert moved_units.nonzero().flatten().tolist() == [i]
            weight.copy_(kept)


def test_parts_share_the_weight_and_nothing_is_read_twice() -> None:
    module = randomised(nn.LSTM(3, 4))
    taken = [labels(layer).flatten() for layer in discover(module) if layer.parameter == "weight_ih_l0"]
    assert torch.equal(torch.cat(taken), torch.arange(16 * 3))
    module = nn.MultiheadAttention(8, 2)
    taken = [labels(layer).flatten() for layer in discover(module) if layer.parameter == "in_proj_weight"]
    assert torch.equal(torch.cat(taken), torch.arange(24 * 8))


# Parametrized weights.


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


PARAMETRIZED = {
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("name", PARAMETRIZED)
@pytest.mark.parametrize("kind", [lambda: nn.Linear(5, 4), lambda: nn.Conv2d(3, 4, 3)], ids=["linear", "conv"])
def test_parametrized(name: str, kind: Callable[[], nn.Module]) -> None:
    module = PARAMETRIZED[name](randomised(kind()))
    before = state(module)
    layer = only_layer(module)
    assert layer.name == "layer"
    neurons = layer.read()
    weights = normal(*neurons.shape, seed=3)
    gradients = torch.autograd.grad((neurons * weights).sum(), layer.leaves())
    for key, value in state(module).items():
        assert torch.equal(value, before[key]), key
    # No part was left in eval mode.
    assert all(part.training for part in module.modules())
    # The leaves are the originals, and the gradient reaches each.
    originals = [p for key, p in module.named_parameters() if "original" in key]
    assert list(map(id, layer.leaves())) == list(map(id, originals))
    module.eval()
    plain = module.weight.flatten(1)
    torch.testing.assert_close(neurons, plain, rtol=1e-14, atol=0)
    for found, of_plain in zip(gradients, torch.autograd.grad((plain * weights).sum(), originals), strict=True):
        assert found.abs().max() > 1e-6
        torch.testing.assert_close(found, of_plain, rtol=1e-12, atol=1e-14)
    layer.read()
    assert not any(part.training for part in module.modules())


def test_spectral_norm_moves_its_vectors_when_the_weight_itself_is_read() -> None:
    """What reading would do, were it not in eval mode: the test above can fail."""
    module = parametrizations.spectral_norm(randomised(nn.Linear(5, 4)))
    before = state(module)
    _ = module.weight
    assert any(not torch.equal(value, before[key]) for key, value in state(module).items())


class Failing(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        if not self.training:
            raise ZeroDivisionError
        return 2 * weight


def test_a_failing_parametrization_is_left_as_it_was() -> None:
    module = nn.Linear(5, 4)
    parametrize.register_parametrization(module, "weight", Failing())
    with pytest.raises(ZeroDivisionError):
        discover(module)
    assert all(part.training for part in module.modules())


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_chained_parametrizations() -> None:
    module = parametrizations.weight_norm(randomised(nn.Linear(5, 4)))
    parametrize.register_parametrization(module, "weight", Doubled())
    layer = only_layer(module)
    assert torch.equal(layer.read(), module.weight)
    assert len(layer.leaves()) == 2


class LowRankUpdate(nn.Module):
    """LoRA: a frozen weight and a product that is learned."""

    def __init__(self, num_neurons: int, fan_in: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(normal(num_neurons, 2)), nn.Parameter(normal(2, fan_in, seed=1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def test_what_a_parametrization_learns_belongs_to_the_layer() -> None:
    module = randomised(nn.Linear(5, 4))
    module.requires_grad_(False)
    update = LowRankUpdate(4, 5)
    parametrize.register_parametrization(module, "weight", update, unsafe=True)
    layer = only_layer(module)
    original, *learned = layer.leaves()
    assert original is module.parametrizations.weight.original
    assert set(map(id, learned)) == {id(update.a), id(update.b)}
    energy(layer.read()).backward()
    assert original.grad is None
    assert update.a.grad.abs().max() > 0
    assert update.b.grad.abs().max() > 0
    update.requires_grad_(False)
    (skipped,) = discover(module).skipped
    assert skipped == ("weight", "frozen (requires_grad=False)")


class TwoFactors(nn.Module):
    """A weight W = A B whose factors are to be regularised in its place."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight, torch.eye(weight.shape[1], dtype=weight.dtype)

    def factors(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"a": a, "b": b.T}


def test_factors_stand_for_the_weight() -> None:
    module = randomised(nn.Linear(5, 4))
    parametrize.register_parametrization(module, "weight", TwoFactors())
    a, b = discover(nn.ModuleDict({"layer": module}))
    assert (a.name, b.name) == ("layer.a", "layer.b")
    original = module.parametrizations.weight
    assert torch.equal(a.read(), original.original0)
    assert torch.equal(b.read(), original.original1.T)
    (gradient,) = torch.autograd.grad(b.read().sum(), original.original1)
    assert torch.equal(gradient, torch.ones(5, 5, dtype=torch.float64))


def test_a_weight_and_a_bias_both_parametrized() -> None:
    module = randomised(nn.Linear(5, 4))
    parametrize.register_parametrization(module, "bias", Doubled())
    parametrize.register_parametrization(module, "weight", Doubled())
    layer = only_layer(module)
    assert torch.equal(layer.read(), module.weight)


# Reads follow the module.


def model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), parametrizations.weight_norm(nn.Linear(4, 5)))


def values(layers: list[Layer]) -> list[Tensor]:
    return [layer.read().detach().clone() for layer in layers]


def expected(of: nn.Sequential) -> list[Tensor]:
    return [of[0].weight.detach().flatten(1), of[2].weight.detach()]


@pytest.mark.parametrize("assign", [False, True])
def test_reads_follow_a_loaded_state(assign: bool) -> None:
    own, other = model(), model()
    layers = discover(own)
    before = values(layers)
    own.load_state_dict(other.state_dict(), assign=assign)
    for found, old, new in zip(values(layers), before, expected(other), strict=True):
        assert torch.equal(found, new)
        assert not torch.equal(found, old)
    for layer, parameter in zip(layers, (own[0].weight, own[2].parametrizations.weight.original0), strict=True):
        assert layer.leaves()[0] is parameter


def test_reads_follow_a_deep_copy() -> None:
    own = model()
    layers = discover(own)
    twin, twins = copy.deepcopy((own, list(layers)))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    for layer, copied in zip(layers, twins, strict=True):
        assert copied.name == layer.name
        assert not torch.equal(copied.read(), layer.read())
    for found, of_twin in zip(values(twins), expected(twin), strict=True):
        assert torch.equal(found, of_twin)
    for found, of_own in zip(values(layers), expected(own), strict=True):
        assert torch.equal(found, of_own)


def test_reads_follow_type_replacement_and_steps() -> None:
    own = model()
    layers = discover(own)
    own.double()
    assert [layer.read().dtype for layer in layers] == [torch.float64] * 2
    assert [layer.dtype for layer in layers] == [torch.float64] * 2
    own[0].weight = nn.Parameter(torch.ones(4, 3, 3, 3))
    assert torch.equal(layers[0].read(), torch.ones(4, 27))
    with torch.no_grad():
        own[0].weight.mul_(3)
    assert torch.equal(layers[0].read(), 3 * torch.ones(4, 27))
