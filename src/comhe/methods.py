"""The rows of the paper by their names: a table from name to settings. `build` makes a regularizer of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from comhe.names import did_you_mean

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Method:
    """What a method does with hidden layers, and with the classifier where that has a weight."""

    summary: str
    projection: str = "Identity"
    settings: Settings = field(default_factory=dict)  # of the projection, of `Rule` and of `Regularizer`
    classifier_weight: float = 0.0
    parametrization: Literal["", "rotation", "low-rank"] = ""


# The authors' code adds 1e-4 to squared norms and gives the classifier, in full space, the weight 10. Its learned
# bases move with the network's learning rate, shrink under the code's L2 term and belong to one layer for good.
_CODE: Settings = {"norm_eps": 1e-4}
_CODE_LEARNED: Settings = {
    **_CODE,
    "step_size": None,
    "weight_decay": 5e-7,
    "shared": False,
    "redraw_every": None,
}

METHODS: dict[str, Method] = {
    "baseline": Method("no regularization: the layers are found and measured", settings={"weight": 0.0}),
    "orthogonal": Method("squared cosines (Rodriguez 2017)", settings={"penalty": "orthogonal", "weight": 1e-5}),
    "orthonormal": Method("||WW' - I||", settings={"penalty": "orthonormal", "weight": 1e-5}),
    "srip": Method("spectral norm of WW' - I (Bansal 2018)", settings={"penalty": "srip", "weight": 0.01}),
    "mma": Method("the smallest angles, maximised (Wang 2020)", settings={"penalty": "mma", "weight": 0.07}),
    "mhe": Method("energy of the neurons", settings={"half_space": False}),
    "hs-mhe": Method("energy of the neurons and their antipodes"),
    "rp-comhe": Method("random projections", "Gaussian"),
    "rp-comhe-max": Method("random projections, the worst of them", "Gaussian", {"aggregate": "max"}),
    "ap-comhe-alter": Method(
        "angle-preserving projection, moved between steps",
        "AnglePreserving",
        {"mode": "alternating", "advance_every": 10, "num_steps": 5},
    ),
    "ap-comhe-unroll": Method("angle-preserving projection, a step unrolled", "AnglePreserving"),
    "adv-comhe": Method("adversarial projection, a step unrolled", "Adversarial"),
    "g-comhe": Method("groups of 8 consecutive input channels", "Group"),
    "g-comhe-stochastic": Method("random groups of 8 input channels", "Group", {"stochastic": True}),
    "bp-comhe": Method("bilateral projection", "Bilateral"),
    "lr-bp-comhe": Method("low-rank bilateral weights, energy of their factors", parametrization="low-rank"),
    "rotation": Method(
        "fixed neurons, a learned rotation a layer", settings={"weight": 0.0}, parametrization="rotation"
    ),
    "rademacher-comhe": Method("random projections by signs", "Rademacher"),
    "srht-comhe": Method("subsampled randomized Hadamard transforms", "SRHT"),
    "count-sketch-comhe": Method("count-sketches", "CountSketch"),
    "mlp-comhe": Method("random perceptrons", "MLP"),
    "learned-comhe": Method("a projection trained with the network: the paper's negative result", "Learned"),
    "mhe-reference": Method("MHE as the code has it", settings={**_CODE, "half_space": False}, classifier_weight=10.0),
    "hs-mhe-reference": Method("HS-MHE as the code has it", settings=_CODE, classifier_weight=10.0),
    "rp-comhe-reference": Method(
        "RP-CoMHE as the code has it",
        "Gaussian",
        {**_CODE, "dim": 40, "num_views": 20},
        classifier_weight=10.0,
    ),
    "ap-comhe-reference": Method(
        "AP-CoMHE as the code has it",
        "AnglePreserving",
        {**_CODE_LEARNED, "root": True},
        classifier_weight=10.0,
    ),
    "adv-comhe-reference": Method(
        "Adv-CoMHE as the code has it",
        "Adversarial",
        {**_CODE_LEARNED, "num_steps": 10, "ascend_full_space": True},
        classifier_weight=10.0,
    ),
}

ALIASES = {"orthoreg": "orthogonal", "ap-comhe": "ap-comhe-unroll"}


def find_method(name: str) -> Method:
    if not isinstance(name, str):
        raise TypeError(f"a method is given by its name, not by {type(name).__name__}; a model comes after it")
    key = ALIASES.get(name, name)
    if key not in METHODS:
        raise ValueError(f"no method {name!r}{did_you_mean(name, [*METHODS, *ALIASES])}")
    return METHODS[key]
