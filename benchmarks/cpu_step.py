"""What the regularizer costs on the CPU: beside a training step of CNN-9, batch 128, and for many points.

Prints medians in milliseconds of the step, of value and gradient by the executor and by the reference, and of a
redraw; then value and gradient of the half-space energy of 16,384 points in 32 dimensions, tile by tile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import comhe
from comhe import regularizer
from comhe.energies import Energy
from comhe.streaming import stream


def cnn9() -> nn.Sequential:
    layers: list[nn.Module] = []
    before = 3
    for width in (64, 128, 256):
        for _ in range(3):
            layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(4096, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 100)
    )


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    run()
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(found)


def main() -> None:
    torch.manual_seed(0)
    model = cnn9()
    images, labels = torch.randn(128, 3, 32, 32), torch.randint(100, (128,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    print(f"{torch.get_num_threads()} threads, PyTorch {torch.__version__}")
    whole = milliseconds(step, 5)
    print(f"step {whole:.0f}")
    why_not = regularizer.why_not
    for name in ("hs-mhe", "rp-comhe", "g-comhe", "ap-comhe"):
        reg = comhe.build(name, model)
        leaves = [leaf for layer in reg.layers for leaf in layer.leaves()]

        def both(reg: comhe.Regularizer = reg, leaves: list[nn.Parameter] = leaves) -> object:
            return torch.autograd.grad(reg(), leaves)

        served, redrawn = milliseconds(both, 9), milliseconds(reg.advance, 9)
        regularizer.why_not = lambda family: "to compare"  # type: ignore[assignment]
        reference = milliseconds(both, 5)
        regularizer.why_not = why_not
        share = 100 * (served + redrawn) / whole
        print(f"{name:9} {served:6.1f}  redraw {redrawn:5.1f}  {share:4.1f} % of the step  (reference {reference:.1f})")
    points = torch.randn(16_384, 32)
    tiled = milliseconds(lambda: stream(points, Energy(2.0, half_space=True), torch.float32, with_gradient=True), 5)
    print(f"16,384 points {tiled:.0f}")


if __name__ == "__main__":
    main()
