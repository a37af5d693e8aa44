"""The bases of a plan and the round they belong to.

The round lives on the host with a twin on the device. A captured or compiled `advance` moves the twin alone; random
bases are recomputed from it, and what happens only every so many rounds follows it by `torch.where`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from comhe.neurons import Layer, read_all
from comhe.plan import Family, Plan
from comhe.products import lift, no_autocast
from comhe.projections import Basis
from comhe.random import Stream


class Bases(nn.Module):
    """Drawn, moved and kept here; used by `Regularizer`."""

    twin: Tensor

    def __init__(self, plan: Plan, seed: int) -> None:
        super().__init__()
        self.plan, self.seed = plan, seed
        self._round = 0
        self._on_device = False
        self.register_buffer("twin", torch.zeros((), dtype=torch.int64, device=plan.layers[0].device), persistent=False)
        self._names: list[list[str]] = []
        for family in plan.families:
            drawn = self._draw(family, 0)
            # PyTorch takes no "." in these names; no two addresses become the same.
            address = family.address.replace("%", "%25").replace(".", "%2E")
            names = [f"{address}/{i}" for i in range(len(drawn))]
            for name, tensor in zip(names, drawn, strict=True):
                if family.projection.trainable:
                    self.register_parameter(name, nn.Parameter(tensor))
                else:
                    self.register_buffer(name, tensor, persistent=False)
            self._names.append(names)

    def basis(self, index: int) -> Basis:
        return tuple(getattr(self, name) for name in self._names[index])

    @property
    def round(self) -> int:
        return int(self.twin) if self._on_device else self._round

    def advance(self, lr: Tensor, skipped: Tensor | None) -> None:
        if in_graph() or skipped is not None or self._on_device:  # in this order compiled code reads no flag
            self._on_device = True
            self._advance_on_device(lr, skipped)
        else:
            self._round += 1
            self.twin.fill_(self._round)
            for index, family in enumerate(self.plan.families):
                if family.redraw_every and self._round % family.redraw_every == 0:
                    self._write(index, self._draw(family, self._round // family.redraw_every))
                elif family.moves_every and self._round % family.moves_every == 0:
                    self._write(index, self._moved(index, family, lr))

    def _advance_on_device(self, lr: Tensor, skipped: Tensor | None) -> None:
        went = torch.ones_like(self.twin) if skipped is None else (skipped.to(self.twin.device) == 0).view(()).long()
        self.twin.add_(went)
        for index, family in enumerate(self.plan.families):
            period, moves = family.redraw_every, family.moves_every
            if period is None and moves is None:
                continue
            fresh = self._draw(family, self.twin // period) if period else None
            if moves is None and not family.projection.trainable and fresh is not None:
                self._write(index, fresh)  # the same numbers as long as the epoch is the same
                continue
            basis = self.basis(index)
            if moves:
                due = (went > 0) & (self.twin % moves == 0)
                basis = _choose(due, self._moved(index, family, lr), basis)
            if period and fresh is not None:
                basis = _choose((went > 0) & (self.twin % period == 0), fresh, basis)
            self._write(index, basis)

    def _draw(self, family: Family, epoch: int | Tensor) -> Basis:
        layer = family.layers[0]
        stream = Stream(self.seed, family.address, epoch, layer.device)
        dtype = lift(torch.empty((), dtype=layer.dtype)).dtype
        drawn = family.projection.draw(layer, stream)
        return tuple(t.to(dtype) if t.is_floating_point() else t for t in drawn)

    def _moved(self, index: int, family: Family, lr: Tensor) -> Basis:
        home = family.layers[0].device
        neurons = read_all(family.layers)
        with no_autocast(home):
            lifted = [lift(neurons[layer.name].to(home)) for layer in family.layers]
            rate = lr.to(home, lifted[0].dtype)
            return family.projection.advance(self.basis(index), lifted, family.rule.energy, rate)

    def _write(self, index: int, basis: Basis) -> None:
        for name, tensor in zip(self._names[index], basis, strict=True):
            # Into the same tensor: compiled code is not recompiled, and a captured graph reads the new numbers.
            getattr(self, name).copy_(tensor)

    def follow_weights(self) -> None:
        """Move bases to where their layers are now, and to float64 where the weights have become so."""
        for index, family in enumerate(self.plan.families):
            layer = family.layers[0]
            wide = layer.dtype == torch.float64
            for name in self._names[index]:
                old: Tensor = getattr(self, name)
                dtype = torch.float64 if wide and old.is_floating_point() else old.dtype
                if old.device != layer.device or old.dtype != dtype:
                    if isinstance(old, nn.Parameter):
                        old.data = old.data.to(layer.device, dtype)
                    else:
                        self._buffers[name] = old.to(layer.device, dtype)
        device = self.plan.layers[0].device
        if self.twin.device != device:
            self._buffers["twin"] = self.twin.to(device)

    def kinds(self) -> dict[str, str]:
        """What the bases are, by address: "Gaussian [5, 30, 64]"."""
        return {
            family.address: " ".join(
                [type(family.projection).__name__, *(str(list(part.shape)) for part in self.basis(index))]
            )
            for index, family in enumerate(self.plan.families)
        }

    def learned(self) -> dict[str, Tensor]:
        """The bases that only their history determines, by address."""
        found = {}
        for index, family in enumerate(self.plan.families):
            if family.moves_every or family.projection.trainable:
                for i, tensor in enumerate(self.basis(index)):
                    found[f"{family.address}/{i}"] = tensor.detach().clone()
        return found

    def restore(self, seed: int, round_: int, learned: dict[str, Tensor]) -> None:
        self.seed, self._round = seed, round_
        self.twin.fill_(round_)
        for index, family in enumerate(self.plan.families):
            if family.moves_every or family.projection.trainable:
                basis = self.basis(index)
                self._write(index, tuple(learned[f"{family.address}/{i}"] for i in range(len(basis))))
            else:
                self._write(index, self._draw(family, round_ // family.redraw_every if family.redraw_every else 0))


def _choose(condition: Tensor, new: Basis, old: Basis) -> Basis:
    return tuple(torch.where(condition.to(o.device), n.to(o.dtype), o) for n, o in zip(new, old, strict=True))


def in_graph() -> bool:
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def noise(seed: int, layer: Layer, round_: Tensor, like: Tensor) -> Tensor:
    """Standard normals [..., N, D] that depend on the layer and the round."""
    stream = Stream(seed, f"jitter/{layer.name}", round_.to(like.device), like.device)
    return stream.normal(*like.shape).to(like.dtype)
