"""Which weights are found, under which names, and what is left out, refused and why."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize

from comhe.discovery import discover, named_modules
from comhe.names import did_you_mean
from comhe.selection import matches


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.scale = nn.Parameter(torch.ones(8))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.experts = nn.Parameter(torch.randn(2, 6, 8))
        self.gru = nn.GRU(8, 4)
        self.head = nn.Linear(8, 10)


BLOCK = [
    "conv",
    "attention.in_proj_weight.q",
    "attention.in_proj_weight.k",
    "attention.in_proj_weight.v",
    "attention.out_proj",
]
GRU = [f"gru.weight_{of}_l0.{gate}" for of in ("ih", "hh") for gate in ("reset", "update", "new")]
FOUND = ["embedding", *(f"blocks.{i}.{name}" for i in (0, 1) for name in BLOCK), *GRU, "head"]


def names(model: nn.Module, *args: object, **options: object) -> list[str]:
    return [layer.name for layer in discover(model, *args, **options)]


def skipped(model: nn.Module, *args: object, **options: object) -> dict[str, str]:
    found = discover(model, *args, **options).skipped
    assert len(dict(found)) == len(found)
    return dict(found)


# What is found.


def test_everything_that_holds_neurons_in_the_order_of_the_model() -> None:
    model = Model()
    assert names(model) == FOUND
    assert all(model.get_submodule(layer.name) is layer.module for layer in discover(model, include=nn.Linear))
    assert skipped(model) == {
        "depthwise": "depthwise: one filter a channel, and filters of different channels are not comparable",
        "experts": "a raw parameter, read row by row",
    }


def test_a_model_that_is_one_layer() -> None:
    (layer,) = discover(nn.Linear(3, 4))
    assert (layer.name, layer.num_neurons, layer.fan_in) == ("weight", 4, 3)
    assert names(nn.Linear(3, 4), "weight") == ["weight"]


def test_a_model_without_neurons() -> None:
    found = discover(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3), nn.LayerNorm(3)))
    assert found == []
    assert found.skipped == []


def test_names_are_those_of_the_state() -> None:
    model = Model()
    state = model.state_dict()
    for layer in discover(model):
        whole = layer.name.removesuffix(f".{layer.part.name}") if layer.part.name else layer.name
        assert any(key in state for key in (whole, f"{whole}.weight"))


# What is asked for.


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("head", ["head"]),
        ("head.weight", ["head"]),
        ("head*", ["head"]),
        ("blocks.*", [name for name in FOUND if name.startswith("blocks")]),
        ("blocks.?.conv", ["blocks.0.conv", "blocks.1.conv"]),
        ("blocks.[1].conv", ["blocks.1.conv"]),
        ("*.conv.weight", ["blocks.0.conv", "blocks.1.conv"]),
        ("blocks.0.attention.in_proj_weight", [f"blocks.0.attention.in_proj_weight.{p}" for p in "qkv"]),
        ("*.in_proj_weight", [f"blocks.{i}.attention.in_proj_weight.{p}" for i in (0, 1) for p in "qkv"]),
        ("blocks.0.attention.in_proj_weight.k", ["blocks.0.attention.in_proj_weight.k"]),
        ("*.update", ["gru.weight_ih_l0.update", "gru.weight_hh_l0.update"]),
        ("gru.weight_hh_l0", GRU[3:]),
        ("depthwise", ["depthwise"]),
        ("experts", ["experts"]),
        ("nothing*", []),
        ([], []),
        (nn.Linear, ["blocks.0.attention.out_proj", "blocks.1.attention.out_proj", "head"]),
        (nn.Conv2d, ["blocks.0.conv", "blocks.1.conv"]),
        (nn.RNNBase, GRU),
        (nn.Module, FOUND),
        (lambda layer: layer.fan_in == 27, ["blocks.0.conv", "blocks.1.conv"]),
        (lambda layer: isinstance(layer.module, nn.Embedding), ["embedding"]),
        (
            ["embedding", nn.Conv2d, lambda layer: layer.num_neurons == 10],
            ["embedding", "blocks.0.conv", "blocks.1.conv", "head"],
        ),
        (("blocks.0.conv", "experts"), ["experts", "blocks.0.conv"]),
        (["experts", "*"], ["experts", *FOUND]),
    ],
    ids=itertools.count(),
)
def test_include(include: object, expected: list[str]) -> None:
    assert names(Model(), include) == expected


@pytest.mark.parametrize(
    ("exclude", "left_out"),
    [
        ("head", ["head"]),
        ("head.weight", ["head"]),
        ("blocks.*", [name for name in FOUND if name.startswith("blocks")]),
        ("*.in_proj_weight", [f"blocks.{i}.attention.in_proj_weight.{p}" for i in (0, 1) for p in "qkv"]),
        ("*.q", ["blocks.0.attention.in_proj_weight.q", "blocks.1.attention.in_proj_weight.q"]),
        (nn.RNNBase, GRU),
        (lambda layer: layer.fan_in == 27, ["blocks.0.conv", "blocks.1.conv"]),
        ([nn.Embedding, "head"], ["embedding", "head"]),
        ("no*", []),
    ],
    ids=itertools.count(),
)
def test_exclude(exclude: object, left_out: list[str]) -> None:
    model = Model()
    assert names(model, exclude=exclude) == [name for name in FOUND if name not in left_out]
    reasons = skipped(model, exclude=exclude)
    assert [name for name, reason in reasons.items() if reason == "excluded"] == left_out


def test_exclude_is_stronger_than_include() -> None:
    assert names(Model(), "blocks.*", exclude=nn.Linear) == [n for n in FOUND if "blocks" in n and "out" not in n]
    assert names(Model(), ["head", "embedding"], exclude="h*") == ["embedding"]


def test_a_selector_of_one_layer() -> None:
    (layer,) = discover(Model(), "blocks.0.attention.in_proj_weight.q")
    for selector in (layer.name, "blocks.0.attention.in_proj_weight", "blocks*", nn.MultiheadAttention):
        assert matches(selector, layer)
    for selector in ("q", "blocks.0.attention.in_proj_weight.k", nn.Linear, lambda layer: False):
        assert not matches(selector, layer)


def test_columns() -> None:
    model = nn.ModuleDict({"up": nn.Linear(3, 4), "down": nn.Linear(5, 5)})
    model.register_parameter("raw", nn.Parameter(torch.randn(6, 2)))
    model.register_parameter("square", nn.Parameter(torch.randn(3, 3)))
    assert skipped(model) == {
        "raw": "a raw parameter, read row by row",
        "square": "a raw parameter, read row by row; square, so its orientation is a guess",
    }
    found = {layer.name: layer for layer in discover(model, columns=["down", "square", "r*"])}
    assert list(found) == ["raw", "square", "up", "down"]
    assert torch.equal(found["up"].read(), model["up"].weight)
    assert torch.equal(found["down"].read(), model["down"].weight.T)
    assert torch.equal(found["square"].read(), model.square.T)
    assert torch.equal(found["raw"].read(), model.raw.T)


class Stored(nn.Module):
    """A layer from elsewhere, whose sizes do not tell rows from columns."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features = self.out_features = self.nx = self.nf = 4
        self.weight = nn.Parameter(torch.randn(4, 4))


