"""The baselines: penalties on neurons [..., N, D] -> [...], called as an energy is, one formula a docstring.

Every public function here is a penalty and its name is its method's. float64 is computed and returned in float64,
every lower precision in the device's widest type and returned in float32. W holds a neuron a row: what publications
write W'W, over neurons, is WW' here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from comhe.pairs import sphere
from comhe.products import lift, product, widest
from comhe.random import Stream

SripBody = Literal["paper", "wide-resnet", "svhn"]

_PAIR_ELEMENTS = 1 << 24  # cosines held at a time while nearest neighbours are looked for


def orthogonal(neurons: Tensor, *, local: bool = False, sharpness: float = 10.0) -> Tensor:
    """Decorrelation of directions, OrthoReg (Rodriguez et al., ICLR 2017), [..., N, D] -> [...].

    With c_ij = cos(w_i, w_j) and both sums over ordered pairs i != j, as published,

        global   1/2 sum c_ij^2
        local    sum log(1 + exp(sharpness (c_ij - 1)))

    The global form also bends opposite neurons towards a right angle, the local one leaves them alone. The
    authors' own code (prlz77/orthoreg, forward-hook.lua) takes the local one as an update of the weights that
    counts a pair once: half the gradient of this sum.

    Independent of every neuron's scale. A zero neuron is orthogonal to all with gradient zero; one neuron
    gives 0. N^2 numbers are held, in the global form D^2 where N > 2D; there the number of neurons that are not
    zero is taken off a sum, which cancels if nearly all are: 1e-16 of that number is then the error.
    """
    dtype = lift(neurons).dtype
    unit, lacking = sphere(lift(neurons))
    if not local and unit.shape[-2] > 2 * unit.shape[-1]:
        # |UU'| = |U'U|, at least N^2 / D: the diagonal taken off is less than half of it.
        num_alive = (1 - lacking).sum(dim=-1)
        return ((product(unit.mT, unit).square().sum(dim=(-2, -1)) - num_alive) / 2).to(dtype)
    cosine = product(unit, unit.mT)
    of_pair = 2 * F.softplus(sharpness * (cosine - 1)) if local else cosine.square()
    return of_pair.triu(1).sum(dim=(-2, -1)).to(dtype)


def orthonormal(neurons: Tensor) -> Tensor:
    """||WW' - I||_F over the neurons as they are, [..., N, D] -> [...].

    Neither normalised nor squared, as the paper's discussion writes it of SphereNet (Liu et al., NeurIPS
    2017). SphereNet's own code (wy1iu/SphereNet, spherenet.py) adds 1e-4 times the square.

    Depends on scale: it also draws norms to 1. The gradient is zero at W = 0 and at orthonormal neurons,
    where the norm has no slope. With N > D it is computed as ||WW' - I||^2 = ||W'W - I||^2 + N - D: it holds
    min(N, D)^2 numbers.
    """
    weights = _widened(neurons)
    num_neurons, fan_in = weights.shape[-2:]
    excess = max(0, num_neurons - fan_in)
    gram = product(weights.mT, weights) if excess else product(weights, weights.mT)
    distance = _norm(gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device), (-2, -1))
    whole = torch.hypot(distance, torch.full_like(distance, math.sqrt(excess))) if excess else distance
    return whole.to(lift(neurons).dtype)


def srip(
    neurons: Tensor,
    *,
    body: SripBody = "paper",
    num_iterations: int = 2,
    start: Tensor | None = None,
) -> Tensor:
    """Spectral norm of W'W - I by power iteration, SRIP (Bansal et al., NeurIPS 2018), [..., N, D] -> [...].

    With A = Gram - I, a start vector v and k = `num_iterations` products by A,

        sigma = ||A^k v|| / ||A^(k-1) v||

    estimates the spectral norm. Every publication takes k = 2 and differentiates through both products: the
    paper's ||Au|| / ||u|| with u = Av (Eq. 7) and the code's u'Av with v and u normalised are this one
    number. Which Gram matrix, and whether sigma is squared, differs; in VITA-Group/Orthogonality-in-CNNs:

        body            value     Gram matrix              published in
        "paper"         sigma     WW', over neurons        the paper; ResNet/resnet_cifar_new.py, l2_reg
        "wide-resnet"   sigma^2   WW', or W'W if N > D     Wide-Resnet/train_n.py, l2_reg_ortho
        "svhn"          sigma^2   W'W, over the fan-in     SVHN/, Imagenet/resnet/train_n.py, the same

    The last two are the bodies its users ask about (issues 2 and 14 there). Where the Gram matrix is larger
    than its rank, A has the eigenvalue -1: with N < D, as in most convolutions, "svhn" stays at 1 for
    orthonormal neurons while the other two vanish.

    The publications draw v at every call, uniform in [0, 1) or, "svhn", normal. Here it is normal and always
    the same, also for every leading index, unless `start` gives one, as long as the Gram matrix is wide.
    Depends on scale. Where Av is zero, so are sigma and its gradient. O(N D) memory: A is never formed.
    """
    if body not in get_args(SripBody):
        raise ValueError(f"body={body!r}: choose one of {', '.join(map(repr, get_args(SripBody)))}")
    if num_iterations < 1:
        raise ValueError(f"num_iterations={num_iterations}: choose at least 1")
    weights = _widened(neurons)
    num_neurons, fan_in = weights.shape[-2:]
    if body == "svhn" or (body == "wide-resnet" and num_neurons > fan_in):
        first, second = weights, weights.mT
    else:
        first, second = weights.mT, weights
    size = first.shape[-1]
    if start is None:
        start = _start(size, weights.device)
    elif start.shape != (size,):
        raise ValueError(f"start of shape {tuple(start.shape)}: give a vector of {size} numbers")
    vector = start.to(weights).unsqueeze(-1)  # [size, 1], then [..., size, 1]
    sigma = _norm(vector, (-2, -1))
    for _ in range(num_iterations):
        # Lengths of 1 in between change no ratio, and keep many iterations from overflowing.
        vector = vector / torch.where(sigma > 0, sigma, 1.0)[..., None, None]
        vector = product(second, product(first, vector)) - vector
        sigma = _norm(vector, (-2, -1))
    return (sigma if body == "paper" else sigma.square()).to(lift(neurons).dtype)


# An operator of its own: inlined, its integers take the compiler minutes.
@torch.library.custom_op("comhe::srip_start", mutates_args=())
def _start(size: int, device: torch.device) -> Tensor:
    return Stream(0, "srip", 0, device).normal(size)


@_start.register_fake
def _(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, device=device)


def mma(neurons: Tensor) -> Tensor:
    """Maximising the minimal angle, MMA (Wang et al., NeurIPS 2020), [..., N, D] -> [...].

        -1/N sum_i min_{j != i} angle(w_i, w_j)      in radians

    as in wznpub/MMA_Regularization, but without its arccos, whose slope is infinite at duplicates and which
    its clamp leaves without any near them: the angle is 2 atan2(|a - b|, |a + b|), of the two unit vectors.

    Independent of every neuron's scale. A pair of exact duplicates has no direction to part in and adds no
    gradient. A zero neuron is orthogonal to all with gradient zero; one neuron gives 0. O(N D) memory.
    """
    weights = lift(neurons)
    if weights.shape[-2] < 2:
        return (weights * 0.0).sum(dim=(-2, -1))
    unit, lacking = sphere(weights)
    partner = _nearest(unit.detach())
    other = unit.gather(-2, partner.unsqueeze(-1).expand_as(unit))
    missing = lacking + lacking.gather(-1, partner)
    apart = _root((unit - other).square().sum(dim=-1) + missing)
    together = _root((unit + other).square().sum(dim=-1) + missing)
    return -2 * torch.atan2(apart, together).mean(dim=-1).to(weights.dtype)


def _nearest(unit: Tensor) -> Tensor:
    """For each unit vector the index of another one at the smallest angle, [..., N, D] -> [..., N]."""
    count = unit.shape[-2]
    num_rows = max(1, _PAIR_ELEMENTS // max(1, math.prod(unit.shape[:-2]) * count))
    column = torch.arange(count, device=unit.device)
    found = []
    for begin in range(0, count, num_rows):
        rows = column[begin : begin + num_rows]
        # In the widest type: a float32 cosine cannot tell which of two neighbours about 1e-3 away is nearer.
        cosine = product(unit[..., rows, :], unit.mT)
        found.append(torch.where(rows.unsqueeze(-1) == column, -2.0, cosine).argmax(dim=-1))
    return torch.cat(found, dim=-1)


def _widened(neurons: Tensor) -> Tensor:
    """In the widest type: what is left of a Gram matrix less I, near orthonormal neurons, is its last digits."""
    return neurons.to(widest(neurons.device))


def _root(square: Tensor) -> Tensor:
    """The square root, with slope zero at zero."""
    nonzero = square != 0  # true of NaN, which goes on
    return torch.where(nonzero, torch.sqrt(torch.where(nonzero, square, 1.0)), 0.0)


def _norm(tensor: Tensor, dims: tuple[int, int]) -> Tensor:
    """The Euclidean norm over `dims`, with slope zero at zero and no overflow on the way."""
    largest = tensor.detach().abs().amax(dim=dims, keepdim=True)
    scale = torch.where(largest > 0, largest, 1.0)
    return _root((tensor / scale).square().sum(dim=dims)) * scale.squeeze(dims)


PENALTIES: dict[str, Callable[..., Tensor]] = {
    name: value
    for name, value in list(globals().items())
    if inspect.isfunction(value) and value.__module__ == __name__ and not name.startswith("_")
}
