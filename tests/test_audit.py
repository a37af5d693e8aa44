"""The audit of models with known faults, of two models, and of files."""

import copy
import importlib
import json
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import comhe
from comhe.audit import Audit, audit
from comhe.bounds import lower_bound, uniform_expectation
from comhe.discovery import discover

geometry = importlib.import_module("comhe.geometry")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, groups=2),
        nn.Flatten(),
        nn.Linear(24, 40),
        nn.Linear(40, 10),
    )


def by_name(found: Audit):
    return {row.name: row for row in found.rows}


@pytest.mark.parametrize("distance", ["chord", "angle"])
@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("s", [0.0, 1.0, 2.0])
def test_each_layer(model, s, half_space, distance):
    found = audit(model, s=s, half_space=half_space, distance=distance)
    assert [row.name for row in found.rows] == ["0", "3", "5", "6"]
    settings = {"half_space": half_space, "distance": distance}
    for row, layer in zip(found.rows, discover(model), strict=True):
        neurons = layer.read().detach()
        assert (row.num_neurons, row.fan_in, row.num_groups) == (*neurons.shape[-2:], layer.num_groups)
        count, dim = row.num_neurons, row.fan_in
        assert row.energy == pytest.approx(comhe.energy(neurons, s, **settings).mean().item(), rel=1e-5)
        assert row.expected == uniform_expectation(dim, s, num_points=count, **settings)
        assert row.bound == lower_bound(count, dim, s, **settings)
        assert row.excess == pytest.approx((row.energy - row.bound) / (row.expected - row.bound), rel=1e-12)
        assert 0.5 < row.excess < 1.5
        assert 30 < row.smallest_angle < 90
        assert (row.num_close_pairs, row.num_dead, row.num_nonfinite, row.change) == (0, 0, 0, None)
    assert found.total.energy == sum(row.energy for row in found.rows)
    assert found.total.smallest_angle == min(row.smallest_angle for row in found.rows)
    assert found.total.num_neurons == 16 + 24 + 40 + 10
    assert 0.5 < found.total.excess < 1.5


def test_angles_are_per_group(model):
    row = by_name(audit(model))["3"]
    assert (row.num_neurons, row.fan_in, row.num_groups) == (12, 72, 2)
    with torch.no_grad():
        model[3].weight[12] = model[3].weight[0]  # in another group: no pair
    assert by_name(audit(model))["3"].num_close_pairs == 0
    with torch.no_grad():
        model[3].weight[13] = model[3].weight[12]
    assert by_name(audit(model))["3"].num_close_pairs == 1


def test_planted_faults(model):
    with torch.no_grad():
        weight = model[5].weight
        weight[1] = 3 * weight[0]  # a duplicate
        weight[3] = -weight[2]  # opposite
        weight[4] = 0  # dead
        weight[5] *= 1e-9  # as good as dead
        weight[6, 0] = math.nan
        weight[7, 0] = math.inf
        part = weight[8] / weight[8].norm()
        normal = torch.linalg.qr(torch.stack([part, torch.ones(24)]).T)[0][:, 1]
        weight[9] = 5 * (math.cos(math.radians(3)) * part + math.sin(math.radians(3)) * normal)
    full, half = (by_name(audit(model, half_space=half))["5"] for half in (False, True))
    assert (full.num_close_pairs, half.num_close_pairs) == (1, 2)
    for row in (full, half):
        assert (row.num_dead, row.num_nonfinite) == (2, 2)
        assert row.smallest_angle == pytest.approx(0, abs=1e-5)
        assert row.num_neurons == 40
        assert math.isfinite(row.energy)
        assert row.excess > 1e3
    kept = torch.cat([weight[:6], weight[8:]]).detach()
    assert full.energy == pytest.approx(comhe.energy(kept).item(), rel=1e-5)
    assert by_name(audit(model, close_angle=3.01))["5"].num_close_pairs == 2
    assert by_name(audit(model, close_angle=2.99))["5"].num_close_pairs == 1
    whole = audit(model)
    assert (whole.total.num_close_pairs, whole.total.num_dead, whole.total.num_nonfinite) == (1, 2, 2)


