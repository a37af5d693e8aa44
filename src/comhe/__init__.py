"""comhe: hyperspherical-energy regularization for PyTorch.

Shapes: neurons [..., N, D] (N neurons of fan-in D, a row each; leading dimensions separate sets between which angles
mean nothing), basis (a projection's tensors), views [..., C, points, dim] (C of them), energy [..., C].
"""

from comhe import parametrizations, penalties, projections
from comhe.attach import attach
from comhe.audit import audit
from comhe.build import build
from comhe.discovery import discover
from comhe.energies import energy
from comhe.parametrizations import merge
from comhe.regularizer import Regularizer
from comhe.rules import Rule
from comhe.sampling import sampled_energy

__version__ = "0.1.0"

__all__ = [
    "Regularizer",
    "Rule",
    "attach",
    "audit",
    "build",
    "discover",
    "energy",
    "merge",
    "parametrizations",
    "penalties",
    "projections",
    "sampled_energy",
]
