"""The dry run says what will be done to which layer, as text and as data."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import comhe
from comhe.explain import Row
from comhe.projections import AnglePreserving, Gaussian, Identity
from comhe.rules import Rule


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(4, 8, 3), nn.Conv2d(8, 12, 3, groups=2), nn.Flatten(), nn.Linear(48, 20), nn.Linear(20, 10),
        nn.Linear(10, 10),
    )  # fmt: skip
    whole = nn.Sequential(*layers)
    whole[4].requires_grad_(False)
    return whole


@pytest.fixture
def regularizer(model) -> comhe.Regularizer:
    rules = [
        Rule("0", AnglePreserving(dim=6, advance_every=10), s=1.0, half_space=False, weight=0.125, name="front"),
        Rule("1", Gaussian(dim=5, num_views=2), distance="angle", weight=lambda round_: 1.0),
        Rule("3", penalty="orthogonal", weight=1e-5),
    ]
    return comhe.Regularizer(model, rules, redraw_every=200, notes={"remark": "as asked"})


EXPECTED = [
    {
        "layer": "0",
        "num_groups": 1,
        "num_neurons": 8,
        "fan_in": 36,
        "rule": "front",
        "projection": "AnglePreserving(dim=6, advance_every=10)",
        "views": "1 x [8, 6]",
        "basis": "front/36 (redrawn every 200 rounds, moved every 10 rounds)",
        "objective": "E_1 full space",
        "weight": "0.125",
    },
    {
        "layer": "1",
        "num_groups": 2,
        "num_neurons": 6,
        "fan_in": 36,
        "rule": "1",
        "projection": "Gaussian(dim=5, num_views=2)",
        "views": "2 x [6, 5]",
        "basis": "1/36 (redrawn every 200 rounds)",
        "objective": "E_2 half space, angle",
        "weight": "schedule",
    },
    {
        "layer": "3",
        "num_groups": 1,
        "num_neurons": 20,
        "fan_in": 48,
        "rule": "2",
        "projection": "Identity()",
        "views": "1 x [20, 48]",
        "basis": "none",
        "objective": "orthogonal",
        "weight": "1e-05",
    },
]


def test_each_layer_has_a_row(regularizer):
    found = regularizer.explain().as_dicts()
    assert len(found) == len(EXPECTED)
    for row, expected in zip(found, EXPECTED, strict=True):
        assert expected.items() <= row.items()
    assert [row["engine"] for row in found] == ["closed forms"] * 2 + ["reference: a penalty is no energy"]
    assert json.loads(json.dumps(found)) == found


def test_what_is_left_out_is_said_with_the_reason(regularizer):
    assert regularizer.explain().skipped == [
        ("4", "frozen (requires_grad=False)"),
        ("5", "no rule matches it"),
    ]
    assert regularizer.explain().notes == {"remark": "as asked"}


def test_the_text_is_a_table_with_the_remarks_below(regularizer):
    lines = str(regularizer.explain()).splitlines()
    assert lines[0].split() == [name.removeprefix("num_") for name in Row.__dataclass_fields__]
    assert set(lines[1]) == {"-", " "}
    assert [line.split()[0] for line in lines[2:5]] == ["0", "1", "3"]
    assert lines[5:] == [
        "remark: as asked",
        "skipped 4: frozen (requires_grad=False)",
        "skipped 5: no rule matches it",
    ]
    # Numbers stand under the end of their column's name, words under its beginning.
    assert lines[2].index("36") + 2 == lines[0].index("fan_in") + len("fan_in")
    assert lines[3].index("E_2") == lines[0].index("objective")


def test_rows_come_in_the_order_of_the_model_whatever_the_rules(model):
    rules = [Rule("3", Identity(), name="last"), Rule("*", Gaussian(dim=5), name="rest")]
    rows = comhe.Regularizer(model, rules).explain().rows
    assert [(row.layer, row.rule) for row in rows] == [("0", "rest"), ("1", "rest"), ("3", "last"), ("5", "rest")]


def test_a_basis_drawn_once_says_so(model):
    row = comhe.Regularizer(model, Gaussian(dim=5), redraw_every=None, include="3").explain().rows[0]
    assert row.basis == "0/48 (drawn once)"


def test_the_strength_is_the_one_in_force(model):
    regularizer = comhe.Regularizer(model, Rule("0", weight=lambda round_: 1.0))
    regularizer.set_weight(0.75)
    assert regularizer.explain().rows[0].weight == "0.75"


def test_explaining_changes_nothing(regularizer):
    before, buffers = str(regularizer.explain()), [tensor.clone() for tensor in regularizer.buffers()]
    assert str(regularizer.explain()) == before
    assert all(map(torch.equal, buffers, regularizer.buffers()))
    assert regularizer.round == 0


def test_wrappers_leave_no_trace_in_names(model):
    wrapped = torch.compile(nn.Sequential(model), backend="eager")
    assert [row.layer for row in comhe.Regularizer(wrapped, Identity()).explain().rows] == ["0.0", "0.1", "0.3", "0.5"]
