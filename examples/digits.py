"""Few labels, many filters: a small CNN on scikit-learn's digits, as it is, with HS-MHE and with RP-CoMHE.

Every method of a seed starts from the same weights, trains on the same few images and sees them in the same
order. `--split validation` measures the error on images apart from both the training and the test images, for
choosing settings.
"""

import argparse
import copy
import itertools
import math
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch
from scipy.special import stdtrit
from sklearn.datasets import load_digits
from torch import Tensor, nn

import comhe

METHODS = ("baseline", "hs-mhe", "rp-comhe")
NUM_CLASSES = 10
NUM_HELD_OUT = {"test": 600, "validation": 400}  # the rest is what the labelled images are drawn from


class Result(NamedTuple):
    error: float  # percent
    energy: float
    milliseconds: float  # a training step, the median


def conv(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU())


def network() -> nn.Sequential:
    return nn.Sequential(
        conv(1, 32),  # [B, 32, 8, 8]
        conv(32, 64),
        nn.MaxPool2d(2),  # [B, 64, 4, 4]
        conv(64, 64),
        nn.MaxPool2d(2),  # [B, 64, 2, 2]
        nn.Flatten(),
        nn.Linear(256, 128, bias=False),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, NUM_CLASSES),
    )


def split(num_labels: int, generator: torch.Generator) -> dict[str, tuple[Tensor, Tensor]]:
    """`num_labels` training images a class; the test images are the same for every seed."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16  # [1797, 1, 8, 8]
    labels = torch.from_numpy(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, validation, pool = order.split([*NUM_HELD_OUT.values(), len(order) - sum(NUM_HELD_OUT.values())])
    pool = pool[torch.randperm(len(pool), generator=generator)]
    available = int(labels[pool].bincount().min())
    if num_labels > available:
        raise SystemExit(f"--labels {num_labels}: choose at most {available}, as many as every class has to give")
    train = torch.cat([pool[labels[pool] == label][:num_labels] for label in range(NUM_CLASSES)])
    return {
        name: (images[index], labels[index])
        for name, index in {"train": train, "validation": validation, "test": test}.items()
    }


def energy(reg: comhe.Regularizer) -> float:
    """Half-space energy at s = 2, summed over the hidden layers; of the neurons, not of their projections."""
    return sum(each.item() for each in reg.energies(s=2.0, half_space=True).values())


def error(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """In percent."""
    model.eval()
    with torch.no_grad():
        return 100 * (model(images).argmax(1) != labels).float().mean().item()


def train(
    name: str, model: nn.Module, images: Tensor, labels: Tensor, seed: int, options: argparse.Namespace
) -> tuple[comhe.Regularizer, float]:
    """The trained model's regularizer and the median time of a step in milliseconds."""
    strength = {} if name == "baseline" else {"weight": options.weight}
    reg = comhe.build(name, model, seed=seed, **strength)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    shuffle = torch.Generator().manual_seed(seed)
    times = []
    model.train()
    for _ in range(options.steps):
        batch = torch.randperm(len(labels), generator=shuffle)[: options.batch]
        start = time.perf_counter()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch]) + reg()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reg.advance()
        times.append(1000 * (time.perf_counter() - start))
        schedule.step()
    return reg, statistics.median(times)


def run(seed: int, options: argparse.Namespace) -> dict[str, Result]:
    """Every method from the same weights, with the same images in the same order; and the weights as they began."""
    data = split(options.labels, torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    initial = network()
    results = {"initial weights": Result(math.nan, energy(comhe.build("baseline", initial)), math.nan)}
    for name in METHODS:
        model = copy.deepcopy(initial)
        reg, milliseconds = train(name, model, *data["train"], seed, options)
        results[name] = Result(error(model, *data[options.split]), energy(reg), milliseconds)
    return results


def run_all(options: argparse.Namespace) -> list[dict[str, Result]]:
    """Two seeds at a time, each on one thread: the layers are too small to share one between cores."""
    begin, found = time.perf_counter(), []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for results in pool.map(run, range(options.seeds), itertools.repeat(options)):
            errors = "  ".join(f"{name} {results[name].error:.2f} %" for name in METHODS)
            print(f"{time.perf_counter() - begin:4.0f} s  seed {len(found)}: {errors}", file=sys.stderr)
            found.append(results)
    return found


def table(found: list[dict[str, Result]], options: argparse.Namespace) -> str:
    """Mean and standard deviation over the seeds; the difference to the baseline is taken seed by seed."""

    def spread(values: list[float], digits: int, sign: str = "") -> str:
        if math.isnan(values[0]):
            return ""
        deviation = statistics.stdev(values) if len(values) > 1 else math.nan
        return f"{statistics.mean(values):{sign}.{digits}f} ± {deviation:.{digits}f}"

    rows = [("method", f"{options.split} error %", "minus baseline", "n", "hidden energy", "ms/step")]
    for name in found[0]:
        results = [each[name] for each in found]
        apart = [each[name].error - each["baseline"].error for each in found]
        rows.append(
            (
                name,
                spread([result.error for result in results], 2),
                "" if name == "baseline" else spread(apart, 2, "+"),
                str(len(found)),
                spread([result.energy for result in results], 4),
                spread([result.milliseconds for result in results], 1),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def conclusion(found: list[dict[str, Result]]) -> str:
    """What the columns mean, and what follows from them; differences to the baseline are taken seed by seed."""
    lines = [
        f"Mean ± standard deviation over {len(found)} seeds. Hidden energy: half-space energy (s = 2) of the neurons,",
        "added up over the hidden layers; lower is more evenly spread.",
    ]
    for name in METHODS[1:]:
        lower = sum(each[name].energy < each["baseline"].energy for each in found)
        apart = [each[name].error - each["baseline"].error for each in found]
        lines.append(f"{name}: energy below the baseline's in {lower} of {len(found)} seeds; {verdict(apart)}")
    return "\n".join(lines)


def verdict(apart: list[float]) -> str:
    """Whether these differences in error, one a seed, are more than the spread between seeds would make."""
    if len(apart) < 2:
        return "of the error one seed says nothing"
    mean, standard_error = statistics.mean(apart), statistics.stdev(apart) / math.sqrt(len(apart))
    if abs(mean) <= stdtrit(len(apart) - 1, 0.975) * standard_error:  # Student's t: few seeds show little
        word = "within the spread between seeds"
    else:
        word = "lower" if mean < 0 else "higher"
    return f"error {mean:+.2f}, standard error {standard_error:.2f}: {word}"


def at_least_one(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: choose at least 1")
    return number


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seeds", type=at_least_one, default=8, help="number of seeds")
    parser.add_argument("--steps", type=at_least_one, default=120, help="training steps a run")
    parser.add_argument("--labels", type=at_least_one, default=10, help="training images a class")
    parser.add_argument("--batch", type=at_least_one, default=50, help="images a step")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--weight", type=float, default=10.0, help="of the regularizers; chosen on validation images")
    parser.add_argument("--split", choices=NUM_HELD_OUT, default="test", help="measured on these images")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    split(options.labels, torch.Generator())  # refuses what cannot be, before two processes start
    found = run_all(options)
    print(table(found, options))
    print()
    print(conclusion(found))
