"""The low-rank form of bilateral projection: the formula, what is learned, the layer's life under it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import comhe
from comhe.energies import energy
from comhe.parametrizations import LowRankReport, low_rank, merge, report, rotate

LAYERS = {
    "linear": (lambda: nn.Linear(9, 6), (2, 9)),
    "conv": (lambda: nn.Conv2d(3, 8, 3), (2, 3, 5, 5)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 7, 3), (2, 4, 5)),
}
every_layer = pytest.mark.parametrize("kind", LAYERS)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def parts(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    held = layer.parametrizations.weight
    return held[0].p1, held.original0, held.original1


def columns(layer: nn.Module, kind: str = "linear") -> torch.Tensor:
    """The paper's W [m, n], a neuron in each column."""
    weight = layer.weight.transpose(0, 1) if kind == "transposed" else layer.weight
    return weight.reshape(weight.shape[0], -1).T


def of_rank(layer: nn.Module, rank: int, kind: str = "linear") -> nn.Module:
    n, m = columns(layer, kind).T.shape
    g = torch.Generator().manual_seed(rank)
    rows = torch.randn(n, rank, generator=g, dtype=torch.float64) @ torch.randn(
        rank, m, generator=g, dtype=torch.float64
    )
    with torch.no_grad():
        if kind == "transposed":
            layer.weight.copy_(rows.view(n, layer.weight.shape[0], -1).transpose(0, 1))
        else:
            layer.weight.copy_(rows.view_as(layer.weight))
    return layer


@every_layer
def test_the_formula_by_inverse_in_float64(kind):
    layer = low_rank(LAYERS[kind][0]().double(), 3)
    p1, y1, y2 = parts(layer)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        y1.copy_(torch.randn(y1.shape, generator=g, dtype=torch.float64))
        y2.copy_(torch.randn(y2.shape, generator=g, dtype=torch.float64))
        expected = y2 @ torch.linalg.inv(p1 @ y2) @ y1
        torch.testing.assert_close(columns(layer, kind), expected, rtol=1e-9, atol=1e-9)