def test_an_unknown_weight_of_many_dimensions_is_listed_and_read_by_rows() -> None:
    model = nn.Module()
    model.register_parameter("kernel", nn.Parameter(torch.randn(5, 2, 3, 3)))
    assert skipped(model) == {"kernel": "a raw parameter, read as rows along its first dimension"}
    (layer,) = discover(model, "kernel")
    assert torch.equal(layer.read(), model.kernel.flatten(1))


@pytest.mark.parametrize(
    ("path", "columns"),
    [("transformers.pytorch_utils.Conv1D", True), ("torch_geometric.nn.dense.linear.Linear", False)],
)
def test_square_weights_of_known_layers(path: str, columns: bool) -> None:
    model = nn.ModuleDict({"layer": Stored()})
    assert names(model) == []
    assert skipped(model) == {"layer": "a raw parameter, read row by row; square, so its orientation is a guess"}
    (layer,) = discover(model, "layer")  # asked for by name, a guess is what there is
    assert torch.equal(layer.read(), model["layer"].weight)

    module, _, name = path.rpartition(".")
    known = type(name, (Stored,), {"__module__": module})
    inherited = type("Own", (known,), {})
    for kind in (known, inherited):
        (layer,) = discover(nn.ModuleDict({"layer": kind()}))
        weight = layer.module.weight
        assert torch.equal(layer.read(), weight.T if columns else weight)


