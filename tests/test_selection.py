"""Who is selected by what, and what an unusual model has to say."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import comhe
from comhe.discovery import discover
from comhe.projections import Gaussian, Identity
from comhe.rules import Rule


def names(model: nn.Module, *args: object, **options: object) -> list[str]:
    return [layer.name for layer in discover(model, *args, **options)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 20), nn.Tanh(), nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(8, 5)
    )


def test_a_module_selects_what_is_inside():
    model = network()
    assert names(model, model[2]) == ["2.0", "2.2"]
    assert names(model, [model[0], model[2][2]]) == ["0", "2.2"]
    assert names(model, exclude=model[2]) == ["0", "3"]
    assert names(model, "2") == ["2.0", "2.2"]
    assert names(model, exclude="2") == ["0", "3"]
    rows = comhe.Regularizer(model, [Rule(model[2], Gaussian(dim=4)), Rule("*", Identity())]).explain().rows
    assert [row.rule for row in rows] == ["1", "0", "0", "1"]


@pytest.mark.parametrize("selection", [0, [0], ["0", 1.5], {"0": None, 3: None}])
def test_what_selects_nothing_is_refused(selection):
    with pytest.raises(TypeError, match="selects no layers: give a glob on names"):
        discover(network(), selection)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(4, 10, 6))
        self.down = nn.Parameter(torch.randn(4, 6, 5))


def experts() -> nn.Module:
    return nn.ModuleDict({f"block{i}": nn.ModuleDict({"experts": Experts(), "out": nn.Linear(6, 6)}) for i in (0, 1)})


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("*", ["block0.out", "block1.out"]),
        ("block0.*", ["block0.out"]),
        ("*.gate_up", ["block0.experts.gate_up", "block1.experts.gate_up"]),
        ("*0*gate*", ["block0.experts.gate_up"]),
        (Experts, [f"block{i}.experts.{name}" for i in (0, 1) for name in ("gate_up", "down")]),
        (lambda layer: layer.fan_in == 5, ["block0.experts.down", "block1.experts.down"]),
        ("block1.experts.down", ["block1.experts.down"]),
        (nn.Module, ["block0.out", "block1.out"]),
    ],
)
def test_raw_parameters_are_found_where_they_are_meant(include, expected):
    assert names(experts(), include) == expected


def test_a_rule_may_mean_raw_parameters():
    rules = [Rule("*.gate_up", Gaussian(dim=4)), Rule("*", Identity())]
    rows = comhe.Regularizer(experts(), rules).explain().rows
    assert {row.layer: row.rule for row in rows} == {
        "block0.experts.gate_up": "0",
        "block0.out": "1",
        "block1.experts.gate_up": "0",
        "block1.out": "1",
    }


def test_rules_and_names_that_fit_nothing():
    with pytest.raises(ValueError, match="no layer 'haed'"):
        comhe.Regularizer(network(), [Rule("haed"), Rule("*")])
    with pytest.raises(ValueError, match="a rule asks for '3', which include or exclude leave out"):
        comhe.Regularizer(network(), [Rule("3"), Rule("*")], include="2.*")
    with pytest.raises(ValueError, match=r"a rule asks for 'haed', which .* does not exist"):
        comhe.Regularizer(network(), [Rule("haed"), Rule("*")], include="*")
    explanation = str(comhe.Regularizer(network(), [Rule("fc*", name="fc"), Rule("*")]).explain())
    assert "rules without a layer: fc" in explanation
    assert "rules without" not in str(comhe.build("rp-comhe", network()).explain())


@pytest.mark.parametrize("second", [Rule("2.*", name="a", s=3.0), Rule("2.*", name="0", s=3.0)])
def test_two_rules_of_one_name_are_refused(second):
    first = Rule("0", name="a" if second.name == "a" else None)
    with pytest.raises(ValueError, match=f"two rules are named '{second.name}': give each a name of its own"):
        comhe.Regularizer(network(), [first, second])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(30, 8)
        self.body = nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 30, bias=False)
        self.lm_head.weight = self.wte.weight


def test_a_tied_weight_counts_under_the_name_it_is_asked_for_by():
    model = Tied()
    assert names(model) == ["wte", "body"]
    assert names(model, ["*", "lm_head"]) == ["body", "lm_head"]
    for rules in ([Rule("lm_head"), Rule("body")], [Rule("lm_head", weight=3.0), Rule("*")]):
        assert [layer.name for layer in comhe.Regularizer(model, rules).layers] == ["body", "lm_head"]
    regularizer = comhe.Regularizer(model, [Rule("lm_head")], exclude=nn.Embedding)
    assert [layer.name for layer in regularizer.layers] == ["lm_head"]


def test_a_classifier_that_is_tied_to_an_embedding_is_regularised_if_it_has_a_weight():
    model = Tied()
    rules = {row.layer: row.rule for row in comhe.build("hs-mhe", model, classifier_weight=2.0).explain().rows}
    assert rules == {"body": "hidden", "lm_head": "classifier"}
    assert [row.layer for row in comhe.build("hs-mhe", model).explain().rows] == ["body"]


@pytest.mark.parametrize("name", ["rotation", "lr-bp-comhe"])
def test_a_parametrization_does_not_untie(name):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    model[1].weight = model[0].weight
    settings = {"rank": 3} if name == "lr-bp-comhe" else {}
    with pytest.raises(ValueError, match="would untie the weight that 0 and 1 share: give each its own, or leave it"):
        comhe.build(name, model, **settings)
    assert model[1].weight is model[0].weight


def test_columns_of_layers_that_have_a_layout_of_their_own():
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 8, 3), "lstm": nn.LSTM(4, 4), "attention": nn.MultiheadAttention(8, 2)})
    model["linear"] = nn.Linear(5, 7)
    plain, columns = discover(model), discover(model, columns="*")
    assert [layer.name for layer in plain] == [layer.name for layer in columns]
    shapes = {layer.name: (layer.num_neurons, layer.fan_in) for layer in columns}
    assert shapes["linear"] == (5, 7)
    assert shapes["conv"] == (8, 27)
    assert shapes["lstm.weight_ih_l0.cell"] == (4, 4)
    with pytest.raises(ValueError, match="columns='conv': a Conv2d has a layout of its own, leave it out"):
        discover(model, columns="conv")
    with pytest.raises(ValueError, match="columns='lineer': no layer of that name; did you mean 'linear'"):
        discover(model, columns="lineer")


def test_a_parameter_that_a_subclass_adds_is_no_neuron():
    class Standardised(nn.Conv2d):
        def __init__(self):
            super().__init__(4, 8, 3, groups=2)
            self.gain = nn.Parameter(torch.ones(8, 1, 1, 1))
            self.scale = nn.Parameter(torch.ones(1, 4, 1, 1))

    class Peephole(nn.LSTM):
        def __init__(self):
            super().__init__(4, 4)
            self.peephole = nn.Parameter(torch.ones(3, 4))

    model = nn.Sequential(Standardised(), Peephole(), nn.Linear(4, 3))
    assert {layer.name.split(".")[0] for layer in discover(model)} == {"0", "1", "2"}
    assert not any("gain" in layer.name or "peephole" in layer.name for layer in discover(model))
    assert dict(discover(model).skipped)["1.peephole"] == "a raw parameter, read row by row"


def test_one_input_is_left_alone_unless_named():
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1))
    regularizer = comhe.build("hs-mhe", model)
    assert dict(regularizer.plan.skipped)["0"] == "of fan-in 1, where every neuron is +1 or -1"
    assert regularizer() < 1
    assert names(model, "0") == ["0"]


def test_pruned_layers_are_refused_where_selected():
    model = network()
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(ValueError, match=r"^0 uses the hook-based torch.nn.utils.prune, .* call .*prune.remove first"):
        discover(model)
    assert names(model, exclude="0") == ["2.0", "2.2", "3"]
    assert names(model, "2") == ["2.0", "2.2"]
    prune.remove(model[0], "weight")
    assert names(model)[0] == "0"


def test_layers_without_values_are_refused_where_selected():
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.LazyLinear(3), "c": nn.Linear(3, 3, device="meta")})
    model["norms"] = nn.ModuleList([nn.LazyBatchNorm1d(), nn.BatchNorm1d(3, device="meta")])
    assert names(model, "a") == ["a"]
    assert names(model, exclude=["b", "c"]) == ["a"]
    assert names(model, exclude=[nn.LazyLinear, "c*"]) == ["a"]
    with pytest.raises(ValueError, match="b is lazy and has no shape yet"):
        discover(model, exclude="c")
    with pytest.raises(ValueError, match="c is on the meta device and has no values"):
        discover(model, exclude="b")
    with pytest.raises(ValueError, match="b is lazy and has no shape yet"):
        discover(model, lambda layer: layer.fan_in == 3)  # cannot be asked
    model["c"].requires_grad_(False)
    assert names(model, exclude="b") == ["a"]


def test_quantised_layers_are_listed_and_refused_by_name():
    class Packed(nn.Module):
        """As dynamically quantised layers are: the weight is a method."""

        def weight(self):
            return torch.ones(4, 4)

    class Integers(nn.Module):
        """As GPTQ keeps them."""

        def __init__(self):
            super().__init__()
            self.register_buffer("qweight", torch.ones(4, 4, dtype=torch.int32))

    model = nn.ModuleDict({"packed": Packed(), "integers": Integers(), "plain": nn.Linear(4, 3)})
    found = discover(model)
    assert [layer.name for layer in found] == ["plain"]
    assert found.skipped == [
        ("packed", "quantised or integer (packed)"),
        ("integers.qweight", "quantised or integer (torch.int32)"),
    ]
    with pytest.raises(ValueError, match=r"packed was asked for by name but is quantised or integer \(packed\)"):
        discover(model, "packed")


def test_empty_weights_are_listed():
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(0, 5), nn.Linear(5, 4))
    assert discover(model).skipped == [("0", "empty, of shape (5, 0)")]


def test_weights_of_eight_bits_are_served():
    model = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 3))
    model[0].weight = nn.Parameter(model[0].weight.detach().to(torch.float8_e4m3fn), requires_grad=True)
    expected = comhe.energy(model[0].weight.float(), half_space=True)
    assert torch.equal(comhe.build("hs-mhe", model)(), expected)


@pytest.mark.parametrize("model", ["model", nn.Linear(3, 3).state_dict(), None])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match=f"model={type(model).__name__}: give a torch.nn.Module"):
        comhe.build("hs-mhe", model)


def test_every_kind_of_layer_can_be_pickled_with_its_regularizer():
    model = nn.ModuleList([nn.Conv2d(4, 8, 3, groups=2), nn.ConvTranspose2d(4, 8, 3), nn.GRU(4, 4), nn.Linear(6, 5)])
    regularizer = comhe.build("rp-comhe", model, dim=3, include=["*", "3"])
    regularizer.advance()
    again, copy = pickle.loads(pickle.dumps((model, regularizer)))
    assert torch.equal(copy(), regularizer())
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.mul_(torch.rand_like(parameter))
    assert not torch.equal(copy(), regularizer())  # it reads the model that came with it
    copy.advance()
    regularizer.advance()
    model.load_state_dict(again.state_dict())
    assert torch.equal(copy(), regularizer())


def test_a_layer_asked_for_by_name_is_hidden_even_if_it_is_the_last():
    model = network()
    regularizer = comhe.build("hs-mhe", model, include=["2.0", "3"])
    assert {row.layer: row.rule for row in regularizer.explain().rows} == {"2.0": "hidden", "3": "hidden"}
    assert "classifier: none (3 is asked for by name)" in str(regularizer.explain())


@pytest.mark.parametrize("classifier", [True, ["3"], 3])
def test_a_classifier_of_the_wrong_kind_is_refused(classifier):
    with pytest.raises(TypeError, match="give a module of the model, a layer's name, or False for none"):
        comhe.build("hs-mhe", network(), classifier=classifier)
