"""How far steps of each size take the objective of a stepped projection, on Gaussian neurons of CNN-9's sizes.

Prints the objective after 1, 5, 10 and 100 steps (adversarial: 1, 3, 5 and 10) over that at the start. The default step
sizes of `AnglePreserving` and `Adversarial` are read off these tables.
"""

from __future__ import annotations

import torch

from comhe.energies import Energy
from comhe.products import product
from comhe.projections.adversarial import Adversarial
from comhe.projections.angle_preserving import AnglePreserving
from comhe.random import Stream

# Neurons, fan-in, layers that share the projection.
SIZES = ((64, 64, 1), (64, 576, 2), (128, 1152, 2), (256, 2304, 1), (256, 2304, 2))


def main() -> None:
    half_space = Energy(half_space=True)
    for count, fan_in, layers in SIZES:
        stream = Stream(0, f"neurons/{count}/{fan_in}")
        neurons = [stream.normal(count, fan_in) for _ in range(layers)]
        start = Stream(0, "hidden").normal(1, 30, fan_in)

        def preserved(matrix: torch.Tensor, neurons: list[torch.Tensor] = neurons) -> float:
            return float(AnglePreserving().objective(matrix, neurons))

        def raised(matrix: torch.Tensor, neurons: list[torch.Tensor] = neurons) -> float:
            return sum(float(half_space(product(layer, matrix[0].mT))) for layer in neurons)

        for projection, value, step_sizes, shown in (
            (AnglePreserving(), preserved, (0.01, 0.1, 0.3, 1.0, 3.0), (1, 5, 10, 100)),
            (Adversarial(), raised, (0.1, 10.0, 100.0, 1000.0), (1, 3, 5, 10)),
        ):
            for step_size in step_sizes:
                matrix, ratios = start, []
                for step in range(1, max(shown) + 1):
                    matrix = matrix - step_size * projection.gradient(matrix, neurons, half_space)
                    if step in shown:
                        ratios.append(value(matrix) / value(start))
                name = type(projection).__name__
                cells = "  ".join(f"{ratio:.5f}" for ratio in ratios)
                print(f"{name:16}  N {count:3}  D {fan_in:4}  layers {layers}  step {step_size:6}  {cells}", flush=True)


if __name__ == "__main__":
    main()
