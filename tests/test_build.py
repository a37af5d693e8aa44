"""From the name of a method to a regularizer: which layers are hidden, first or last, and what is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import comhe
from comhe.methods import ALIASES, METHODS
from comhe.parametrizations import report


class Classified(nn.Module):
    """A network whose last layer, in the order of registration, is not its classifier."""

    def __init__(self, **methods):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(40, 7)
        self.stem = nn.Conv2d(3, 8, 3)
        self.body = nn.Sequential(nn.Conv2d(8, 12, 3), nn.Conv2d(12, 16, 3))
        self.neck = nn.Linear(64, 40)
        for name, returned in methods.items():
            setattr(self, name, lambda returned=returned: getattr(self, returned) if returned else None)


def rules_of(regularizer: comhe.Regularizer) -> dict[str, str]:
    return {row.layer: row.rule for row in regularizer.explain().rows}


HIDDEN = {"body.0": "hidden", "body.1": "hidden", "neck": "hidden", "stem": "unprojected", "head": "hidden"}


def without(name: str) -> dict[str, str]:
    return {layer: rule for layer, rule in HIDDEN.items() if layer != name}


@pytest.mark.parametrize(
    ("model", "classifier", "expected", "why"),
    [
        (Classified(), None, "neck", "neck (the last layer)"),
        (Classified(), "head", "head", "head (named)"),
        (Classified(), False, "", "none (classifier=False)"),
        (Classified(get_output_embeddings="head"), None, "head", "head (the model's get_output_embeddings())"),
        (Classified(get_classifier="head"), None, "head", "head (the model's get_classifier())"),
        (
            Classified(get_output_embeddings="head", get_classifier="neck"),
            None,
            "head",
            "head (the model's get_output_embeddings())",
        ),
        (Classified(get_output_embeddings=None, get_classifier="head"), None, "head", "head (the model's get_cl"),
        (Classified(get_output_embeddings=None), None, "neck", "neck (the last layer)"),
        (Classified(get_classifier="head"), "neck", "neck", "neck (named)"),
    ],
)
def test_the_classifier_is_found(model, classifier, expected, why):
    regularizer = comhe.build("rp-comhe", model, dim=20, classifier=classifier)
    assert rules_of(regularizer) == without(expected)
    assert regularizer.notes["classifier"].startswith(why)
    assert why in str(regularizer.explain())


def test_the_classifier_can_be_given_as_a_module_also_one_that_holds_several_layers():
    model = Classified()
    assert rules_of(comhe.build("rp-comhe", model, dim=20, classifier=model.head)) == without("head")
    both = comhe.build("rp-comhe", model, dim=20, classifier=model.body)
    assert rules_of(both).keys() == {"stem", "neck", "head"}
    assert both.notes["classifier"] == "body.0, body.1 (given)"


def test_the_classifier_of_a_wrapped_model_is_asked_inside():
    for wrap in (nn.DataParallel, lambda model: torch.compile(model, backend="eager")):
        model = wrap(Classified(get_classifier="head"))
        assert rules_of(comhe.build("rp-comhe", model, dim=20)) == without("head")


def test_a_classifier_tied_to_an_embedding_is_the_last_layer_all_the_same():
    """Else the layer before it would silently be left out as the classifier."""

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.inner, self.outer = nn.Embedding(30, 8), nn.Linear(8, 16), nn.Linear(16, 8)
            self.head = nn.Linear(8, 30, bias=False)
            self.head.weight = self.words.weight

    regularizer = comhe.build("hs-mhe", Language())
    assert regularizer.notes["classifier"] == "head (the last layer)"
    assert rules_of(regularizer).keys() == {"inner", "outer"}
    assert rules_of(comhe.build("hs-mhe", Language(), include="*")).keys() == {"words", "inner", "outer"}


def test_the_classifier_takes_part_in_full_space_and_unprojected_when_it_has_a_weight():
    model = Classified()
    regularizer = comhe.build("rp-comhe", model, dim=20, classifier_weight=3.0, classifier="head", seed=1)
    row = next(row for row in regularizer.explain().rows if row.layer == "head")
    assert (row.rule, row.projection, row.objective, row.weight) == ("classifier", "Identity()", "E_2 full space", "3")
    rest = comhe.build("rp-comhe", model, dim=20, classifier="head", seed=1)()
    torch.testing.assert_close(regularizer(), rest + 3 * comhe.energy(model.head.weight))
    reference = comhe.build("rp-comhe-reference", model, dim=20, classifier="head")
    assert next(row.weight for row in reference.explain().rows if row.layer == "head") == "10"


@pytest.mark.parametrize("classifier", ["hed", "body", "stem.bias"])
def test_a_classifier_that_is_no_layer_is_refused(classifier):
    with pytest.raises(ValueError, match=rf"classifier='{classifier}' is no layer.*Choose one of: body.0, body.1, hea"):
        comhe.build("mhe", Classified(), classifier=classifier)
    with pytest.raises(ValueError, match=r"classifier=Linear\(...\) holds no layer of the model: give one of its"):
        comhe.build("mhe", Classified(), classifier=nn.Linear(2, 2))


def test_a_layer_left_out_or_frozen_keeps_its_role():
    """Else its neighbour would silently become the classifier, or the first convolution."""
    assert rules_of(comhe.build("rp-comhe", Classified(), dim=20, exclude="neck")) == without("neck")
    assert rules_of(comhe.build("rp-comhe", Classified(), dim=20, include=["body.*"])) == {
        "body.0": "hidden",
        "body.1": "hidden",
    }
    frozen = Classified()
    frozen.neck.requires_grad_(False)
    frozen.stem.requires_grad_(False)
    assert rules_of(comhe.build("rp-comhe", frozen, dim=20)) == {
        "body.0": "hidden",
        "body.1": "hidden",
        "head": "hidden",
    }
    assert rules_of(comhe.build("rp-comhe", Classified(), dim=20, include="head")) == {"head": "hidden"}


def test_the_first_convolution_and_small_layers_go_unprojected():
    model = Classified()
    regularizer = comhe.build("rp-comhe", model, dim=72)
    assert rules_of(regularizer) == {
        "head": "unprojected",
        "stem": "unprojected",
        "body.0": "unprojected",
        "body.1": "hidden",
    }
    assert regularizer.notes["not projected"] == "body.0, head, stem (no larger than dim=72)"
    assert rules_of(comhe.build("rp-comhe", model, dim=71))["body.0"] == "hidden"
    first_alone = comhe.build("rp-comhe", model, dim=20, classifier=False)
    assert rules_of(first_alone) == HIDDEN
    assert "not projected" not in first_alone.notes


def test_small_layers_can_be_refused_instead():
    model = Classified()
    with pytest.raises(ValueError, match=r"head, body.0: no larger than dim=72: choose a smaller dim, or small_fan_in"):
        comhe.build("rp-comhe", model, dim=72, small_fan_in="error")
    assert rules_of(comhe.build("rp-comhe", model, dim=39, small_fan_in="error")) == without("neck")
    with pytest.raises(ValueError, match="small_fan_in='skip': choose 'identity' or 'error'"):
        comhe.build("rp-comhe", model, small_fan_in="skip")


def test_embeddings_take_part_only_if_asked_for():
    model = nn.Sequential(nn.Embedding(20, 8), nn.EmbeddingBag(9, 8), nn.Linear(8, 6), nn.Linear(6, 3))
    alone = comhe.build("hs-mhe", model)
    assert rules_of(alone).keys() == {"2"}
    asked_for = "an embedding, regularised only if `include` asks for it"
    of_no_weight = "the classifier, of weight 0: see classifier_weight"
    assert dict(alone.explain().skipped) == {"0": asked_for, "1": asked_for, "3": of_no_weight}
    assert rules_of(comhe.build("hs-mhe", model, include="*")).keys() == {"0", "1", "2"}
    assert rules_of(comhe.build("hs-mhe", model, include=nn.Embedding)).keys() == {"0"}
    assert rules_of(comhe.build("hs-mhe", model, include="0")).keys() == {"0"}


def test_settings_go_where_they_belong():
    regularizer = comhe.build(
        "rp-comhe", Classified(), dim=11, num_views=3, weight=2.5, s=1.0, half_space=False, aggregate="median",
        redraw_every=9, seed=4, shared=False, jitter=0.5, exclude="head",
    )  # fmt: skip
    family = next(family for family in regularizer.plan.families if family.label == "hidden")
    assert (family.projection.dim, family.projection.num_views, family.redraw_every) == (11, 3, 9)
    assert (family.rule.weight, family.rule.s, family.rule.half_space, family.rule.aggregate) == (
        2.5,
        1.0,
        False,
        "median",
    )
    assert family.address == "hidden/72/body.0"
    assert (regularizer._jitter, regularizer._bases.seed) == (0.5, 4)


def test_the_method_is_its_table_row_and_an_alias_its_method():
    model = Classified()
    for alias, name in ALIASES.items():
        assert torch.equal(comhe.build(alias, model)(), comhe.build(name, model)())
    assert torch.equal(comhe.build("baseline", model)(), torch.zeros(()))
    energies = [comhe.energy(w.flatten(1)) for w in (model.head.weight, model.stem.weight, *body(model))]
    torch.testing.assert_close(comhe.build("mhe", model)(), sum(energies))


def body(model: Classified) -> list[torch.Tensor]:
    return [convolution.weight for convolution in model.body]


def test_unknown_names_are_answered_with_the_list_and_the_nearest():
    model = Classified()
    with pytest.raises(ValueError, match=r"no method 'rp-cohme'; did you mean 'rp-comhe'\? Choose one of: adv-comhe, "):
        comhe.build("rp-cohme", model)
    with pytest.raises(ValueError, match=r"no method 'xyzzy'. Choose one of: adv-comhe, .*srip$"):
        comhe.build("xyzzy", model)
    with pytest.raises(
        TypeError, match=r"'rp-comhe' takes no 'num_view'; did you mean 'num_views'\? Choose one of: ag"
    ):
        comhe.build("rp-comhe", model, num_view=3)
    with pytest.raises(TypeError, match="'hs-mhe' takes no 'dim'"):
        comhe.build("hs-mhe", model, dim=3)
    with pytest.raises(TypeError, match="'rp-comhe' takes no 'rank'"):
        comhe.build("rp-comhe", model, rank=3)
    with pytest.raises(ValueError, match="no layer 'stm'; did you mean 'stem'"):
        comhe.build("rp-comhe", model, include="stm")


@pytest.mark.parametrize("name", ["mhe", "rp-comhe", "ap-comhe", "rotation", "lr-bp-comhe"])
def test_bad_weights_and_models_are_refused_and_leave_the_model_alone(name):
    settings = {"rank": 4} if name == "lr-bp-comhe" else {}

    def refused(model: nn.Module, message: str, **more) -> None:
        before = list(model.state_dict()), [id(parameter) for parameter in model.parameters()]
        with pytest.raises(ValueError, match=message):
            comhe.build(name, model, **settings | more)
        assert (list(model.state_dict()), [id(parameter) for parameter in model.parameters()]) == before
        assert report(model) == []

    bad = Classified()
    with torch.no_grad():
        bad.neck.weight[0, 0] = torch.nan
    refused(
        bad,
        r"layer 'neck'(: Linear\.weight has values that are not finite| holds a non-finite weight)",
        classifier="head",
    )
    refused(Classified().to("meta"), "is on the meta device and has no values: materialise the model first")
    refused(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)), "0 is lazy and has no shape yet: run one forward pass")
    refused(Classified(), "s=-1.0: choose a finite s >= 0", s=-1.0)
    refused(Classified(), "no layer of Classified to regularise|no hidden layer", exclude="*")
    refused(nn.ReLU(), "no layer of ReLU to regularise|no hidden layer")
    whole = Classified()
    whole.stem.weight = nn.Parameter(torch.ones(8, 3, 3, 3, dtype=torch.int8), requires_grad=False)
    refused(
        whole, r"stem was asked for by name but is quantised or integer \(torch.int8\): leave it out", include="stem"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 4)), nn.Linear(4, 3))
    with pytest.raises(
        ValueError, match=r"0 uses the hook-based torch.nn.utils.weight_norm, .* torch.nn.utils.parametrizations.weight"
    ):
        comhe.build(name, old, **settings)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_summary_and_settings_that_exist(name):
    method = METHODS[name]
    assert method.summary
    if not method.parametrization:
        settings = {"lr": 0.1} if method.settings.get("step_size", 0) is None else {}
        assert comhe.build(name, Classified(), **settings)().isfinite()
