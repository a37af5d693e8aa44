"""Rotation training: the four maps, the layer's life under them, and the energy that stays."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from comhe.energies import energy
from comhe.parametrizations import RotationReport, merge, report, rotate
from comhe.parametrizations.orthogonal import MAPS

LAYERS = {
    "linear": lambda: nn.Linear(7, 5),
    "conv1d": lambda: nn.Conv1d(3, 4, 3),
    "conv2d": lambda: nn.Conv2d(2, 5, (3, 2)),
    "conv3d": lambda: nn.Conv3d(2, 3, 2),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "transposed": lambda: nn.ConvTranspose2d(2, 5, (3, 2)),
    "embedding": lambda: nn.Embedding(6, 4),
}
INPUTS = {
    "linear": (2, 7),
    "conv1d": (2, 3, 8),
    "conv2d": (2, 2, 6, 6),
    "conv3d": (2, 2, 4, 4, 4),
    "grouped": (2, 4, 6, 6),
    "transposed": (2, 2, 4, 4),
}

every_map = pytest.mark.parametrize("map", MAPS)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def learned(layer: nn.Module) -> nn.Parameter:
    return layer.parametrizations.weight.original0


def random_learned(layer: nn.Module, scale: float = 1.0, seed: int = 0) -> None:
    draw = torch.randn(learned(layer).shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        learned(layer).copy_(scale * draw)


def gram_schmidt_loop(x: torch.Tensor) -> torch.Tensor:
    columns: list[torch.Tensor] = []
    for i in range(x.shape[1]):
        v = x[:, i].clone()
        for u in columns:
            v = v - (u @ x[:, i]) * u
        columns.append(v / v.square().sum().sqrt())
    return torch.stack(columns, dim=1)


@every_map
@pytest.mark.parametrize("size", [1, 2, 9, 40])
def test_orthogonal_to_rounding_for_random_x(map, size):
    x = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    r = MAPS[map].apply(x)
    assert (r.mT @ r - torch.eye(size, dtype=torch.float64)).norm() < 1e-12
    expected = torch.linalg.det(x).sign() if map == "gram-schmidt" else torch.tensor(1.0, dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.det(r), expected, rtol=0, atol=1e-12)


@every_map
@pytest.mark.parametrize("size", [1, 2, 5])
def test_maps_pass_gradcheck(map, size):
    x = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert torch.autograd.gradcheck(MAPS[map].apply, (x.requires_grad_(),))
    assert torch.autograd.gradgradcheck(MAPS[map].apply, (x,))


@every_map
@pytest.mark.parametrize("size", [1, 2, 27])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exactly_the_identity_at_the_start(map, size, dtype):
    assert torch.equal(MAPS[map].apply(MAPS[map].start(size).to(dtype)), torch.eye(size, dtype=dtype))


def test_gram_schmidt_is_the_loop_of_the_textbook():
    x = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    ours, loop = MAPS["gram-schmidt"].apply(x), gram_schmidt_loop(x)
    torch.testing.assert_close(ours, loop, rtol=0, atol=1e-12)
    probe = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradients = [torch.autograd.grad((r * probe).sum(), x)[0] for r in (ours, loop)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_gram_schmidt_is_stable_where_the_loop_is_not():
    # Columns of a Hilbert matrix: condition 2e16, no longer independent in float64.
    index = torch.arange(12, dtype=torch.float64)
    hilbert = 1 / (index[:, None] + index[None, :] + 1)
    identity = torch.eye(12, dtype=torch.float64)
    loop, ours = gram_schmidt_loop(hilbert), MAPS["gram-schmidt"].apply(hilbert)
    assert (loop.mT @ loop - identity).norm() > 0.1
    assert (ours.mT @ ours - identity).norm() < 1e-12


def test_gram_schmidt_of_a_singular_matrix_is_orthogonal():
    x = torch.zeros(4, 4, dtype=torch.float64)
    x[0] = 1.0
    r = MAPS["gram-schmidt"].apply(x)
    assert (r.mT @ r - torch.eye(4, dtype=torch.float64)).norm() < 1e-12


@pytest.mark.parametrize("map", ["cayley", "exponential"])
def test_computed_in_the_widest_type(map):
    # On a GPU with TF32 allowed the factorisation in float32 left ||R'R - I|| = 0.6 at 576 x 576.
    x = torch.randn(30, 30)
    assert torch.equal(MAPS[map].apply(x), MAPS[map].apply(x.double()).float())


@pytest.mark.parametrize("map", ["cayley", "exponential"])
def test_one_slope_at_zero(map):
    skew = torch.tensor([[0.0, -3.0], [3.0, 0.0]], dtype=torch.float64)
    step = 1e-6 * skew
    r = MAPS[map].apply(step)
    torch.testing.assert_close((r - torch.eye(2, dtype=torch.float64)) / 1e-6, skew, rtol=0, atol=1e-5)


def test_householder_is_the_product_of_its_reflections():
    x = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    expected = -torch.eye(6, dtype=torch.float64)
    for i in range(6):
        v = torch.zeros(6, dtype=torch.float64)
        v[i], v[i + 1 :] = 1.0, x[i + 1 :, i]
        expected = expected @ (torch.eye(6, dtype=torch.float64) - 2 * torch.outer(v, v) / (v @ v))
    torch.testing.assert_close(MAPS["householder"].apply(x), expected, rtol=0, atol=1e-12)


@every_map
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_starts_at_the_same_bits(map, kind, dtype):
    layer = LAYERS[kind]().to(dtype)
    before = layer.weight.detach().clone()
    assert rotate(layer, map=map) is layer
    assert layer.weight.dtype == dtype
    assert torch.equal(layer.weight, before)


@every_map
@pytest.mark.parametrize("kind", LAYERS)
def test_every_neuron_is_rotated_by_one_matrix(map, kind):
    layer = LAYERS[kind]().double()
    transposed = kind == "transposed"
    fixed = layer.weight.detach().clone()
    rotate(layer, map=map)
    random_learned(layer)
    r = MAPS[map].apply(learned(layer))
    for i in range(fixed.shape[1 if transposed else 0]):
        before = (fixed[:, i] if transposed else fixed[i]).reshape(-1)
        after = (layer.weight[:, i] if transposed else layer.weight[i]).reshape(-1)
        torch.testing.assert_close(after, r @ before, rtol=0, atol=1e-12)


def test_only_the_matrix_is_learned():
    layer = rotate(nn.Conv2d(3, 8, 3))
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "bias": (8,),
        "parametrizations.weight.original0": (27, 27),
    }
    layer(torch.randn(1, 3, 5, 5)).square().sum().backward()
    assert learned(layer).grad is not None
    assert learned(layer).grad.abs().sum() > 0


def test_a_frozen_weight_gets_a_trained_rotation():
    layer = nn.Linear(4, 3).requires_grad_(False)
    assert learned(rotate(layer)).requires_grad


@every_map
def test_training_lowers_the_loss_and_keeps_the_energy(map):
    torch.manual_seed(0)
    inputs, target = torch.randn(64, 8), torch.randn(64, 6)
    layer = rotate(nn.Linear(8, 6), map=map)
    before = energy(layer.weight.detach())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(20):
        loss = (layer(inputs) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.99 * losses[0]
    (row,) = report(layer)
    assert isinstance(row, RotationReport)
    assert row.layer == "weight"
    assert row.orthogonality_error < 1e-5
    assert abs(row.energy_drift) < 1e-5
    assert abs(energy(layer.weight.detach()) - before) < 1e-5
    assert (layer.parametrizations.weight[0].orthogonal(learned(layer)) - torch.eye(8)).norm() > 1e-2


def test_report_measures_what_is_there(monkeypatch):
    model = nn.Sequential(rotate(nn.Linear(4, 3)), nn.BatchNorm1d(3), nn.Linear(3, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert report(model) == [RotationReport("0", 0.0, 0.0)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert report(nn.Linear(2, 2)) == []

    stretch = torch.diag(torch.tensor([2.0, 1.0, 1.0, 1.0]))
    fixed = model[0].weight.detach()
    monkeypatch.setattr(model[0].parametrizations.weight[0], "orthogonal", lambda x: stretch)
    (row,) = report(model)
    assert row.orthogonality_error == pytest.approx(3.0)
    assert row.energy_drift == pytest.approx(float(energy(fixed @ stretch) - energy(fixed)), abs=1e-6)
    assert abs(row.energy_drift) > 1e-4


@every_map
@pytest.mark.parametrize("kind", INPUTS)
def test_merge_leaves_the_same_outputs_bit_for_bit(map, kind):
    layer = LAYERS[kind]()
    names = list(dict(layer.named_parameters()))
    before = type(layer)
    rotate(layer, map=map)
    random_learned(layer)
    inputs = torch.randn(INPUTS[kind])
    expected = layer(inputs)
    assert merge(layer) == ["weight"]
    assert torch.equal(layer(inputs), expected)
    assert type(layer) is before
    assert type(layer.weight) is nn.Parameter
    assert layer.weight.requires_grad
    assert layer.weight.is_leaf
    assert list(dict(layer.named_parameters())) == names
    assert list(layer.buffers()) == []


def test_merge_names_what_it_merged():
    model = nn.Sequential(rotate(nn.Linear(4, 4)), nn.Sequential(rotate(nn.Conv1d(1, 2, 3))), nn.Linear(4, 4))
    with torch.no_grad(), parametrize.cached():
        assert merge(model) == ["0", "1.0"]
    assert all(isinstance(parameter, nn.Parameter) for parameter in (model[0].weight, model[1][0].weight))
    assert not any(parametrize.is_parametrized(module) for module in model.modules())
    with pytest.raises(ValueError, match="no weight of Sequential is rotated or low-rank"):
        merge(model)


def test_merge_leaves_other_parametrizations_alone():
    model = nn.Sequential(rotate(nn.Linear(4, 4)), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    assert merge(model) == ["0"]
    assert parametrize.is_parametrized(model[1], "weight")


def test_names_are_free_of_wrappers_prefixes():
    model = nn.DataParallel(torch.compile(nn.Sequential(rotate(nn.Linear(4, 4))), backend="eager"))
    assert [row.layer for row in report(model)] == ["0"]
    assert merge(model) == ["0"]


@every_map
def test_state_dict_round_trip_and_deepcopy(map):
    torch.manual_seed(0)
    source, target = rotate(nn.Linear(6, 5), map=map), rotate(nn.Linear(6, 5), map=map)
    random_learned(source)
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight, source.weight)
    twin = copy.deepcopy(source)
    assert torch.equal(twin.weight, source.weight)
    random_learned(twin, seed=1)
    assert not torch.equal(twin.weight, source.weight)
    assert torch.equal(target.weight, source.weight)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    twin.load_state_dict(state, assign=True)
    assert torch.equal(twin.weight, source.weight)


@every_map
def test_to_moves_everything(map):
    layer = rotate(nn.Linear(6, 5), map=map).to(torch.float64)
    random_learned(layer)
    assert layer.weight.dtype == torch.float64
    (row,) = report(layer)
    assert row.orthogonality_error < 1e-12
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    (row,) = report(layer)
    assert row.orthogonality_error < 1e-5


@every_map
def test_autocast_changes_no_bit(map):
    layer = rotate(nn.Linear(16, 12), map=map)
    random_learned(layer, 0.3)
    weight = layer.weight
    (plain,) = torch.autograd.grad(weight.square().mul(torch.arange(16.0)).sum(), learned(layer))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = layer.weight
    assert torch.equal(inside, weight)
    (gradient,) = torch.autograd.grad(inside.square().mul(torch.arange(16.0)).sum(), learned(layer))
    assert torch.equal(gradient, plain)


def test_cached_computes_the_weight_once(monkeypatch):
    layer = rotate(nn.Linear(4, 4))
    calls = []
    forward = type(layer.parametrizations.weight[0]).forward
    monkeypatch.setattr(
        type(layer.parametrizations.weight[0]), "forward", lambda self, x: calls.append(1) or forward(self, x)
    )
    with parametrize.cached():
        assert layer.weight is layer.weight
        (layer(torch.randn(2, 4)) + layer(torch.randn(2, 4))).sum().backward()
    assert len(calls) == 1
    assert learned(layer).grad.abs().sum() > 0


@every_map
def test_compiles_to_one_graph(map):
    layer = rotate(nn.Linear(6, 5), map=map)
    random_learned(layer)
    inputs = torch.randn(3, 6)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(inputs).square().sum().backward()
    gradient = learned(layer).grad.clone()
    layer.zero_grad()
    layer(inputs).square().sum().backward()
    torch.testing.assert_close(gradient, learned(layer).grad)


def test_assigning_a_weight_fixes_new_neurons():
    layer = rotate(nn.Conv2d(2, 3, 3), map="cayley")
    random_learned(layer)
    weight = torch.randn(3, 2, 3, 3)
    layer.weight = weight
    assert torch.equal(layer.weight, weight)
    assert torch.equal(learned(layer), torch.zeros(18, 18))
    with pytest.raises(ValueError, match=r"Conv2d.weight: a weight of shape \(3, 18\) was assigned"):
        layer.weight = weight.flatten(1)
    assert torch.equal(layer.weight, weight)


def test_a_tied_weight_keeps_its_values_elsewhere():
    embedding, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    before = embedding.weight.detach().clone()
    random_learned(rotate(head))
    assert torch.equal(embedding.weight, before)


def lazy() -> nn.Module:
    return nn.LazyLinear(3)


def not_finite() -> nn.Module:
    layer = nn.Linear(3, 3)
    nn.init.constant_(layer.weight, float("nan"))
    return layer


def integers() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight = nn.Parameter(torch.ones(3, 3, dtype=torch.int8), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (lambda: rotate(nn.Linear(3, 3)), "weight", "Linear.weight is parametrized already"),
        (lambda: nn.Linear(3, 4), "bias", r"Linear.bias has shape \(4,\).*choose such a weight"),
        (
            lambda: nn.Linear(3, 4),
            "kernel",
            r"Linear.kernel is not a parameter; choose .*\['weight', 'bias'\]",
        ),
        (lambda: nn.Linear(3, 0), "weight", r"Linear.weight has shape \(0, 3\)"),
        (lambda: nn.utils.weight_norm(nn.Linear(3, 4)), "weight", "Linear.weight is not a parameter; remove"),
        (lambda: nn.ConvTranspose2d(4, 4, 3, groups=2), "weight", "ConvTranspose2d.weight: groups=2"),
        (lazy, "weight", "LazyLinear.weight has no shape yet"),
        (lambda: nn.Linear(3, 4, device="meta"), "weight", "Linear.weight is on the meta device"),
        (not_finite, "weight", "Linear.weight has values that are not finite"),
        (integers, "weight", "Linear.weight is torch.int8"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_refused_with_the_layer_unchanged(make, name, message):
    layer = make()
    kind, parameters, buffers = type(layer), dict(layer._parameters), dict(layer._buffers)
    with pytest.raises(ValueError, match=message):
        rotate(layer, name)
    assert type(layer) is kind
    assert list(layer._parameters) == list(parameters)
    assert all(layer._parameters[key] is value for key, value in parameters.items())
    assert layer._buffers.keys() == buffers.keys()


def test_an_unknown_map_names_the_nearest():
    layer = nn.Linear(3, 3)
    with pytest.raises(
        ValueError, match=r"map='caley' is no orthogonal map; did you mean 'cayley'\? Choose one of: cayley, "
    ):
        rotate(layer, map="caley")
    assert not parametrize.is_parametrized(layer)
