"""Each penalty against a float64 loop written from its publication, its sign by descent, and its edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from comhe import penalties
from comhe.penalties import PENALTIES, mma, orthonormal, srip

Array = NDArray[np.float64]

# Every penalty in every form: (name, options).
FORMS = [
    ("orthogonal", {}),
    ("orthogonal", {"local": True}),
    ("orthogonal", {"local": True, "sharpness": 3.0}),
    ("orthonormal", {}),
    ("srip", {"body": "paper"}),
    ("srip", {"body": "wide-resnet"}),
    ("srip", {"body": "svhn"}),
    ("srip", {"body": "paper", "num_iterations": 4}),
    ("mma", {}),
]
every_form = pytest.mark.parametrize(
    ("name", "options"), FORMS, ids=["-".join([n, *map(str, o.values())]) for n, o in FORMS]
)
# More dimensions than neurons, about as many, and more than twice as many neurons as dimensions.
every_shape = pytest.mark.parametrize("shape", [(5, 12), (7, 6), (15, 4), (2, 3)])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def value_and_gradient(name: str, options: dict, neurons: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = neurons.detach().clone().requires_grad_()
    value = PENALTIES[name](leaf, **options)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


# Loops from the publications, a neuron a row.


def cosine(a: Array, b: Array) -> float:
    """A zero neuron is orthogonal to all."""
    length = math.sqrt(sum(a * a)) * math.sqrt(sum(b * b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / length if length else 0.0


def loop_orthogonal(w: Array, local: bool = False, sharpness: float = 10.0) -> float:
    total = 0.0
    for i in range(len(w)):
        for j in range(len(w)):
            if i != j and local:
                total += math.log1p(math.exp(sharpness * (cosine(w[i], w[j]) - 1)))
            elif i != j:
                total += cosine(w[i], w[j]) ** 2 / 2
    return total


def loop_orthonormal(w: Array) -> float:
    total = 0.0
    for i in range(len(w)):
        for j in range(len(w)):
            total += (sum(w[i] * w[j]) - (i == j)) ** 2
    return math.sqrt(total)


def loop_mma(w: Array) -> float:
    total = 0.0
    for i in range(len(w)):
        total += min(angle(w[i], w[j]) for j in range(len(w)) if j != i)
    return -total / len(w)


def angle(a: Array, b: Array) -> float:
    """From the chord of unit vectors, in extended precision; a zero neuron is orthogonal to all."""
    if not (a.any() and b.any()):
        return math.pi / 2
    x, y = (v.astype(np.longdouble) / np.sqrt((v.astype(np.longdouble) ** 2).sum()) for v in (a, b))
    return float(2 * np.arcsin(min(np.longdouble(1), np.sqrt(((x - y) ** 2).sum()) / 2)))


def loop_srip_paper(w: Array, v: Array, rounds: int) -> float:
    """Eq. 7, its columns being neurons: u = (W'W - I) v, v = (W'W - I) u, sigma = |v| / |u|."""
    columns = w.T
    a = columns.T @ columns - np.eye(columns.shape[1])
    for _ in range(rounds):
        u = a @ v
        v = a @ u
    return float(np.sqrt(v @ v) / np.sqrt(u @ u))


def loop_srip_wide_resnet(w: Array, v: Array) -> float:
    rows, cols = w.shape
    a = w.T @ w - np.eye(cols) if rows > cols else w @ w.T - np.eye(rows)
    v1 = a @ v
    v3 = a @ (v1 / np.sqrt(v1 @ v1))
    return float(v3 @ v3)


def loop_srip_svhn(w: Array, u: Array) -> float:
    a = w.T @ w - np.eye(w.shape[1])
    u = u / np.sqrt(u @ u)
    v = a.T @ u
    v = v / np.sqrt(v @ v)
    u = a @ v
    u = u / np.sqrt(u @ u)
    return float((u @ (a @ v)) ** 2)


def loop_of(name: str, options: dict, w: torch.Tensor) -> tuple[float, dict]:
    """The loop's value, and what the penalty must be given to compute the same."""
    array = w.double().numpy()
    if name != "srip":
        return {"orthogonal": loop_orthogonal, "orthonormal": loop_orthonormal, "mma": loop_mma}[name](
            array, **options
        ), options
    rows, cols = array.shape
    over_fan_in = options["body"] == "svhn" or (options["body"] == "wide-resnet" and rows > cols)
    start = normal(cols if over_fan_in else rows, seed=9)
    loop = {
        "paper": lambda w, v: loop_srip_paper(w, v, options.get("num_iterations", 2) // 2),
        "wide-resnet": loop_srip_wide_resnet,
        "svhn": loop_srip_svhn,
    }[options["body"]]
    return loop(array, start.numpy()), {**options, "start": start}


@every_form
@every_shape
def test_value_is_the_publications(name: str, options: dict, shape: tuple[int, int]) -> None:
    for seed, scale in ((0, 1.0), (1, 0.3)):
        w = scale * normal(*shape, seed=seed)
        if shape[0] > 2 and name in ("orthogonal", "mma"):
            w[[0, 2]] = 0
        expected, given = loop_of(name, options, w)
        assert PENALTIES[name](w, **given).item() == pytest.approx(expected, rel=1e-12)
        single = w.float()
        expected, given = loop_of(name, options, single)
        got = PENALTIES[name](single, **given)
        assert got.dtype == torch.float32
        assert got.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("name", "options"), [f for f in FORMS if f[0] in ("orthogonal", "mma")], ids=str)