def test_a_smallest_angle_in_half_space_is_that_of_lines():
    turns = torch.tensor([0.0, 100.0, 170.0]).deg2rad()
    weights = {"fc.weight": torch.stack([turns.cos(), turns.sin()], dim=1).double()}
    assert audit(weights).rows[0].smallest_angle == pytest.approx(70, rel=1e-6)
    assert audit(weights, half_space=True).rows[0].smallest_angle == pytest.approx(10, rel=1e-6)


def test_the_bound_and_the_expectation_frame_the_excess():
    simplex = torch.eye(6, dtype=torch.float64) - 1 / 6
    assert audit({"fc.weight": simplex}).rows[0].excess == pytest.approx(0, abs=1e-9)
    frame = audit({"fc.weight": torch.eye(6, 9, dtype=torch.float64)}, half_space=True)
    assert frame.rows[0].excess == pytest.approx(0, abs=1e-9)
    many = torch.randn(3000, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert audit({"fc.weight": many}).rows[0].excess == pytest.approx(1, abs=0.1)


def test_one_neuron_three_dimensions_and_empty_layers():
    found = audit({"one.weight": torch.randn(1, 5), "xyz.weight": torch.eye(3), "none.weight": torch.zeros(0, 4)})
    one, xyz = found.rows
    assert (one.energy, one.expected, one.bound, one.excess, one.smallest_angle) == (0, 0, 0, None, None)
    assert (xyz.expected, xyz.excess, xyz.smallest_angle) == (math.inf, None, pytest.approx(90))
    assert found.total.excess is None
    assert found.skipped == [("none", "empty, of shape (0, 4)")]
    assert "inf" in str(found)
    row = found.as_dicts()[1]
    assert row["expected"] is None


def test_neurons_that_are_all_dead_or_none_of_them_finite():
    found = audit({"zero.weight": torch.zeros(5, 8), "nan.weight": torch.full((5, 8), math.nan)})
    zero, nan = found.rows
    assert (zero.num_dead, zero.energy, zero.smallest_angle) == (5, 0.5, pytest.approx(90))
    assert (nan.num_nonfinite, nan.num_dead, nan.energy, nan.smallest_angle) == (5, 0, 0, None)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_of_a_layer_changes_nothing(model, scale):
    weight = model[5].weight.detach().double()
    usual, scaled = (audit({"fc.weight": w}).rows[0] for w in (weight, (scale * weight).float()))
    assert scaled.energy == pytest.approx(usual.energy, rel=1e-5)
    assert (scaled.num_dead, scaled.num_nonfinite) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_low_precision_is_computed_in_full(model, dtype):
    weight = model[5].weight.detach().to(dtype)
    assert audit({"fc.weight": weight}).rows[0].energy == pytest.approx(comhe.energy(weight.float()).item(), rel=1e-5)


@pytest.mark.parametrize("half_space", [False, True])
def test_the_size_of_a_block_changes_nothing(model, monkeypatch, half_space):
    def numbers():
        rows = audit(model.double(), half_space=half_space).rows
        return [(row.energy, row.expected, row.bound, row.excess, row.smallest_angle) for row in rows]

    whole = numbers()
    for block in (1, 50, 41 * 7):
        monkeypatch.setattr(geometry, "_BLOCK_ELEMENTS", block)
        for row, expected in zip(numbers(), whole, strict=True):
            assert row == pytest.approx(expected, rel=1e-11)


def test_nothing_of_the_model_changes(model):
    parametrizations.spectral_norm(model[5])
    parametrizations.weight_norm(model[6])
    model.train()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    first = audit(model)
    assert audit(model).rows == first.rows
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_layers_are_audited_and_unfit_ones_listed(model):
    model[0].requires_grad_(False)
    model.append(nn.Linear(10, 10))
    model[-1].weight = nn.Parameter(torch.ones(10, 10, dtype=torch.int8), requires_grad=False)
    assert [layer.name for layer in discover(model)] == ["3", "5", "6"]
    assert [layer.name for layer in discover(model, frozen=True)] == ["0", "3", "5", "6"]
    found = audit(model)
    assert [row.name for row in found.rows] == ["0", "3", "5", "6"]
    assert found.skipped == [("7", "quantised or integer (torch.int8)")]
    assert "skipped 7: quantised or integer" in str(found)
    assert [row.name for row in audit(model, include="0").rows] == ["0"]


def test_selection(model):
    assert [row.name for row in audit(model, include=nn.Linear, exclude="6").rows] == ["5"]
    assert [row.name for row in audit(model.state_dict(), include=["5", "6"]).rows] == ["5", "6"]
    with pytest.raises(ValueError, match="no layer 'fc'"):
        audit(model, include="fc")
    assert audit(model, include="5", columns="5").rows[0].fan_in == 40
    assert audit(model.state_dict(), include="5", columns="5").rows[0].fan_in == 40


def test_the_difference_of_two_models(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[5].weight[1] = other[5].weight[0]
        other[5].weight[2] = 0
    del other[6]
    other.append(nn.Identity())
    other.append(nn.Linear(40, 7))
    found = audit(model, other)
    first, second = by_name(audit(model)), by_name(audit(other))
    rows = by_name(found)
    assert list(rows) == ["0", "3", "5", "6"]
    assert rows["0"].change.energy == rows["0"].change.excess == rows["0"].change.smallest_angle == 0
    change = rows["5"].change
    assert change.energy == second["5"].energy - first["5"].energy > 0
    assert change.excess == second["5"].excess - first["5"].excess
    assert change.smallest_angle == second["5"].smallest_angle - first["5"].smallest_angle < 0
    assert (change.num_close_pairs, change.num_dead, change.num_nonfinite) == (1, 1, 0)
    assert rows["6"].change is None
    assert (found.only_in_model, found.only_in_other) == (["6"], ["7"])
    assert found.total.change.energy == pytest.approx(change.energy, rel=1e-6)  # of the layers both have
    assert (found.total.change.num_close_pairs, found.total.change.num_dead) == (1, 1)
    text = str(found)
    assert "only in the first model: 6" in text
    assert "only in the other model: 7" in text
    assert "+energy" in text
    assert "+energy" not in str(audit(model))


@pytest.mark.parametrize("suffix", ["pt", "mapping"])
def test_a_file_and_a_state_dict_are_as_the_model(model, tmp_path, suffix):
    """But for the groups, of which neither knows."""
    source = model.state_dict()
    if suffix == "pt":
        torch.save(source, tmp_path / "model.pt")
        source = tmp_path / "model.pt"
    rows, expected = by_name(audit(source)), by_name(audit(model))
    assert list(rows) == list(expected)
    assert all(rows[name] == expected[name] for name in ("0", "5", "6"))
    assert (rows["3"].num_neurons, rows["3"].num_groups) == (24, 1)
    found = audit(model, str(source) if suffix == "pt" else source, include=["0", "5", "6"])
    assert found.total.change.energy == 0
    assert found.only_in_model == found.only_in_other == []


def test_rows_make_the_round_trip_through_json(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight[0] = math.nan
    rows = audit(model, other).as_dicts()
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert rows[0]["change"]["num_nonfinite"] == 1
    assert set(rows[0]) >= {"name", "num_neurons", "fan_in", "num_groups", "energy", "expected", "bound", "excess"}


def test_the_table_is_aligned(model):
    lines = str(audit(model, copy.deepcopy(model))).splitlines()
    assert lines[0].split()[:6] == ["layer", "N", "D", "groups", "energy", "uniform"]
    assert [line.split()[0] for line in lines[2:7]] == ["0", "3", "5", "6", "total"]
    ends = {len(line) for line in lines[:7]}
    assert len(ends) == 1
    for column in lines[1].split("  "):
        assert set(column) == {"-"}
    assert all(line.isascii() for line in lines)


def test_a_model_without_neurons():
    found = audit(nn.ReLU())
    assert (found.rows, found.total.energy, found.total.smallest_angle, found.as_dicts()) == ([], 0, None, [])
    assert str(found).splitlines()[-1].startswith("total")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"close_angle": 0.0}, "close_angle=0.0: choose"),
        ({"close_angle": 91}, "close_angle=91: choose"),
        ({"s": -1}, "s=-1: choose"),
        ({"distance": "arc"}, "distance='arc'"),
    ],
)
def test_errors_name_the_value(model, settings, message):
    with pytest.raises(ValueError, match=message):
        audit(model, **settings)
