"""The stateful shell: `forward` computes and changes nothing, `advance` changes and computes no loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comhe.bases import Bases, noise
from comhe.energies import Energy
from comhe.executor import Network, why_not
from comhe.explain import Explanation, explain
from comhe.names import did_you_mean
from comhe.neurons import Layer, read_all
from comhe.plan import Family, make_plan
from comhe.products import lift, no_autocast, widest
from comhe.projections import Basis, Projection
from comhe.rules import RedrawEvery, Rule, view_weights
from comhe.saved import compare_bases, compare_layers
from comhe.selection import Selection


class Regularizer(nn.Module):
    """The regularization of a model: add `reg()` to the loss, call `reg.advance()` after each optimizer step.

    rules: a projection (one rule, of which `settings` are the other fields), a rule, or several: first match wins.
    include, exclude, columns: see `discover`.
    seed: fixes every basis, together with the round.
    redraw_every: rounds between two draws of a basis, None for never; "auto" leaves it to each projection.
    shared: layers that fit one basis (equal fan-in, as a rule) share it, as in the paper; False gives each its own.
    lr: the network's learning rate, for projections that use it; `advance(lr=...)` follows a schedule.
    jitter: relative noise that parts exact duplicates, drawn anew each round; 0 leaves the weights as they are.
    serves: restricts the layers, as `attach` does to those of its optimizer. Random bases stay the same; one that
        moves follows the layers that are served.
    notes: remarks that `explain()` repeats.

    The model is not changed and nothing is registered on it. Bases follow the weights' devices, and are float64 where
    the weights are. Several layers on several devices are computed where they are. The regularizer refers to the model:
    a copy or a pickle of it alone holds a model of its own, so copy both together.
    """

    _lr: Tensor

    def __init__(
        self,
        model: nn.Module,
        rules: Projection | Rule | Sequence[Rule],
        *,
        include: Selection | None = None,
        exclude: Selection | None = None,
        columns: str | Sequence[str] = (),
        seed: int = 0,
        redraw_every: RedrawEvery = "auto",
        shared: bool = True,
        lr: float | None = None,
        jitter: float = 0.0,
        serves: Callable[[Layer], bool] | None = None,
        notes: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if not jitter >= 0:
            raise ValueError(f"jitter={jitter}: choose 0 or a small positive number")
        if type(seed) is not int:
            raise TypeError(f"seed={seed!r}: choose an integer from 0 to 2**64 - 1")
        self.plan = make_plan(
            model,
            _as_rules(rules, settings),
            include=include,
            exclude=exclude,
            columns=columns,
            redraw_every=redraw_every,
            shared=shared,
            serves=serves,
        )
        self.notes = notes or {}
        self._jitter = jitter
        self._bases = Bases(self.plan, seed)
        device = self._bases.twin.device
        self._lr_known = lr is not None or not any(g.projection.uses_lr for g in self.plan.families)
        # One element, not 0-d: the compiler takes a 0-d number on the CPU for a symbol, and compiles twice for it.
        self.register_buffer("_lr", torch.full((1,), lr or 0.0, dtype=widest(device), device=device), persistent=False)
        self._schedules = [rule.weight for rule in self.plan.rules]
        self._set_weights: dict[str, float] = {}
        self._silent = [True] * len(self._schedules)
        for index in range(len(self.plan.rules)):
            self.register_buffer(f"_weight_{index}", torch.zeros_like(self._lr), persistent=False)
        with torch.no_grad():
            self._write_weights()
            self._view_weights = [
                [view_weights(family.rule, lift(layer.read()), self._bases.basis(i)) for layer in family.layers]
                for i, family in enumerate(self.plan.families)
            ]

    def forward(self) -> Tensor:
        """The weighted sum over layers: a 0-d tensor on the device of the first layer."""
        if not self._lr_known:
            raise ValueError(
                "a projection takes the network's learning rate: give Regularizer(lr=...) or call set_lr(...)"
            )
        device = self._bases.twin.device
        total = torch.zeros((), dtype=torch.float32, device=device)
        heard = [family for family in self.plan.families if not self._silent[family.rule_index]]
        found = read_all(layer for family in heard for layer in family.layers)
        network, served = Network(), []
        for index, family in enumerate(self.plan.families):
            if self._silent[family.rule_index]:
                continue
            weight: Tensor = getattr(self, f"_weight_{family.rule_index}")
            neurons, basis = self._operands(index, family, found)
            if torch.compiler.is_compiling() or why_not(family):
                value = self._value(index, family, neurons, basis)
                total = total + weight.to(device, value.dtype).view(()) * value.to(device)
            else:
                network.add(family.rule, neurons, family.projection.maps(basis) or (), self._view_weights[index])
                served.append(weight)
        if served:
            values = network.values()
            total = total + (torch.cat(served).to(values.device, values.dtype) * values).sum().to(device)
        return total

    def _operands(self, index: int, family: Family, found: Mapping[str, Tensor]) -> tuple[list[Tensor], Basis]:
        """The neurons of the layers that share a basis, and that basis."""
        neurons = [self._jittered(layer, lift(found[layer.name])) for layer in family.layers]
        home = neurons[0].device
        with no_autocast(home):
            # A model that has turned to float64 since the last round has bases in float32 still.
            wide = neurons[0].dtype == torch.float64
            parts = self._bases.basis(index)
            basis: Basis = tuple(
                part.to(home, torch.float64 if wide and part.is_floating_point() else None) for part in parts
            )
            together = [n.to(home) for n in neurons]
            rate = self._lr.to(home, neurons[0].dtype).view(())
            return neurons, family.projection.refine(basis, together, family.rule.energy, rate)

    def _value(self, index: int, family: Family, neurons: Sequence[Tensor], basis: Basis) -> Tensor:
        """The energies of the layers that share a basis, added up."""
        home = neurons[0].device
        with no_autocast(home):
            total = torch.zeros((), dtype=neurons[0].dtype, device=home)
            for layer_neurons, weights in zip(neurons, self._view_weights[index], strict=True):
                device, dtype = layer_neurons.device, layer_neurons.dtype
                wide = layer_neurons.to(widest(device))  # projected in float32, close neurons would lose their distance
                views = family.projection.views(wide, tuple(part.to(device) for part in basis))
                for view, weight in zip(views, weights, strict=True):
                    total = total + weight * family.rule.value(view, dtype).to(home)
            return total

    def _jittered(self, layer: Layer, neurons: Tensor) -> Tensor:
        if self._jitter:
            size = neurons.detach().square().mean(dim=-1, keepdim=True).sqrt()
            neurons = neurons + self._jitter * size * noise(self._bases.seed, layer, self._bases.twin, neurons)
        return neurons

    @torch.no_grad()
    def energies(self, s: float | None = None, half_space: bool | None = None) -> dict[str, Tensor]:
        """The energy of each layer, without projection and `norm_eps`, no gradient.

        `s` and `half_space` are those of the layer's rule unless given; a layer under a penalty has an energy too.
        """
        found, read = {}, read_all(self.layers)
        for family in self.plan.families:
            rule = family.rule
            energy = Energy(
                rule.s if s is None else s,
                rule.half_space if half_space is None else half_space,
                rule.distance,
                rule.reduction,
            )
            for layer in family.layers:
                neurons = lift(read[layer.name])
                with no_autocast(neurons.device):
                    found[layer.name] = rule.over_sets(energy(neurons))
        return {layer.name: found[layer.name] for layer in self.layers}

    def explain(self) -> Explanation:
        """Which layers, their sizes, bases and strengths, and what was left out and why: print it."""
        bases = [self._bases.basis(index) for index in range(len(self.plan.families))]
        return explain(self.plan, self.notes, self._schedules, bases)

    @property
    def layers(self) -> list[Layer]:
        return self.plan.layers

    @property
    def round(self) -> int:
        """Optimizer steps gone by. After an `advance` inside a captured graph, reading it waits for the device."""
        return self._bases.round

    @torch.no_grad()
    def advance(self, lr: float | Tensor | None = None, *, skipped: Tensor | None = None) -> None:
        """Go to the next round: redraw and move bases, follow schedules.

        `lr` is the network's learning rate now. `skipped`, of one element, is not 0 where the optimizer skipped its
        step (a gradient scaler met an overflow): the round then stays, and the host need not know.
        """
        self._follow_weights()
        if lr is not None:
            self.set_lr(lr)
        self._bases.advance(self._lr.view(()), skipped)
        self._write_weights()

    @torch.no_grad()
    def set_lr(self, lr: float | Tensor) -> None:
        """Tell projections that step with it the network's learning rate."""
        _write(self._lr, lr)
        self._lr_known = True

    @torch.no_grad()
    def set_weight(self, weight: float, rule: int | str | None = None) -> None:
        """Change the strength of a rule, given by its place or its name; a schedule ends thereby.

        Without `rule`, of all but the one named "classifier".
        """
        used = {family.rule_index: family.label for family in self.plan.families}
        chosen = {i: n for i, n in used.items() if (n != "classifier" if rule is None else rule in (i, n))}
        if not chosen:
            raise ValueError(f"no rule {rule!r} with layers{did_you_mean(str(rule), used.values())}")
        if not math.isfinite(weight):
            raise ValueError(f"weight={weight}: choose a finite number")
        for index, name in chosen.items():
            self._schedules[index] = self._set_weights[name] = weight
        self._write_weights()

    def _write_weights(self) -> None:
        for index, weight in enumerate(self._schedules):
            value = weight(self._bases.twin) if callable(weight) else weight
            if not isinstance(value, Tensor) and not math.isfinite(value):
                raise ValueError(f"weight={value} at round {self.round}: a schedule must give finite numbers")
            # Forward reads this flag and no number: a weight that changes must not recompile it. So a rule that has
            # been heard once is not silent again.
            is_zero = not callable(weight) and weight == 0
            self._silent[index] = self._silent[index] and is_zero
            _write(getattr(self, f"_weight_{index}"), value)

    def _follow_weights(self) -> None:
        self._bases.follow_weights()
        for name, tensor in self._buffers.items():
            if tensor is not None and tensor.device != self._bases.twin.device:
                self._buffers[name] = tensor.to(self._bases.twin.device)

    def _apply(self, fn: Any, recurse: bool = True) -> Regularizer:
        """Bases follow the weights, not `.to()`: those of a model turned to bfloat16 stay float32."""
        self._follow_weights()
        return self

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "seed": self._bases.seed,
            "lr": float(self._lr) if self._lr_known else None,
            "weights": dict(self._set_weights),
            "layers": self._layers_by_address(),
            "bases": self._bases.kinds(),
            "learned": self._bases.learned(),
        }

    @torch.no_grad()
    def set_extra_state(self, state: dict[str, Any]) -> None:
        compare_layers(state["layers"], self._layers_by_address())
        compare_bases(state["bases"], self._bases.kinds(), state["layers"])
        self._follow_weights()
        self._bases.restore(state["seed"], state["round"], state["learned"])
        if state["lr"] is not None:
            self.set_lr(state["lr"])
        self._write_weights()
        for rule, weight in state["weights"].items():
            self.set_weight(weight, rule)

    def extra_repr(self) -> str:
        return f"layers={len(self.layers)}, round={self.round}"

    def _layers_by_address(self) -> dict[str, list[str]]:
        return {family.address: [layer.name for layer in family.layers] for family in self.plan.families}


def _write(place: Tensor, value: float | Tensor) -> None:
    if isinstance(value, Tensor):
        place.copy_(value)
    else:
        place.fill_(value)  # a copy from the host would make it wait, and fail inside a captured graph


def _as_rules(rules: Projection | Rule | Sequence[Rule], settings: dict[str, Any]) -> list[Rule]:
    if isinstance(rules, Projection):
        return [Rule(projection=rules, **settings)]
    if settings:
        raise TypeError(f"{', '.join(settings)}: settings of a rule belong into Rule(...) where rules are given")
    found: list[Rule] = [rules] if isinstance(rules, Rule) else list(rules) if isinstance(rules, list | tuple) else []
    if not found or not all(isinstance(rule, Rule) for rule in found):
        raise TypeError(
            f"{rules!r}: give a projection, as comhe.projections.Gaussian(dim=30), or rules; a method's name goes to "
            "comhe.build"
        )
    return found