# Tied weights.


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 8), "middle": nn.Linear(8, 8), "head": nn.Linear(8, 10)})
    model["head"].weight = model["embedding"].weight
    return model


def test_tied_weights_count_once() -> None:
    assert names(tied()) == ["embedding", "middle"]
    assert skipped(tied()) == {"head": "tied to embedding, which counts once"}


def test_a_module_used_twice_counts_once() -> None:
    layer = nn.Linear(3, 3)
    assert names(nn.Sequential(layer, nn.ReLU(), layer)) == ["0"]


def test_a_module_of_two_parents_counts_once_and_is_no_tie() -> None:
    layer = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": nn.Sequential(layer), "b": nn.Sequential(layer)})
    assert names(model) == ["a.0"]
    assert skipped(model) == {}


def test_a_tied_weight_is_found_under_the_name_that_is_wanted() -> None:
    assert names(tied(), "head") == ["head"]
    assert names(tied(), nn.Linear) == ["middle", "head"]
    assert names(tied(), ["head", nn.Linear]) == ["middle", "head"]


def test_a_tied_weight_that_is_excluded_is_so_under_every_name() -> None:
    assert names(tied(), exclude=nn.Embedding) == ["middle"]
    assert skipped(tied(), exclude=nn.Embedding) == {
        "embedding": "excluded",
        "head": "tied to embedding, which is excluded",
    }


def test_a_raw_parameter_that_is_not_asked_for_does_not_own_its_twin() -> None:
    model = nn.Module()
    model.table = nn.Parameter(torch.randn(10, 8))
    model.head = nn.Linear(8, 10)
    model.head.weight = model.table
    assert names(model) == ["head"]
    assert names(model, "table") == ["table"]


def test_tied_parametrized_weights() -> None:
    model = tied()
    del model["middle"]
    tying = parametrizations.weight_norm(model["embedding"]).parametrizations.weight
    parametrizations.weight_norm(model["head"])
    for index in (0, 1):
        setattr(model["head"].parametrizations.weight, f"original{index}", getattr(tying, f"original{index}"))
    assert names(model) == ["embedding"]


def test_both_names_of_a_tied_weight() -> None:
    with pytest.raises(ValueError, match="head was asked for by name but is tied to embedding, which counts once"):
        discover(tied(), ["embedding", "head"])


# What cannot be served is skipped and listed, and refused if asked for by name.


def with_int8() -> nn.Module:
    model = Model()
    model.head.weight = nn.Parameter(torch.ones(10, 8, dtype=torch.int8), requires_grad=False)
    return model


def with_frozen() -> nn.Module:
    model = Model()
    model.head.requires_grad_(False)
    return model


def with_complex() -> nn.Module:
    model = Model()
    model.head.weight = nn.Parameter(torch.ones(10, 8, dtype=torch.complex64))
    return model


def with_packed() -> nn.Module:
    """Four bits a weight, two to a byte, in one long column."""
    model = Model()
    model.head.weight = nn.Parameter(torch.ones(40, 1, dtype=torch.uint8), requires_grad=False)
    return model