def test_close_pairs_in_float32(name: str, options: dict) -> None:
    # Clusters about 1e-3 wide, where float32 cosines cannot even tell which neighbour is the nearest.
    w = (normal(3, 1, 10) + 3e-4 * normal(3, 5, 10, seed=1)).reshape(15, 10).float()
    expected, _ = loop_of(name, options, w)
    assert PENALTIES[name](w, **options).item() == pytest.approx(expected, rel=1e-5)
    w = w.double()
    assert PENALTIES[name](w, **options).item() == pytest.approx(loop_of(name, options, w)[0], rel=1e-12)


@every_form
@pytest.mark.parametrize("shape", [(4, 7), (11, 4), (2, 3)])
def test_gradient(name: str, options: dict, shape: tuple[int, int]) -> None:
    w = normal(*shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: PENALTIES[name](w, **options), w)
    if shape == (2, 3):
        assert torch.autograd.gradgradcheck(lambda w: PENALTIES[name](w, **options), w)


@every_form
def test_descent_lowers_it(name: str, options: dict) -> None:
    w = normal(1, 9) + 0.5 * normal(6, 9, seed=1)
    if name in ("orthonormal", "srip"):
        w = w / 4
    before = PENALTIES[name](w, **options)
    smallest = min_angle(w)
    for _ in range(30):
        _, gradient = value_and_gradient(name, options, w)
        w = w - 0.02 * gradient if name != "mma" else w - 0.5 * gradient
    assert PENALTIES[name](w, **options) < before - 1e-3 * abs(before)
    if name in ("orthogonal", "mma"):
        assert min_angle(w) > smallest + 0.05


def min_angle(w: torch.Tensor) -> float:
    unit = w / w.norm(dim=-1, keepdim=True)
    return torch.acos((unit @ unit.mT - 2 * torch.eye(len(w))).max()).item()


@every_form
@pytest.mark.parametrize("shape", [(5, 12), (15, 4)])
def test_batched_is_each_by_itself(name: str, options: dict, shape: tuple[int, int]) -> None:
    w = normal(2, 3, *shape)
    value, gradient = value_and_gradient(name, options, w)
    assert value.shape == (2, 3)
    each = [value_and_gradient(name, options, one) for one in w.flatten(0, 1)]
    for batched, single in zip((value, gradient), zip(*each, strict=True), strict=True):
        torch.testing.assert_close(batched.flatten(0, 1), torch.stack(single), rtol=1e-12, atol=1e-13)


@every_form
def test_low_precision_is_computed_in_float32(name: str, options: dict) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        w = normal(6, 9, dtype=dtype)
        value, gradient = value_and_gradient(name, options, w)
        wide_value, wide_gradient = value_and_gradient(name, options, w.float())
        assert value.dtype == torch.float32
        assert torch.equal(value, wide_value)
        assert gradient.dtype == dtype
        assert torch.equal(gradient, wide_gradient.to(dtype))


@every_form
def test_ambient_precision_changes_no_bit(name: str, options: dict) -> None:
    w = normal(33, 40, dtype=torch.float32)
    plain = value_and_gradient(name, options, w)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            ambient = value_and_gradient(name, options, w)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(plain[0], ambient[0])
    assert torch.equal(plain[1], ambient[1])


@pytest.mark.parametrize("name", PENALTIES)
def test_compiles_whole(name: str) -> None:
    torch.compiler.reset()
    leaf = normal(6, 9, dtype=torch.float32).requires_grad_()
    compiled = torch.compile(PENALTIES[name], fullgraph=True, backend="aot_eager")
    value = compiled(leaf)
    expected, gradient = value_and_gradient(name, {}, leaf)
    torch.testing.assert_close(value.detach(), expected)
    torch.testing.assert_close(torch.autograd.grad(value, leaf)[0], gradient)


