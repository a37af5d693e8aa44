"""Rules: which layer falls under which, what a rule makes of the views, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import comhe
from comhe import penalties
from comhe.bounds import uniform_expectation
from comhe.projections import Bilateral, Gaussian, Group, Identity
from comhe.random import Stream
from comhe.rules import AGGREGATES, Rule


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5)).double()


def rules_of(regularizer: comhe.Regularizer) -> dict[str, str]:
    return {row.layer: row.rule for row in regularizer.explain().rows}


def test_the_first_match_wins_and_the_rest_is_skipped():
    first, second = Rule("0", name="first"), Rule(["0", "2"], name="second")
    assert rules_of(comhe.Regularizer(network(), [first, second])) == {"0": "first", "2": "second"}
    assert rules_of(comhe.Regularizer(network(), [second, first])) == {"0": "second", "2": "second"}
    assert ("4", "no rule matches it") in comhe.Regularizer(network(), [first, second]).explain().skipped


def test_rules_match_by_glob_type_predicate_and_several_of_these():
    model = nn.Sequential(nn.Conv1d(3, 4, 2), nn.Flatten(), nn.Linear(8, 6), nn.Linear(6, 4), nn.Embedding(5, 3))
    rules = [
        Rule(nn.Conv1d, name="type"),
        Rule(lambda layer: layer.fan_in == 8, name="predicate"),
        Rule(["9*", "3.weight"], name="glob"),
        Rule([nn.Embedding, "none*"], name="several"),
    ]
    expected = {"0": "type", "2": "predicate", "3": "glob", "4": "several"}
    assert rules_of(comhe.Regularizer(model, rules)) == expected


def test_a_rule_that_names_a_raw_parameter_finds_it():
    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts, self.head = nn.Parameter(torch.randn(3, 6, 4)), nn.Linear(4, 2)

    by_rule = comhe.Regularizer(Raw(), [Rule("experts"), Rule("head")])
    assert [row.num_groups for row in by_rule.explain().rows] == [3, 1]
    assert rules_of(comhe.Regularizer(Raw(), Rule("*"))) == {"head": "0"}
    with pytest.raises(ValueError, match="no layer 'expert'; did you mean 'experts'"):
        comhe.Regularizer(Raw(), Rule("expert"))


def test_the_loss_is_the_weighted_sum_over_rules_and_layers():
    model = network()
    settings = {"s": 1.0, "half_space": False, "distance": "angle"}
    rules = [
        Rule("0", weight=0.5, name="a", **settings),
        Rule("2", weight=3.0, reduction="sum", name="b"),
        Rule("4", weight=-2.0, norm_eps=0.1, name="c"),
    ]
    weights = [model[i].weight for i in (0, 2, 4)]
    expected = (
        0.5 * comhe.energy(weights[0], 1.0, distance="angle")
        + 3.0 * comhe.energy(weights[1], half_space=True, reduction="sum")
        - 2.0 * comhe.energy(weights[2], half_space=True, norm_eps=0.1)
    )
    torch.testing.assert_close(comhe.Regularizer(model, rules)(), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", sorted(AGGREGATES))
def test_aggregates_make_one_number_of_the_views(name):
    by_hand = {
        "mean": lambda e: sum(e) / len(e),
        "max": max,
        "median": lambda e: sorted(e)[(len(e) - 1) // 2],
        "logmeanexp": lambda e: math.log(sum(map(math.exp, e)) / len(e)),
    }
    model = network()
    regularizer = comhe.Regularizer(model, Rule("0", Gaussian(dim=5, num_views=4), aggregate=name), seed=7)
    matrices = Stream(7, "0/12").normal(4, 5, 12).double()
    energies = [float(comhe.energy(model[0].weight.detach() @ p.T, half_space=True)) for p in matrices]
    assert regularizer().item() == pytest.approx(by_hand[name](energies), rel=1e-12)
    custom = Rule("0", Gaussian(dim=5, num_views=4), aggregate=lambda values: values[..., 1])
    assert comhe.Regularizer(model, custom, seed=7)().item() == pytest.approx(energies[1], rel=1e-12)


def test_several_views_add_up_by_their_shares():
    model = network()
    both = comhe.Regularizer(model, Rule("0", Bilateral(dim=4)), seed=1)
    stream = Stream(1, "0/(20, 12)")
    right, left = stream.normal(1, 4, 12).double(), stream.normal(1, 4, 20).double()
    weight = model[0].weight
    expected = comhe.energy(weight @ right[0].T, half_space=True) + comhe.energy(left[0] @ weight, half_space=True)
    torch.testing.assert_close(both(), expected, rtol=1e-12, atol=0)

    groups = comhe.Regularizer(model, Rule("0", Group(channels=5)))
    parts = [comhe.energy(weight[:, columns], half_space=True) for columns in (slice(5), slice(5, 12))]
    torch.testing.assert_close(groups(), sum(parts) / 2, rtol=1e-12, atol=0)


@pytest.mark.parametrize("penalty", sorted(penalties.PENALTIES))
def test_a_penalty_takes_the_energys_place(penalty):
    model = network()
    expected = penalties.PENALTIES[penalty](model[0].weight) * 0.25
    torch.testing.assert_close(comhe.Regularizer(model, Rule("0", penalty=penalty, weight=0.25))(), expected)


def test_a_penalty_of_ones_own():
    def squares(neurons: Tensor) -> Tensor:
        return neurons.square().sum(dim=(-2, -1))

    model = network()
    regularizer = comhe.Regularizer(model, Rule("0", penalty=squares))
    torch.testing.assert_close(regularizer(), model[0].weight.square().sum())
    assert regularizer.explain().rows[0].objective == "squares"


def test_separate_sets_of_one_weight_are_averaged_as_their_pairs_are():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 12, 3, groups=4)).double()
    sets = model[0].weight.detach().view(4, 3, 18)
    of_mean = comhe.Regularizer(model, Rule("*"))()
    of_sum = comhe.Regularizer(model, Rule("*", reduction="sum"))()
    of_penalty = comhe.Regularizer(model, Rule("*", penalty="orthonormal"))()
    torch.testing.assert_close(of_mean, comhe.energy(sets, half_space=True).mean())
    torch.testing.assert_close(of_sum, comhe.energy(sets, half_space=True, reduction="sum").sum())
    torch.testing.assert_close(of_penalty, penalties.orthonormal(sets).sum())


@pytest.mark.parametrize("distance", ["chord", "angle"])
@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("projection", [Identity(), Gaussian(dim=12, num_views=8), Group(channels=10)], ids=str)
def test_relative_is_about_one_for_uniform_neurons_of_any_size(distance, half_space, reduction, projection):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 200, bias=False)).double()
    nn.init.normal_(model[0].weight)
    rule = Rule("*", projection, distance=distance, half_space=half_space, reduction=reduction, relative=True)
    assert comhe.Regularizer(model, rule)().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_relative_is_about_one_for_sets_and_for_views_that_add_up(reduction):
    torch.manual_seed(0)
    grouped = nn.Conv2d(64, 128, 3, groups=4)
    for layer, projection in ((grouped, Identity()), (grouped, Gaussian(dim=20)), (nn.Linear(80, 90), Bilateral(30))):
        rule = Rule("*", projection, reduction=reduction, relative=True)
        assert 0.98 < comhe.Regularizer(layer, rule)() < 1.02


def test_relative_divides_by_the_expectation_alone():
    model = network()
    plain = comhe.Regularizer(model, Rule("0", half_space=False))()
    relative = comhe.Regularizer(model, Rule("0", half_space=False, relative=True))()
    torch.testing.assert_close(relative, plain / uniform_expectation(12), rtol=1e-12, atol=0)


REFUSED = {
    "aggregate": (ValueError, {"aggregate": "maen"}, "aggregate='maen'; did you mean 'mean'. Choose one of: logm"),
    "penalty": (ValueError, {"penalty": "orthogonl"}, "penalty='orthogonl'; did you mean 'orthogonal'"),
    "projection": (TypeError, {"projection": "gaussian"}, r"projection='gaussian': give a projection, as comhe.proj"),
    "class": (TypeError, {"projection": Gaussian}, "give a projection"),
    "s": (ValueError, {"s": -1.0}, r"s=-1.0: choose a finite s >= 0"),
    "nan": (ValueError, {"s": math.nan}, "s=nan: choose a finite s"),
    "distance": (ValueError, {"distance": "cosine"}, "distance='cosine': choose 'chord' or 'angle'"),
    "reduction": (ValueError, {"reduction": "none"}, "reduction='none': choose 'mean' or 'sum'"),
    "norm": (ValueError, {"norm_eps": -1e-4}, "norm_eps=-0.0001: choose 0 or a small positive number"),
    "weight": (ValueError, {"weight": math.inf}, "weight=inf: choose a finite number"),
    "relative penalty": (ValueError, {"relative": True, "penalty": "mma"}, "a penalty has none"),
}


@pytest.mark.parametrize(("kind", "settings", "message"), REFUSED.values(), ids=REFUSED)
def test_a_rule_refuses_what_it_cannot_serve(kind, settings, message):
    with pytest.raises(kind, match=message):
        Rule(**settings)


@pytest.mark.parametrize("half_space", [False, True])
def test_relative_leaves_a_single_neuron_at_zero(half_space):
    model = nn.Sequential(nn.Linear(12, 1))
    loss = comhe.Regularizer(model, Rule("*", Gaussian(dim=3), half_space=half_space, relative=True))()
    assert loss == 0
    assert not torch.autograd.grad(loss, model[0].weight)[0].any()


def test_relative_is_refused_where_there_is_no_finite_expectation():
    rule = Rule("0", Gaussian(dim=3), relative=True)
    with pytest.raises(ValueError, match=r"relative=True: E_2 half space of uniform points in 3 dimensions is inf"):
        comhe.Regularizer(network(), rule)
    with pytest.raises(ValueError, match=r"relative=True: E_0 half space .* is -0.3.*; choose s > 0 or relative=False"):
        comhe.Regularizer(network(), Rule("0", s=0.0, relative=True))


def test_an_unknown_projection_is_answered_with_the_list_and_the_nearest():
    with pytest.raises(AttributeError, match=r"no projection 'Gausian'; did you mean 'Gaussian'. Choose one of: Adv"):
        _ = comhe.projections.Gausian


def test_settings_of_a_rule_belong_into_the_rule():
    regularizer = comhe.Regularizer(network(), Gaussian(dim=5), s=1.0, weight=2.0)
    assert regularizer.plan.rules[0].s == 1.0
    with pytest.raises(TypeError, match=r"s: settings of a rule belong into Rule\(...\) where rules are given"):
        comhe.Regularizer(network(), Rule("*"), s=1.0)
    with pytest.raises(TypeError, match="sigma"):
        comhe.Regularizer(network(), Gaussian(dim=5), sigma=1.0)
