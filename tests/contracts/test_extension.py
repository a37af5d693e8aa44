"""Adding a projection touches one source file: the contract tests find it there, and hold it to what it declares."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small_cnn

import comhe

CONTRACT = Path(__file__).with_name("test_projections.py")
ROOT = CONTRACT.parents[2]

SPARSE = '''
from dataclasses import dataclass

from comhe.projections._base import Basis, Layer, Map, Projection, at_least_one
from comhe.random import Stream


@dataclass(frozen=True)
class SparseSigns(Projection):
    """Signs of which two in three are zero (Achlioptas 2003)."""

    dim: int = 30
    num_views: int = 5

    def __post_init__(self) -> None:
        at_least_one(dim=self.dim, num_views=self.num_views)

    def draw(self, layer: Layer, stream: Stream) -> Basis:
        shape = self.num_views, self.dim, layer.fan_in
        return (stream.signs(*shape) * (stream.integers(3, *shape) == 0),)

    def maps(self, basis: Basis) -> tuple[Map, ...]:
        return (Map(right=basis[0]),)
'''

# Wrong in four ways, each in the teeth of one promise.
WRONG = """
from dataclasses import dataclass
from typing import ClassVar

import torch

from comhe.projections._base import Map, Projection


@dataclass(frozen=True)
class Wrong(Projection):
    scale_invariance: ClassVar = "global"

    dim: int = 30

    def draw(self, layer, stream):
        return (torch.randn(1, self.dim, layer.fan_in, device=stream.device),)

    def maps(self, basis):
        return (Map(right=basis[0]),)

    def views(self, neurons, basis):
        basis[0].mul_(1.01)
        return (1.5 * super().views(neurons, basis)[0],)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the library with one file more, and one that breaks promises."""
    home = tmp_path_factory.mktemp("library")
    shutil.copytree(Path(comhe.__file__).parent, home / "comhe", ignore=shutil.ignore_patterns("__pycache__"))
    (home / "comhe" / "projections" / "sparse_signs.py").write_text(SPARSE)
    (home / "comhe" / "projections" / "wrong.py").write_text(WRONG)
    return home


@pytest.fixture(scope="module")
def outcome(library: Path) -> dict[str, dict[str, list[str]]]:
    """Of each of the two projections the names of the contract tests collected for it, by outcome."""
    environment = {**small_cnn.environment(), "PYTHONPATH": str(library)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-rA", "--tb=no"]
    run = subprocess.run(
        [*command, "-k", "SparseSigns or Wrong", str(CONTRACT)],
        env=environment,
        cwd=library,
        text=True,
        capture_output=True,
    )
    found: dict[str, dict[str, list[str]]] = {name: {"PASSED": [], "FAILED": []} for name in ("SparseSigns", "Wrong")}
    for how, test, name in re.findall(
        r"^(PASSED|FAILED) \S*::(\w+)\[\S*?(SparseSigns|Wrong)", run.stdout, re.MULTILINE
    ):
        found[name][how].append(test)
    assert found["SparseSigns"]["PASSED"], run.stdout[-4000:] + run.stderr[-4000:]
    return found


def test_file_added_is_collected_and_meets_the_contract(outcome: dict[str, dict[str, list[str]]]) -> None:
    """By every single contract test, and nothing but the file itself was added."""
    passed = outcome["SparseSigns"]["PASSED"]
    assert outcome["SparseSigns"]["FAILED"] == []
    assert set(passed) == set(re.findall(r"^def (test_\w+)", CONTRACT.read_text(), re.MULTILINE))
    assert len(passed) > 50


@pytest.mark.parametrize(
    "promise",
    [
        "test_basis_is_a_function_of_seed_key_and_epoch",
        "test_drawing_leaves_the_global_generator_alone",
        "test_maps_equal_views",
        "test_methods_are_pure",
        "test_scale_invariance_is_what_is_declared",
        "test_counts_below_one_are_refused",
        "test_resumed_run_has_the_same_bits",
    ],
)
def test_broken_promise_is_seen(outcome: dict[str, dict[str, list[str]]], promise: str) -> None:
    assert promise in outcome["Wrong"]["FAILED"]


def test_library_itself_has_neither() -> None:
    assert not {"SparseSigns", "Wrong"} & comhe.projections.REGISTRY.keys()