# Edges.

AWKWARD = {
    "zero matrix": torch.zeros(4, 6),
    "zero neuron": torch.cat([normal(4, 6, dtype=torch.float32), torch.zeros(1, 6)]),
    "two zero neurons of many": torch.cat([normal(9, 3, dtype=torch.float32), torch.zeros(2, 3)]),
    "duplicates": normal(3, 6, dtype=torch.float32).repeat(2, 1),
    "antipodes": torch.cat([normal(3, 6, dtype=torch.float32), -normal(3, 6, dtype=torch.float32)]),
    "orthonormal": torch.eye(4, 6),
    "square orthonormal": torch.eye(5),
    "orthonormal columns": torch.eye(6, 4),
    "one neuron": normal(1, 6, dtype=torch.float32),
    "one dimension": normal(5, 1, dtype=torch.float32),
    "one zero neuron": torch.zeros(1, 3),
    "large": 1e9 * normal(4, 6, dtype=torch.float32),
    "small": 1e-25 * normal(4, 6, dtype=torch.float32),
}


@every_form
@pytest.mark.parametrize("case", AWKWARD)
def test_finite_everywhere(name: str, options: dict, case: str) -> None:
    value, gradient = value_and_gradient(name, options, AWKWARD[case])
    if case == "large" and name == "srip" and options["body"] != "paper":
        assert value > 1e30  # the square of sigma = 1e19
        return
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(("name", "options"), [f for f in FORMS if f[0] in ("orthogonal", "mma")], ids=str)
def test_penalties_of_pairs_at_their_edges(name: str, options: dict) -> None:
    penalty = PENALTIES[name]
    value, gradient = value_and_gradient(name, options, normal(2, 1, 5))  # one neuron has no partner
    assert value.tolist() == [0.0, 0.0]
    assert not gradient.any()

    _, gradient = value_and_gradient(name, options, torch.cat([normal(7, 5), torch.zeros(2, 5)]))
    assert not gradient[-2:].any()
    assert gradient[:-2].any()

    w = normal(6, 4)
    factors = torch.tensor([1.0, 1e-30, 1e30, 1e-3, 7.0, 1e10], dtype=w.dtype).unsqueeze(-1)
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        scaled = penalty((factors * w).to(dtype), **options).item()
        assert scaled == pytest.approx(penalty(w.to(dtype), **options).item(), rel=tolerance)


def test_zero_gradient_at_the_exact_minimum() -> None:
    for name, options in FORMS:
        if name in ("orthonormal", "srip"):
            value, gradient = value_and_gradient(name, options, torch.eye(5))
            assert value == 0
            assert not gradient.any()
    assert not value_and_gradient("orthonormal", {}, torch.zeros(3, 5))[1].any()
    assert orthonormal(torch.zeros(3, 5)).item() == pytest.approx(math.sqrt(3))
    # Six neurons in four dimensions cannot be orthonormal: sqrt(N - D) is left, without a slope.
    value, gradient = value_and_gradient("orthonormal", {}, torch.eye(6, 4))
    assert value.item() == pytest.approx(math.sqrt(2))
    assert not gradient.any()


# What is special to one of them.


def test_duplicates_have_angle_zero_and_near_ones_part() -> None:
    a = normal(1, 5)
    value, gradient = value_and_gradient("mma", {}, torch.cat([a, a]))
    assert value == 0
    assert not gradient.any()
    near = torch.cat([a, a + 1e-9 * normal(1, 5, seed=1)])
    before, gradient = value_and_gradient("mma", {}, near)
    assert gradient.norm() == pytest.approx(math.sqrt(2) / a.norm().item(), rel=1e-6)
    assert mma(near - 0.1 * gradient) < before - 0.01


def test_local_form_leaves_obtuse_pairs_alone() -> None:
    opposite = torch.tensor([[1.0, 0.1], [-1.0, 0.1]], dtype=torch.float64)
    assert value_and_gradient("orthogonal", {"local": True}, opposite)[1].abs().max() < 1e-6
    assert value_and_gradient("orthogonal", {}, opposite)[1].abs().max() > 0.1


