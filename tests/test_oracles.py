"""Numbers that do not come from this library: the published logs of CNN-9 at initialisation, and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import comhe
from comhe.bounds import lower_bound, uniform_expectation

WIDTHS = (64, 64, 64, 128, 128, 128, 256, 256, 256)


@pytest.fixture(scope="module")
def cnn9() -> nn.Module:
    """The paper's CNN-9 with its second-to-last layer, no bias, He-normal by fan-in: only the weights matter here."""
    model = nn.Sequential()
    for index, (fan_in, width) in enumerate(zip((3, *WIDTHS), WIDTHS, strict=False)):
        model.add_module(f"conv{index}", nn.Conv2d(fan_in, width, 3, bias=False))
    model.add_module("fc", nn.Conv2d(256, 256, 4, bias=False))
    model.add_module("classifier", nn.Linear(256, 100, bias=False))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * math.sqrt(2 / weight[0].numel()))
    return model


def value_of(name: str, model: nn.Module, **overrides: object) -> float:
    with torch.no_grad():
        return comhe.build(name, model, lr=0.1, **overrides)().item()


def test_hidden_and_total_energy_under_random_projection(cnn9: nn.Module) -> None:
    """One layer as it is, nine projected to dimension 40 by 20 matrices; ten times the classifier in full space."""
    hidden = value_of("rp-comhe-reference", cnn9, classifier_weight=0)
    total = value_of("rp-comhe-reference", cnn9)
    assert hidden == pytest.approx(5.136, abs=0.01)
    assert total - hidden == pytest.approx(5.02, abs=0.01)
    assert total == pytest.approx(10.156, abs=0.01)


@pytest.mark.parametrize("name", ["ap-comhe-reference", "adv-comhe-reference"])
def test_hidden_energy_under_learned_projections(cnn9: nn.Module, name: str) -> None:
    """Projected to dimension 30."""
    assert value_of(name, cnn9, classifier_weight=0) == pytest.approx(5.181, abs=0.01)


def test_which_layers_the_reference_projects(cnn9: nn.Module) -> None:
    rows = comhe.build("rp-comhe-reference", cnn9).explain().rows
    plain = [row.layer for row in rows if row.projection.startswith("Identity")]
    assert plain == ["conv0", "classifier"]
    assert len(rows) == 11
    assert {row.objective for row in rows if row.layer != "classifier"} == {"E_2 half space"}
    assert [row.objective for row in rows if row.layer == "classifier"] == ["E_2 full space"]
    assert [row.weight for row in rows] == ["1"] * 10 + ["10"]


def test_reference_adds_to_squared_norms_what_the_code_adds() -> None:
    """1 / (2 - 2 cos) of neurons and antipodes, with sqrt(norm^2 + 1e-4) for the norm in the cosine."""
    model = nn.Sequential(nn.Linear(20, 9, bias=False), nn.Linear(9, 4, bias=False)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model[0].weight.copy_(0.0065 * torch.randn(9, 20, generator=generator))  # norm^2 about 1e-3
    weight = model[0].weight.detach()
    points = weight / (weight.square().sum(dim=1, keepdim=True) + 1e-4).sqrt()
    both = torch.cat([points, -points])
    expected = (1 / (2 - 2 * both @ both.T))[~torch.eye(18, dtype=torch.bool)].mean().item()
    assert value_of("hs-mhe-reference", model, classifier_weight=0) == pytest.approx(expected, rel=1e-12)
    assert value_of("hs-mhe", model) != pytest.approx(expected, rel=1e-3)


def test_unprojected_energies_are_those_of_uniform_directions(cnn9: nn.Module) -> None:
    """He-normal neurons point uniformly: each layer's energy is the expectation to a few parts in a thousand."""
    reg = comhe.build("hs-mhe", cnn9, classifier_weight=10)
    for half_space in (False, True):
        energies = reg.energies(half_space=half_space)
        for layer in reg.layers:
            found = energies[layer.name].item()
            expected = uniform_expectation(layer.fan_in, half_space=half_space, num_points=layer.num_neurons)
            # Of one pair 1/d^2 is 1/2 + g/2 + g^2/2 and so on, the cosine g of variance 1/D; sixfold for safety.
            deviation = math.sqrt(1 / (4 * layer.fan_in) / math.comb(layer.num_neurons, 2))
            assert found == pytest.approx(expected, abs=6 * deviation), layer.name


def test_uniform_expectation_has_its_closed_form() -> None:
    for dim in (5, 27, 40, 256):
        mean = (dim - 2) / (2 * (dim - 3))
        assert uniform_expectation(dim) == pytest.approx(mean, rel=1e-12)
        # In half space a pair is at g or -g: 1/(2-2g) and 1/(2+2g) have one mean; antipodes are at 1/4.
        half = (1 / 4 + 2 * 63 * mean) / 127
        assert uniform_expectation(dim, half_space=True, num_points=64) == pytest.approx(half, rel=1e-12)


def simplex(num_points: int, dim: int) -> Tensor:
    """The corners of a regular simplex around the origin."""
    corners = torch.eye(num_points, dtype=torch.float64) - 1 / num_points
    return nn.functional.pad(corners, (0, dim - num_points)) if dim > num_points else corners


def test_simplex_bound_is_attained_and_no_layer_goes_below(cnn9: nn.Module) -> None:
    for num_points in (2, 3, 17, 100):
        bound = (num_points - 1) / (2 * num_points)
        assert lower_bound(num_points, 256) == pytest.approx(bound, rel=1e-12)
        assert comhe.energy(simplex(num_points, 256)).item() == pytest.approx(bound, rel=1e-12)
    # The log's classifier ends just above ten times this.
    assert 10 * lower_bound(100, 256) == pytest.approx(4.95, abs=1e-12)
    reg = comhe.build("mhe", cnn9, classifier_weight=10)
    energies = reg.energies()
    for layer in reg.layers:
        assert energies[layer.name] > lower_bound(layer.num_neurons, layer.fan_in)


def test_descent_from_random_points_reaches_the_simplex() -> None:
    """Ten points in nine dimensions: the bound is the minimum, and descent finds it."""
    points = torch.randn(10, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.LBFGS([points], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = comhe.energy(points)
        value.backward()
        return value

    optimizer.step(closure)
    assert comhe.energy(points).item() == pytest.approx(9 / 20, rel=1e-9)
    cosines = nn.functional.cosine_similarity(points[:, None], points[None], dim=-1)
    torch.testing.assert_close(
        cosines[~torch.eye(10, dtype=torch.bool)], torch.full((90,), -1 / 9).double(), atol=1e-4, rtol=0
    )