@every_layer
def test_starts_from_the_projections_of_the_best_approximation_of_the_weight(kind):
    layer = LAYERS[kind][0]().double()
    w = columns(layer, kind).detach().clone()
    low_rank(layer, 3)
    p1, y1, y2 = parts(layer)
    left, values, right = torch.linalg.svd(w, full_matrices=False)
    best = left[:, :3] * values[:3] @ right[:3]
    torch.testing.assert_close(y1.detach(), p1 @ best, rtol=0, atol=1e-12)
    # Y2 = W P2 lies in the span of W's columns.
    coordinates = torch.linalg.lstsq(best, y2.detach(), driver="gelsd").solution
    torch.testing.assert_close(best @ coordinates, y2.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(columns(layer, kind).detach(), best, rtol=0, atol=1e-8)


@every_layer
@pytest.mark.parametrize("rank", [1, 4])
def test_a_weight_of_that_rank_is_reproduced(kind, rank):
    layer = of_rank(LAYERS[kind][0]().double(), rank, kind)
    before = layer.weight.detach().clone()
    low_rank(layer, rank)
    torch.testing.assert_close(layer.weight.detach(), before, rtol=0, atol=1e-8)


@every_layer
def test_the_full_rank_reproduces_any_weight(kind):
    layer = LAYERS[kind][0]().double()
    before = layer.weight.detach().clone()
    low_rank(layer, min(columns(layer, kind).shape))
    torch.testing.assert_close(layer.weight.detach(), before, rtol=0, atol=1e-8)


@every_layer
def test_learns_m_r_and_n_r_parameters(kind):
    layer = LAYERS[kind][0]()
    m, n = columns(layer, kind).shape
    low_rank(layer, 3)
    _, y1, y2 = parts(layer)
    assert (tuple(y1.shape), tuple(y2.shape)) == ((3, n), (m, 3))
    assert sum(p.numel() for name, p in layer.named_parameters() if name != "bias") == m * 3 + n * 3
    assert torch.linalg.matrix_rank(columns(layer, kind)) == 3


def test_factors_are_the_columns_of_y1_and_y2():
    layer = low_rank(nn.Linear(9, 6), 2)
    _, y1, y2 = parts(layer)
    factors = layer.parametrizations.weight[0].factors(y1, y2)
    assert {name: tuple(rows.shape) for name, rows in factors.items()} == {"y1": (6, 2), "y2": (2, 9)}
    assert torch.equal(factors["y1"][4], y1[:, 4])
    assert torch.equal(factors["y2"][1], y2[:, 1])


def test_regularising_the_factors_lowers_their_energy():
    layer = low_rank(nn.Linear(12, 10), 4)
    _, y1, y2 = parts(layer)
    optimizer = torch.optim.SGD([y1, y2], lr=0.02)
    values = []
    for _ in range(20):
        value = sum(energy(rows) for rows in layer.parametrizations.weight[0].factors(y1, y2).values())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < values[0]


def test_the_basis_is_fixed_by_seed_and_key():
    def draw(seed=0, key=None, out=6):
        torch.manual_seed(0)
        layer = low_rank(nn.Linear(9, out), 2, seed=seed, key=key)
        return parts(layer)

    for first, second in zip(draw(), draw(), strict=True):
        assert torch.equal(first, second)
    for other in (draw(seed=1), draw(key="fc1"), draw(out=7)):
        assert not torch.equal(draw()[0], other[0])


def test_p1_is_fixed_and_keeps_the_size_of_a_neuron():
    layer = low_rank(nn.Linear(400, 100), 50)
    p1, _, _ = parts(layer)
    assert not p1.requires_grad
    assert p1.square().sum(1).mean() == pytest.approx(1.0, rel=0.05)


def test_passes_gradcheck():
    layer = low_rank(nn.Linear(5, 4).double(), 2)
    _, y1, y2 = parts(layer)
    assert torch.autograd.gradcheck(layer.parametrizations.weight[0], (y1, y2))


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    inputs, target = torch.randn(64, 8), torch.randn(64, 6)
    layer = low_rank(nn.Linear(8, 6), 2)
    p1 = parts(layer)[0].clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(20):
        loss = (layer(inputs) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.99 * losses[0]
    assert torch.equal(parts(layer)[0], p1)


def test_the_condition_is_reported():
    model = nn.Sequential(low_rank(nn.Linear(9, 6), 3), nn.ReLU(), rotate(nn.Linear(6, 4)))
    first, second = report(model)
    p1, _, y2 = parts(model[0])
    singular = torch.linalg.svdvals(p1.double() @ y2.detach().double())
    assert isinstance(first, LowRankReport)
    assert (first.layer, first.rank) == ("0", 3)
    assert first.condition == pytest.approx(float(singular[0] / singular[-1]), rel=1e-6)
    assert second.layer == "2"


@every_layer
def test_merge_leaves_the_same_outputs_bit_for_bit(kind):
    make, shape = LAYERS[kind]
    layer = make()
    names = list(dict(layer.named_parameters()))
    low_rank(layer, 3)
    inputs = torch.randn(shape)
    expected = layer(inputs)
    assert merge(nn.Sequential(layer)) == ["0"]
    assert torch.equal(layer(inputs), expected)
    assert type(layer.weight) is nn.Parameter
    assert layer.weight.requires_grad
    assert list(dict(layer.named_parameters())) == names
    with pytest.raises(ValueError, match=r"no weight of \w+ is rotated or low-rank"):
        merge(layer)


def test_merge_of_frozen_factors_gives_a_parameter():
    layer = low_rank(nn.Linear(5, 4), 2).requires_grad_(False)
    merge(layer)
    assert type(layer.weight) is nn.Parameter
    assert layer.weight.requires_grad


def test_state_dict_round_trip_and_deepcopy():
    source, target = low_rank(nn.Linear(9, 6), 3), low_rank(nn.Linear(9, 6), 3, seed=1)
    assert not torch.equal(source.weight, target.weight)
    target.load_state_dict(source.state_dict())
    assert torch.equal(source.weight, target.weight)
    twin = copy.deepcopy(source)
    assert torch.equal(twin.weight, source.weight)
    with torch.no_grad():
        parts(twin)[1].mul_(2)
    assert not torch.equal(twin.weight, source.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_to_moves_everything(dtype):
    layer = low_rank(nn.Linear(9, 6), 3)
    before = layer.weight.detach()
    layer.to(dtype)
    assert {tensor.dtype for tensor in layer.state_dict().values()} == {dtype}
    assert layer.weight.dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(layer.weight.detach().float(), before, rtol=1e-3, atol=1e-3)
    made = low_rank(nn.Linear(9, 6).to(dtype), 2)
    assert made.weight.dtype == dtype


def test_solved_in_the_widest_type():
    layer = low_rank(nn.Linear(64, 48), 32)
    p1, y1, y2 = parts(layer)
    coefficients = torch.linalg.solve(p1.double() @ y2.double(), y1.double())
    assert torch.equal(layer.weight, coefficients.float().T @ y2.T)


def test_autocast_changes_no_bit():
    layer = low_rank(nn.Linear(32, 24), 8)
    plain = layer.weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = layer.weight
    assert inside.dtype == torch.float32
    assert torch.equal(inside, plain)


def test_cached_computes_the_weight_once():
    layer = low_rank(nn.Linear(9, 6), 3)
    with parametrize.cached():
        assert layer.weight is layer.weight
        layer(torch.randn(2, 9)).sum().backward()
    assert all(factor.grad.abs().sum() > 0 for factor in parts(layer)[1:])


def test_compiles_to_one_graph():
    layer = low_rank(nn.Linear(9, 6), 3)
    inputs = torch.randn(2, 9)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(inputs), layer(inputs))


def test_assigning_a_weight_starts_again():
    layer = low_rank(nn.Linear(9, 6).double(), 2)
    weight = of_rank(nn.Linear(9, 6).double(), 2).weight.detach()
    layer.weight = weight
    torch.testing.assert_close(layer.weight.detach(), weight, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("make", "rank", "message"),
    [
        (lambda: nn.Linear(9, 6), 7, "Linear.weight: rank=7: choose from 1 to 6, .*fan-in 9 and 6 neurons"),
        (lambda: nn.Conv2d(1, 16, 3), 10, "Conv2d.weight: rank=10: choose from 1 to 9"),
        (lambda: nn.Linear(9, 6), 0, "Linear.weight: rank=0: choose from 1 to 6"),
        (lambda: of_rank(nn.Linear(9, 6), 2), 3, "Linear.weight: rank=3 is above the weight's own rank"),
        (lambda: of_rank(nn.Linear(9, 6).double(), 2), 3, "rank=3 is above the weight's own rank"),
        (lambda: of_rank(nn.Linear(9, 6), 0), 1, "rank=1 is above .*initialise the weight first"),
        (lambda: of_rank(nn.Linear(9, 6).bfloat16(), 0), 1, "rank=1 is above"),
        (lambda: nn.ConvTranspose1d(4, 4, 3, groups=2), 2, "ConvTranspose1d.weight: groups=2"),
        (lambda: rotate(nn.Linear(9, 6)), 2, "Linear.weight is parametrized already"),
        (lambda: nn.LayerNorm(8), 2, r"LayerNorm.weight has shape \(8,\)"),
    ],
)
def test_refused_with_the_layer_unchanged(make, rank, message):
    layer = make()
    kind, parameters, state = type(layer), dict(layer._parameters), list(layer.state_dict())
    with pytest.raises(ValueError, match=message):
        low_rank(layer, rank)
    assert type(layer) is kind
    assert all(layer._parameters[key] is value for key, value in parameters.items())
    assert list(layer.state_dict()) == state


def test_a_regularizer_of_factors_that_are_merged_says_so():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 12), nn.Linear(12, 3))
    regularizer = comhe.build("lr-bp-comhe", model, rank=4)
    assert regularizer().isfinite()
    comhe.merge(model)
    for use in (regularizer, regularizer.energies):
        with pytest.raises(RuntimeError, match=r"0\.y1 is merged into its weight: build the regularizer again"):
            use()


def test_where_the_core_is_singular_the_report_says_so() -> None:
    layer = low_rank(nn.Linear(9, 6), 2)
    with torch.no_grad():
        layer.parametrizations.weight.original1.zero_()
    assert report(layer)[0].condition == torch.inf
    assert not torch.isfinite(layer.weight).all()