UNFIT = [
    (with_int8, r"quantised or integer \(torch.int8\)"),
    (with_packed, r"quantised or integer \(torch.uint8\)"),
    (with_frozen, r"frozen \(requires_grad=False\)"),
    (with_complex, r"complex \(torch.complex64\)"),
]


@pytest.mark.parametrize(("make", "reason"), UNFIT, ids=[make.__name__ for make, _ in UNFIT])
def test_unfit(make: Callable[[], nn.Module], reason: str) -> None:
    model = make()
    for include in (None, nn.Linear, "h*", "*", lambda layer: True):
        found = discover(model, include)
        assert "head" not in [layer.name for layer in found]
        assert re.fullmatch(reason, dict(found.skipped)["head"])
    for name in ("head", "head.weight"):
        for include in (name, [name], [nn.Conv2d, name]):
            with pytest.raises(ValueError, match=rf"^head was asked for by name but is {reason}: leave it out$"):
                discover(model, include)


def test_every_part_of_a_frozen_layer_is_listed() -> None:
    model = Model()
    model.blocks[0].attention.requires_grad_(False)
    listed = [name for name, reason in discover(model).skipped if "frozen" in reason]
    assert listed == [f"blocks.0.{name}" for name in BLOCK if name.startswith("attention")]
    with pytest.raises(ValueError, match=r"in_proj_weight.q was asked for by name but is frozen"):
        discover(model, "blocks.0.attention.in_proj_weight")


def test_frozen_weights_can_be_admitted() -> None:
    assert names(with_frozen(), frozen=True) == FOUND
    assert names(with_frozen(), "head", frozen=True) == ["head"]
    assert "head" not in names(with_int8(), frozen=True)


def test_a_whole_frozen_model() -> None:
    found = discover(Model().requires_grad_(False))
    assert found == []
    assert [name for name, _ in found.skipped if name not in ("depthwise", "experts")] == FOUND


def test_a_frozen_parametrized_weight() -> None:
    model = nn.ModuleDict({"layer": parametrizations.weight_norm(nn.Conv2d(3, 4, 3))})
    model.requires_grad_(False)
    assert skipped(model) == {"layer": "frozen (requires_grad=False)"}
    model["layer"].parametrizations.weight.original0.requires_grad_(True)  # the lengths alone
    assert names(model) == ["layer"]


# Errors.


@pytest.mark.parametrize("name", ["haed", "head.bias", "block", "blocks.0.norm", "blocks.0.scale", "experts.0"])
def test_an_unknown_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"^no layer '{re.escape(name)}'") as error:
        discover(Model(), [nn.Linear, name])
    choices = str(error.value).partition("Choose one of: ")[2].split(", ")
    assert {*FOUND, "depthwise", "experts"} <= set(choices)
    if name in ("haed", "head.bias"):
        assert "did you mean 'head'?" in str(error.value)


def test_the_nearest_name() -> None:
    assert did_you_mean("haed", ["tail", "head"]) == "; did you mean 'head'? Choose one of: head, tail"
    assert did_you_mean("xyz", ["tail", "head"]) == ". Choose one of: head, tail"
    assert did_you_mean("xyz", []) == ". Choose one of: (none)"


def test_lazy_layers() -> None:
    for lazy in (nn.LazyLinear(4), nn.LazyConv2d(4, 3)):
        model = nn.ModuleDict({"body": nn.Sequential(nn.Flatten(), lazy)})
        with pytest.raises(ValueError, match=r"^body\.1 is lazy and has no shape yet: run one forward pass first"):
            discover(model)
    model = nn.Sequential(nn.LazyLinear(4))
    model(torch.randn(2, 3))
    assert names(model) == ["0"]


