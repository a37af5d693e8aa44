"""Two processes whose global generators differ draw and move the same bases: they never exchange one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import small_cnn
import torch
from small_cnn import same_bits, with_basis

import comhe
from comhe.methods import METHODS

HERE = Path(__file__).parent
NUM_ROUNDS = 5
# Also without DistributedDataParallel, as this process does it: drawn, moved and learned bases.
ALONE = ("rp-comhe-max", "ap-comhe-reference", "adv-comhe", "learned-comhe")
WITH_BASIS = with_basis()

RANK = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, sys.argv[1])
from comhe.methods import METHODS
from small_cnn import bases, batch, build, small_cnn, train

folder, rank, alone, num_rounds = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split(), int(sys.argv[5])
torch.manual_seed(1000 + rank)
torch.randn(rank + 1)
dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)


def train_in_parallel(name):
    model = small_cnn()
    if METHODS[name].parametrization:  # makes the parameters that DDP is to see
        reg = build(name, model)
        ddp = nn.parallel.DistributedDataParallel(model)
    else:
        ddp = nn.parallel.DistributedDataParallel(model)
        reg = build(name, ddp)
    learned = [*ddp.parameters(), *reg.parameters()]
    optimizer = torch.optim.SGD(learned, lr=0.02, momentum=0.9)
    losses = []
    for round_ in range(num_rounds):
        images, labels = batch(2 * round_ + rank)  # each rank has data of its own
        optimizer.zero_grad()
        value = reg()
        (nn.functional.cross_entropy(ddp(images), labels) + value).backward()
        losses.append(value.detach().clone())
        for parameter in learned:  # the factors of a low-rank weight start several times as large
            nn.utils.clip_grad_norm_(parameter, 1.0)
        optimizer.step()
        reg.advance(lr=0.02)
    return losses, bases(reg), [p.detach().clone() for p in model.parameters()]


def train_alone(name):
    model = small_cnn()
    reg = build(name, model)
    return train(model, reg, num_rounds), bases(reg), [p.detach().clone() for p in model.parameters()]


found = {name: train_in_parallel(name) for name in METHODS}
found |= {f"{name} alone": train_alone(name) for name in alone}
found["generator"] = torch.get_rng_state()
torch.save(found, folder / f"{rank}.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each of the two processes found, of all methods."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**small_cnn.environment(), "PYTHONPATH": str(Path(comhe.__file__).parents[1])}
    if sys.platform == "linux":  # gloo would look for the host's own name, which may lead nowhere
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    arguments = [" ".join(ALONE), str(NUM_ROUNDS)]
    processes = [
        subprocess.Popen([sys.executable, "-c", RANK, str(HERE), str(folder), str(rank), *arguments], env=environment)
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_generators_of_the_ranks_differ(ranks: list[dict]) -> None:
    assert not torch.equal(ranks[0]["generator"], ranks[1]["generator"])


@pytest.mark.parametrize("name", [*METHODS, *(f"{name} alone" for name in ALONE)])
def test_ranks_agree_on_losses_bases_and_weights(ranks: list[dict], name: str) -> None:
    (losses, bases, weights), theirs = ranks[0][name], ranks[1][name]
    assert len(losses) == NUM_ROUNDS
    assert all(loss.isfinite() for loss in losses)
    assert bool(bases) is (name.removesuffix(" alone") in WITH_BASIS)
    for mine, other in zip((losses, bases, weights), theirs, strict=True):
        assert same_bits(mine, other)


@pytest.mark.parametrize("name", ALONE)
def test_ranks_draw_what_one_process_draws(ranks: list[dict], name: str) -> None:
    model = small_cnn.small_cnn()
    reg = small_cnn.build(name, model)
    alone, together = ranks[0][f"{name} alone"], ranks[0][name]
    assert same_bits(alone[0], small_cnn.train(model, reg, NUM_ROUNDS))
    assert same_bits(alone[1], small_cnn.bases(reg))
    # Under DDP the first loss is that of the same weights; then the data of both ranks enter.
    assert torch.equal(together[0][0], alone[0][0])
    assert not torch.equal(together[0][-1], alone[0][-1])