def test_nearest_neighbours_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    w = normal(2, 11, 4)
    whole = mma(w)
    monkeypatch.setattr(penalties, "_PAIR_ELEMENTS", 3 * 2 * 11)
    assert torch.equal(mma(w), whole)


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (6, 6)])
def test_srip_finds_the_spectral_norm(shape: tuple[int, int]) -> None:
    w = normal(*shape, seed=3) / 2
    gram = {"WW'": (w @ w.T).numpy(), "W'W": (w.T @ w).numpy()}
    exact = {key: np.linalg.norm(g - np.eye(len(g)), 2) for key, g in gram.items()}
    with torch.no_grad():
        assert srip(w, body="paper", num_iterations=400).item() == pytest.approx(exact["WW'"], rel=1e-9)
        assert srip(w, body="svhn", num_iterations=400).item() == pytest.approx(exact["W'W"] ** 2, rel=1e-9)
        small = exact["W'W"] if shape[0] > shape[1] else exact["WW'"]
        assert srip(w, body="wide-resnet", num_iterations=400).item() == pytest.approx(small**2, rel=1e-9)
        for body, largest in (("paper", exact["WW'"]), ("svhn", exact["W'W"] ** 2)):
            assert srip(w, body=body).item() <= largest * (1 + 1e-12)  # an estimate from below


def test_srip_bodies_differ_on_orthonormal_neurons() -> None:
    w, _ = torch.linalg.qr(normal(12, 5))
    assert srip(w.T, body="paper") < 1e-12
    assert srip(w.T, body="wide-resnet") < 1e-12
    assert srip(w.T, body="svhn").item() == pytest.approx(1, rel=1e-12)
    assert srip(w, body="paper").item() == pytest.approx(1, rel=1e-12)


def test_srip_start_is_always_the_same_unless_given() -> None:
    w = normal(6, 9)
    torch.manual_seed(0)
    first = srip(w)
    torch.manual_seed(1)
    assert torch.equal(first, srip(w))
    start = normal(6, seed=5)
    assert not torch.equal(first, srip(w, start=start))
    assert srip(w, start=3 * start).item() == pytest.approx(srip(w, start=start).item(), rel=1e-12)


def test_srip_refuses() -> None:
    w = normal(4, 6)
    with pytest.raises(ValueError, match=r"body='code': choose one of 'paper', 'wide-resnet', 'svhn'"):
        srip(w, body="code")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_iterations=0: choose at least 1"):
        srip(w, num_iterations=0)
    with pytest.raises(ValueError, match=r"start of shape \(6,\): give a vector of 4 numbers"):
        srip(w, start=torch.ones(6))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@every_form
@every_shape
def test_a_neuron_that_is_not_finite_makes_the_penalty_nan(
    shape: tuple[int, int], name: str, options: dict, bad: float
) -> None:
    neurons = normal(*shape)
    neurons[1, 1] = bad
    assert torch.isnan(PENALTIES[name](neurons, **options))


def test_every_public_function_is_a_penalty() -> None:
    assert list(PENALTIES) == ["orthogonal", "orthonormal", "srip", "mma"]
    assert set(PENALTIES) == {name for name, _ in FORMS}


@pytest.mark.parametrize(
    "penalty", [penalties.orthogonal, penalties.orthonormal, penalties.srip], ids=lambda p: p.__name__
)
@pytest.mark.parametrize("noise", [1e-2, 1e-3, 1e-4])
def test_nearly_orthonormal_neurons_in_float32(penalty, noise) -> None:
    """The value is a small difference of large numbers; the input's own rounding, 6e-8, bounds what can be asked."""
    rows = torch.linalg.qr(normal(12, 12))[0][:6] + noise * normal(6, 12, seed=1)
    exact, single = penalty(rows.float().double()), penalty(rows.float())
    assert single.dtype == torch.float32
    assert abs(single.item() / exact.item() - 1) < 1e-6


def test_srip_hides_the_draw_of_its_start_from_the_compiler() -> None:
    """Its integers take the default backend two minutes. For any number of neurons: a second size compiles too."""
    sizes = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(srip, fullgraph=True, backend=count)
    for shape in ((8, 27), (9, 20), (30, 7)):
        w = normal(*shape, dtype=torch.float32)
        assert torch.equal(compiled(w), srip(w))
    assert max(sizes) < 100  # with the draw among them there would be 200


@pytest.mark.slow
def test_srip_is_compiled_by_the_default_backend() -> None:
    torch.compiler.reset()
    compiled = torch.compile(srip, fullgraph=True)
    for shape in ((8, 27), (30, 7)):
        leaf = normal(*shape, dtype=torch.float32).requires_grad_()
        value, gradient = value_and_gradient("srip", {}, leaf)
        found = compiled(leaf)
        torch.testing.assert_close(found.detach(), value)
        torch.testing.assert_close(torch.autograd.grad(found, leaf)[0], gradient)