def test_meta_tensors() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"body": nn.Linear(3, 4)})
    with pytest.raises(ValueError, match=r"^body is on the meta device and has no values: materialise the model first"):
        discover(model)
    assert names(model.to_empty(device="cpu")) == ["body"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("old", ["weight_norm", "spectral_norm"])
def test_old_hooks(old: str) -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(3, 4))})
    getattr(nn.utils, old)(model["body"][0])
    message = (
        rf"^body\.0 uses the hook-based torch\.nn\.utils\.{old}, whose weight is stale outside forward: "
        rf"use torch\.nn\.utils\.parametrizations\.{old}$"
    )
    for include in (None, "body.0", "body.0.weight", nn.Linear, lambda layer: True):
        with pytest.raises(ValueError, match=message):
            discover(model, include)
    assert names(model, nn.Conv2d) == []
    found = discover(model, exclude="body")
    assert (list(found), found.skipped) == ([], [("body.0", "excluded")])
    assert discover(model, exclude="body.*").skipped == [("body.0", "excluded")]
    getattr(nn.utils, f"remove_{old}")(model["body"][0])
    assert names(model) == ["body.0"]
    with pytest.raises(ValueError, match=r"^Linear uses the hook-based"):
        discover(getattr(nn.utils, old)(nn.Linear(3, 4)))


def test_other_hooks_are_welcome() -> None:
    model = Model()
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, inputs: None)
    assert names(model) == FOUND


# Wrappers leave no trace in names.


class DistributedDataParallel(nn.Module):
    """Stands for torch's, which needs a process group; a wrapper is known by its class's name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class FullyShardedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


def checkpointed(model: Model) -> nn.Module:
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    return checkpoint_wrapper(model)


def compiled_inside(model: Model) -> nn.Module:
    model.blocks[0].attention = torch.compile(model.blocks[0].attention)
    model.head = torch.compile(model.head)
    return model


WRAPPERS: list[Callable[[Model], nn.Module]] = [
    torch.compile,
    nn.DataParallel,
    DistributedDataParallel,
    FullyShardedDataParallel,
    checkpointed,
    compiled_inside,
    lambda model: torch.compile(DistributedDataParallel(torch.compile(checkpointed(model)))),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrappers(wrap: Callable[[Model], nn.Module]) -> None:
    model = Model()
    plain = discover(model)
    wrapped = wrap(model)
    found = discover(wrapped)
    assert wrapped is not model or wrap is compiled_inside
    assert [layer.name for layer in found] == FOUND
    for layer, same in zip(found, plain, strict=True):
        assert layer.module is same.module
    assert names(wrapped, "blocks.0.conv") == ["blocks.0.conv"]
    assert skipped(wrapped) == skipped(Model())


def test_a_module_of_the_same_attribute_is_no_wrapper() -> None:
    """Only the known wrappers disappear: somebody's own `module` is part of the name."""
    inner = nn.Module()
    inner.module = nn.Linear(3, 4)
    assert names(inner) == ["module"]
    assert names(nn.ModuleDict({"_orig_mod": nn.Linear(3, 4)})) == ["_orig_mod"]


# Parametrized layers keep their names.


def test_names_of_parametrized_layers() -> None:
    model = Model()
    parametrizations.spectral_norm(model.blocks[0].conv)
    parametrizations.weight_norm(model.head)
    parametrizations.orthogonal(model.blocks[1].attention, "in_proj_weight")
    assert sorted(names(model)) == sorted(FOUND)
    assert not any("parametrizations" in name for name, _ in named_modules(model))


def test_learned_parts_of_a_parametrization_are_no_layers() -> None:
    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return self.inner(weight)

    model = nn.ModuleDict({"layer": nn.Linear(3, 4)})
    parametrize.register_parametrization(model["layer"], "weight", Through())
    assert names(model) == ["layer"]


def test_discovery_reads_and_changes_nothing() -> None:
    model = Model()
    parametrizations.spectral_norm(model.head)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    found = discover(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(found) == len(FOUND)
