"""How far steps of each size take the objective of a stepped projection, on Gaussian neurons of many sizes.

Two tables, off which the default step sizes of `AnglePreserving` and `Adversarial` are read:

    alone      the neurons stay: the objective after 1, 5, 10 and 60 steps of P over that at the start
    by turns   adversarial only: P and the neurons step in turn, these down by a rate of 0.1 to 0.001;
               the largest energy of the view in 300 rounds, and how the neurons' own energy has changed

With "shift" the neurons have a mean direction, as trained ones often do: at 1 their cosines are 1/2.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from comhe.energies import Energy
from comhe.products import product
from comhe.projections.adversarial import Adversarial
from comhe.projections.angle_preserving import AnglePreserving
from comhe.random import Stream

HALF_SPACE = Energy(half_space=True)
# Neurons, fan-in, layers that share the projection: a small layer, those of CNN-9, and wide ones.
SIZES = (
    (16, 64, 1),
    (64, 64, 1),
    (64, 576, 2),
    (128, 1152, 2),
    (256, 2304, 1),
    (256, 2304, 2),
    (1024, 1024, 1),
    (2048, 512, 1),
    (4096, 64, 1),
)


def layers_of(count: int, fan_in: int, layers: int, shift: float) -> list[Tensor]:
    stream = Stream(0, f"neurons/{count}/{fan_in}")
    return [stream.normal(count, fan_in) + shift * Stream(0, "mean").normal(fan_in) for _ in range(layers)]


def start_of(fan_in: int) -> Tensor:
    return Stream(0, "hidden").normal(1, 30, fan_in)


def preserved(matrix: Tensor, neurons: list[Tensor]) -> float:
    return float(AnglePreserving().objective(matrix, neurons))


def raised(matrix: Tensor, neurons: list[Tensor]) -> float:
    return sum(float(HALF_SPACE(product(layer.double(), matrix[0].mT), torch.float32)) for layer in neurons)


def alone() -> None:
    for count, fan_in, layers in SIZES:
        for shift in (0.0, 1.0):
            neurons, start = layers_of(count, fan_in, layers, shift), start_of(fan_in)
            for projection, value, step_sizes in (
                (AnglePreserving(), preserved, (3.0, 10.0, 30.0, 100.0, 300.0)),
                (Adversarial(), raised, (0.1, 1.0, 10.0, 100.0)),
            ):
                # A wide layer's steps take seconds.
                shown = [step for step in (1, 5, 10, 60) if step == 1 or step * count**2 < 1e8]
                for step_size in step_sizes:
                    matrix, ratios = start, []
                    for step in range(1, max(shown) + 1):
                        matrix = matrix - step_size * projection.gradient(matrix, neurons, HALF_SPACE)
                        if step in shown:
                            ratios.append(value(matrix, neurons) / value(start, neurons))
                    name = type(projection).__name__
                    sizes = f"N {count:4}  D {fan_in:4}  layers {layers}  shift {shift:g}"
                    cells = "  ".join(f"{ratio:.5f}" for ratio in ratios)
                    print(f"{name:16}  {sizes}  step {step_size:5g}  {cells}", flush=True)


def by_turns() -> None:
    sizes = ((64, 64), (64, 576), (128, 1152))
    for (count, fan_in), shift in itertools.product(sizes, (0.0, 0.5, 1.0)):
        for rate in (0.1, 0.01, 0.001):
            for step_size in (0.1, 1.0, 10.0, 100.0):
                projection, lr = Adversarial(step_size=step_size), torch.tensor(rate)
                # He's initialisation: squared norms of 2.
                weights = layers_of(count, fan_in, 1, shift)[0] * (2 / fan_in) ** 0.5
                before, basis, largest = float(HALF_SPACE(weights)), (start_of(fan_in),), 0.0
                for _ in range(300):
                    basis = projection.advance(basis, [weights], HALF_SPACE, lr)
                    leaf = weights.clone().requires_grad_()
                    (view,) = projection.views(leaf.double(), projection.refine(basis, [leaf], HALF_SPACE, lr))
                    value = HALF_SPACE(view, torch.float32).mean()
                    (gradient,) = torch.autograd.grad(value, leaf)
                    weights = weights - rate * gradient
                    largest = max(largest, value.item())
                case = f"N {count:4}  D {fan_in:4}  shift {shift:g}  rate {rate:5g}  step {step_size:5g}"
                own = f"{before:.4f} -> {float(HALF_SPACE(weights)):.4f}"
                print(f"by turns  {case}  largest {largest:9.3f}  own {own}", flush=True)


if __name__ == "__main__":
    by_turns()
    alone()
