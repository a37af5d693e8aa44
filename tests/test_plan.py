"""Models and settings that cannot be planned for: one clear error each, with the layer, the value and the remedy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import comhe
from comhe.projections import Gaussian, Identity
from comhe.rules import Rule


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))


REFUSED = {
    "jitter": ({"jitter": -1.0}, "jitter=-1.0: choose 0 or a small positive number"),
    "redraw": ({"redraw_every": 0}, "redraw_every=0: choose a number of rounds >= 1, or None for never"),
    "redraw word": ({"redraw_every": "never"}, "redraw_every='never': choose a number of rounds >= 1"),
    "redraw flag": ({"redraw_every": True}, "redraw_every=True: choose a number of rounds >= 1"),
    "seed": ({"seed": -1}, "seed=-1: choose an integer from 0"),
    "s": ({"s": -2.0}, "s=-2.0: choose a finite s >= 0"),
    "include": ({"include": "3"}, "no layer '3'. Choose one of: 0, 2, 4"),
    "nothing": ({"include": nn.Conv2d}, r"no layer of Sequential to regularise"),
    "excluded": ({"exclude": "*"}, r"no layer of Sequential to regularise \(0: excluded; 2: excluded; 4: excluded\)"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        comhe.Regularizer(network(), Gaussian(dim=5), **settings)


def test_a_dimension_above_the_fan_in_is_refused_where_the_projection_was_given():
    with pytest.raises(ValueError, match=r"layer '0': dim=13 is above 12, the most that its .* choose a smaller dim"):
        comhe.Regularizer(network(), Gaussian(dim=13))
    comhe.Regularizer(network(), Gaussian(dim=12))
    comhe.Regularizer(network(), [Rule("0", Identity()), Rule("*", Gaussian(dim=13))])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(value):
    model = network()
    with torch.no_grad():
        model[2].weight[3, 4] = value
    with pytest.raises(ValueError, match="layer '2' holds a non-finite weight: repair or reinitialise it first"):
        comhe.Regularizer(model, Identity())


def test_weights_without_values_are_refused():
    with pytest.raises(ValueError, match=r"0 is on the meta device and has no values: materialise the model first"):
        comhe.Regularizer(nn.Sequential(nn.Linear(4, 3, device="meta")), Identity())
    with pytest.raises(ValueError, match=r"0 is lazy and has no shape yet: run one forward pass first"):
        comhe.Regularizer(nn.Sequential(nn.LazyLinear(3)), Identity())
    with pytest.raises(ValueError, match=r"no layer of Tanh to regularise \(it has no weight matrices\)"):
        comhe.Regularizer(nn.Tanh(), Identity())


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64])
def test_integer_and_complex_weights_are_skipped_unless_asked_for_by_name(dtype):
    model = network()
    model[2].weight = nn.Parameter(torch.ones(16, 20, dtype=dtype), requires_grad=False)
    skipped = dict(comhe.Regularizer(model, Identity()).explain().skipped)
    assert str(dtype) in skipped["2"]
    for ask in ({"include": "2"}, {}):
        rule = Rule("*" if ask else "2")
        with pytest.raises(ValueError, match=rf"2 was asked for by name but is .*{dtype}.*: leave it out"):
            comhe.Regularizer(model, rule, **ask)
