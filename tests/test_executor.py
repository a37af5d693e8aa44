"""The executor of linear views: the reference's numbers, whatever the views, the laws and the neurons."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import comhe
from comhe import regularizer as module
from comhe.methods import METHODS
from comhe.projections import Bilateral, Gaussian, Group, Identity
from comhe.rules import AGGREGATES, Rule


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.Conv2d(16, 24, 3),
        nn.Conv2d(24, 24, 3, groups=2),
        nn.Conv2d(24, 24, 3, groups=2),
        nn.Linear(216, 24),
        nn.Linear(216, 32),
        nn.Linear(32, 10),
    ).to(dtype)


def value_and_slopes(reg: comhe.Regularizer) -> tuple[Tensor, list[Tensor]]:
    leaves = [leaf for layer in reg.layers for leaf in layer.leaves()] + list(reg.parameters())
    value = reg()
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    return value.detach(), [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def by_reference(reg: comhe.Regularizer, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[Tensor]]:
    with monkeypatch.context() as patch:
        patch.setattr(module, "why_not", lambda family: "the reference is asked for")
        return value_and_slopes(reg)


def assert_equal(reg: comhe.Regularizer, monkeypatch: pytest.MonkeyPatch, precision: float) -> None:
    (value, slopes), (expected, others) = value_and_slopes(reg), by_reference(reg, monkeypatch)
    assert value.dtype == expected.dtype
    assert abs(value / expected - 1) <= precision
    for one, other in zip(slopes, others, strict=True):
        assert (one - other).norm() <= 10 * precision * other.norm()


LINEAR = sorted(
    name
    for name, method in METHODS.items()
    if not method.parametrization and method.settings.get("weight") != 0.0 and "penalty" not in method.settings
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LINEAR)
def test_every_method(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a few roundings: products are taken together, and pairs in cosines."""
    settings: dict[str, Any] = {"lr": 0.01} if METHODS[name].settings.get("step_size", 1) is None else {}
    if METHODS[name].projection not in ("Identity", "Group"):
        settings |= {"dim": 12}
    reg = comhe.build(name, network(dtype), **settings)
    for _ in range(2):
        assert_equal(reg, monkeypatch, {torch.float32: 1e-6, torch.float64: 1e-13}[dtype])
        reg.advance()


@pytest.mark.parametrize("aggregate", [*AGGREGATES, lambda energies: energies.square().mean(dim=-1)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_aggregation(aggregate: Any, reduction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [
        Rule("2", Gaussian(dim=9, num_views=3), aggregate=aggregate, reduction=reduction, weight=0.1),
        Rule("1", Bilateral(dim=7, num_views=2), aggregate=aggregate, reduction=reduction, half_space=False),
        Rule("*", Group(8), aggregate=aggregate, reduction=reduction, relative=reduction == "mean"),
    ]
    assert_equal(comhe.Regularizer(network(), rules, exclude="6"), monkeypatch, 2e-6)


@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("projection", [Identity(), Gaussian(dim=9), Bilateral(dim=9)], ids=repr)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_neurons_at_the_edges(scale: float, projection: Any, half_space: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero, equal, opposite, close, and of lengths far apart: with a close pair the reference's precision is kept."""
    model = nn.Linear(40, 25)
    with torch.no_grad():
        model.weight[3] = 0
        model.weight[5] = -2 * model.weight[4]
        model.weight[7] = 3 * model.weight[6] + 1e-3 * torch.randn(40) / 40**0.5
        model.weight *= scale
    reg = comhe.Regularizer(model, Rule("*", projection, half_space=half_space))
    assert_equal(reg, monkeypatch, 1e-6)
    with torch.no_grad():
        model.weight[8] = 1e-3 * model.weight[8]
    assert_equal(reg, monkeypatch, 1e-6)
    with torch.no_grad():
        model.weight[9, 3] = torch.nan
    assert reg().isnan()


def test_a_close_pair_in_one_view_leaves_the_others() -> None:
    """Some of many layers are close: values still agree with double precision to 1e-6."""
    model = nn.ModuleList([nn.Linear(40, 24) for _ in range(4)])
    with torch.no_grad():
        model[2].weight[1] = model[2].weight[0] + 1e-3 * torch.randn(40) / 40**0.5
    wide = nn.ModuleList([nn.Linear(40, 24) for _ in range(4)]).double()
    wide.load_state_dict(model.state_dict())
    settings = {"dim": 8, "classifier": False}
    value, slopes = value_and_slopes(comhe.build("rp-comhe", model, **settings))
    exact, expected = value_and_slopes(comhe.build("rp-comhe", wide, **settings))
    assert abs(value.item() / exact.item() - 1) < 1e-6
    for one, other in zip(slopes, expected, strict=True):
        assert (one - other).norm() < 2e-6 * other.norm()


def test_second_derivatives_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(7, 5).double()
    reg = comhe.build("rp-comhe", model, dim=4, num_views=2, classifier=False)

    def of(weight: Tensor) -> Tensor:
        with torch.no_grad():
            model.weight.copy_(weight)
        return torch.func.functional_call(reg, {}, ())

    direction = torch.randn(5, 7, dtype=torch.float64)

    def curvature() -> Tensor:
        (slope,) = torch.autograd.grad(reg(), model.weight, create_graph=True)
        return torch.autograd.grad((slope * direction).sum(), model.weight)[0]

    found = curvature()
    monkeypatch.setattr(module, "why_not", lambda family: "the reference is asked for")
    torch.testing.assert_close(found, curvature(), rtol=1e-10, atol=1e-12)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


def test_layers_of_a_size_share_their_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight layers cost little more than the products of each."""

    def calls(num_layers: int) -> int:
        model = nn.ModuleList([nn.Linear(60, 32) for _ in range(num_layers)])
        reg = comhe.build("rp-comhe", model, dim=20, classifier=False)
        value_and_slopes(reg)
        with Calls() as seen:
            value_and_slopes(reg)
        return seen.count

    assert calls(8) - calls(4) < 4 * 60
    served = calls(8)
    monkeypatch.setattr(module, "why_not", lambda family: "the reference is asked for")
    assert served < calls(8) / 2


def test_what_is_not_served() -> None:
    def reasons(name: str, **settings: Any) -> set[str]:
        reg = comhe.build(name, network(), **settings)
        return {module.why_not(family) for family in reg.plan.families if family.label == "hidden"}

    assert reasons("rp-comhe", dim=12) == {""}
    assert reasons("srip") == {"a penalty is no energy"}
    assert reasons("srht-comhe", dim=12) == {"its views are not formed as linear maps"}
    # A family may be on several devices, and is left to the reference if one of its layers is elsewhere.
    family = comhe.build("hs-mhe", network()).plan.families[-1]
    elsewhere = SimpleNamespace(name="far", device=torch.device("cuda"))
    family.layers.append(elsewhere)  # type: ignore[arg-type]
    assert module.why_not(family) == "far is on cuda"
