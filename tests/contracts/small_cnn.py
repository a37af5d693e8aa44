"""A network with every kind of layer that methods treat apart, and its training in rounds, for the contract tests."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor, nn

import comhe
from comhe.methods import METHODS, find_method

HIDDEN = ("conv1", "conv2", "grouped", "fc")
RATES = (0.02, 0.01, 0.005, 0.0025)


class SmallCNN(nn.Module):
    """3 -> 8 (the first convolution), 8 -> 16 and 16 -> 16 in two groups (one fan-in: 72), 64 -> 48, classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.grouped = nn.Conv2d(16, 16, 3, groups=2)
        self.fc = nn.Linear(64, 48)
        self.classifier = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, 8, 8] -> [B, 10]."""
        hidden = self.grouped(self.conv2(self.conv1(images).relu()).relu()).relu()
        return self.classifier(self.fc(hidden.flatten(1)).relu())


def small_cnn(seed: int = 0, alike: float = 0.0) -> SmallCNN:
    """The same weights for the same seed, the global generator untouched.

    `alike` adds to every neuron that multiple of its own length along one direction common to the layer: neurons then
    crowd together, far above the energy of uniform ones.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        model = SmallCNN()
    with torch.no_grad():
        for parameter in model.parameters():
            fan_in = max(1, parameter[0].numel())
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (2 / fan_in) ** 0.5)
            if parameter.ndim > 1:
                parameter += alike * (2 / fan_in) ** 0.5 * torch.randn(parameter[0].shape, generator=generator)
    return model


def build(name: str, model: nn.Module, **overrides: object) -> comhe.Regularizer:
    """`comhe.build` with sizes that suit a small network, and a learning rate for the methods that take one."""
    if find_method(name).parametrization == "low-rank":
        overrides.setdefault("rank", 6)
    return comhe.build(name, model, **{"lr": RATES[0], **overrides})


def is_silent(name: str) -> bool:
    """Methods that find their layers and add nothing to the loss."""
    return find_method(name).settings.get("weight") == 0.0


def bases(reg: comhe.Regularizer) -> list[Tensor]:
    """Every tensor of every basis, as it is now."""
    return [t.detach().clone() for index in range(len(reg.plan.families)) for t in reg._bases.basis(index)]


def with_basis() -> list[str]:
    return [name for name in METHODS if bases(build(name, small_cnn()))]


def weights_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def same_bits(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def batch(round_: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + round_)
    images = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float32).to(dtype)
    return images, torch.randint(0, 10, (4,), generator=generator)


def train(model: nn.Module, reg: comhe.Regularizer, num_rounds: int) -> list[Tensor]:
    """Plain gradient steps on task + regularizer from the regularizer's round on; the regularizer's losses."""
    losses = []
    learned = [*weights_of(model), *reg.parameters()]
    for _ in range(num_rounds):
        round_ = reg.round
        images, labels = batch(round_, next(model.parameters()).dtype)
        value = reg()
        losses.append(value.detach().clone())
        assert value.isfinite()
        loss = nn.functional.cross_entropy(model(images), labels) + value
        gradients = torch.autograd.grad(loss, learned, allow_unused=True)
        rate = RATES[round_ % len(RATES)]
        with torch.no_grad():
            for parameter, gradient in zip(learned, gradients, strict=True):
                if gradient is not None:  # the factors of a low-rank weight start several times as large
                    parameter -= rate * gradient / gradient.norm().clamp(min=1)
        reg.advance(lr=rate)
    return losses


def environment() -> dict[str, str]:
    """Of a process that must round as this one does: as many threads."""
    return {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
