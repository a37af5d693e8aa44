"""Weights computed from other parameters: rotation training and the low-rank form of bilateral projection.

`rotate` and `low_rank` parametrize a layer in place and must precede the optimizer; `merge` gives plain
weights back.
"""

from comhe.parametrizations.low_rank import LowRank, LowRankReport, low_rank
from comhe.parametrizations.registration import merge, report
from comhe.parametrizations.rotation import Rotation, RotationReport, rotate

__all__ = [
    "LowRank",
    "LowRankReport",
    "Rotation",
    "RotationReport",
    "low_rank",
    "merge",
    "report",
    "rotate",
]
