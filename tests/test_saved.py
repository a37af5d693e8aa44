"""A saved state is of the layers and projections that load it, or an error that changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import comhe
from comhe.projections import Gaussian, Identity
from comhe.rules import Rule


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))


OTHERS = {
    "views": ("ap-comhe", {"num_views": 3}, r"AnglePreserving \[1, 6, 12\] and has AnglePreserving \[3, 6, 12\]"),
    "dim": ("ap-comhe", {"dim": 8}, r"AnglePreserving \[1, 6, 12\] and has AnglePreserving \[1, 8, 12\]"),
    "kind": ("rp-comhe", {"num_views": 1}, r"AnglePreserving \[1, 6, 12\] and has Gaussian \[1, 6, 12\]"),
}


@pytest.mark.parametrize(("method", "settings", "message"), OTHERS.values(), ids=OTHERS)
def test_a_state_of_other_projections_is_refused_and_changes_nothing(method, settings, message):
    saved = comhe.build("ap-comhe", network(), dim=6, seed=1)
    saved.advance()
    other = comhe.build(method, network(), **{"dim": 6, "seed": 2} | settings)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"the saved state is of other projections: 0 had " + message):
        other.load_state_dict(saved.state_dict())
    after = other.state_dict()["_extra_state"]
    assert (after["round"], after["seed"]) == (0, 2)
    assert repr(after) == repr(before["_extra_state"])


def test_settings_that_leave_the_bases_alone_may_change():
    saved = comhe.build("ap-comhe", network(), dim=6)
    saved.advance()
    other = comhe.build("ap-comhe", network(), dim=6, step_size=0.01, weight=3.0)
    other.load_state_dict(saved.state_dict())
    assert other.round == 1


def test_addresses_that_differ_in_a_point_have_bases_of_their_own():
    model = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.Linear(20, 8)}), "a_b": nn.Linear(20, 8), "c": nn.Linear(20, 8)})
    rules = [
        Rule("a.b", Gaussian(dim=3), name="a.b"),
        Rule("a_b", Gaussian(dim=7), name="a_b"),
        Rule("*", Identity(), name="a%2Eb"),
    ]
    rows = comhe.Regularizer(model, rules).explain().rows
    assert [row.views for row in rows] == ["5 x [8, 3]", "5 x [8, 7]", "1 x [8, 20]"]
    separate = comhe.Regularizer(model, Gaussian(dim=3), shared=False)
    bases = [separate._bases.basis(index)[0] for index in range(3)]
    assert not torch.equal(bases[0], bases[1])
