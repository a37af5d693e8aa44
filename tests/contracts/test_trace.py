"""Thirty steps of training with every method, against numbers recorded once.

A change that should not change results leaves trace.json as it is. One that should says so in its commit and records
anew: `python tests/contracts/test_trace.py`. Ten digits are compared; the last ones of sums depend on the processor.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import comhe
from comhe.methods import METHODS
from comhe.random import Stream

RECORD = Path(__file__).with_name("trace.json")


def network() -> nn.Sequential:
    """Weights from the counter, so that they are the same with every PyTorch."""
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 12)
    )
    model.extend([nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5)])
    with torch.no_grad():
        for name, parameter in model.double().named_parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 100
            parameter.copy_(Stream(0, name).normal(*parameter.shape).double() / fan_in**0.5)
    return model


def trace(method: str) -> list[float]:
    """Loss and regularizer, added, at each of thirty steps."""
    model = network()
    settings = {"dim": 6} if METHODS[method].projection not in ("Identity", "Group") else {}
    settings |= {"channels": 4} if METHODS[method].projection == "Group" else {}
    settings |= {"rank": 4} if METHODS[method].parametrization == "low-rank" else {}
    rate = 0.002 if method == "lr-bp-comhe" else 0.05  # faster, its last digits would grow to the first
    reg = comhe.build(method, model, lr=rate, **settings)
    optimizer = torch.optim.SGD([*model.parameters(), *reg.parameters()], lr=rate, momentum=0.9)
    found = []
    for step in range(30):
        inputs = Stream(0, "inputs", step).normal(8, 2, 4, 4).double()
        labels = Stream(0, "labels", step).integers(5, 8)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels) + reg()
        loss.backward()
        optimizer.step()
        reg.advance()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("method", sorted(METHODS))
def test_training_gives_the_recorded_numbers(method: str) -> None:
    assert trace(method) == pytest.approx(json.loads(RECORD.read_text())[method], rel=1e-10)


def test_every_step_depends_on_all_before() -> None:
    recorded = json.loads(RECORD.read_text())
    assert sorted(recorded) == sorted(METHODS)
    unregularised = recorded["baseline"]
    for method, losses in recorded.items():
        assert len(losses) == 30
        assert (losses[-1] == unregularised[-1]) == (method == "baseline")


if __name__ == "__main__":
    RECORD.write_text(json.dumps({method: trace(method) for method in sorted(METHODS)}, indent=0) + "\n")
