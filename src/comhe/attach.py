"""Regularization through the optimizer: one line in anybody's training, and nothing registered on the model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from comhe.arrival import Arrival, Survival
from comhe.build import build
from comhe.methods import find_method
from comhe.neurons import Layer
from comhe.optimizers import has_stepped, innermost, is_within_a_step, of_group, parameters
from comhe.products import lift
from comhe.regularizer import Regularizer

# Every parameter that some attachment serves, and a weak reference to that attachment.
_attached = WeakIdKeyDictionary()

_REMEDY = "Use decoupled=True, or add comhe.build(...)() to the loss"


class Attachment:
    """A regularizer at work inside an optimizer. `value` is the last value of the loss, on the device, nan at first."""

    def __init__(self, regularizer: Regularizer, optimizer: Optimizer, decoupled: bool, anew: bool) -> None:
        self.regularizer = regularizer
        self.optimizer = optimizer
        self.decoupled = decoupled
        owned = parameters(optimizer)
        self._leaves: dict[int, tuple[str, nn.Parameter]] = {}
        for layer in regularizer.layers:
            for leaf in layer.leaves():
                if id(leaf) in owned:
                    self._leaves[id(leaf)] = (layer.name, leaf)
        _refuse_attached(self._leaves.values())
        wide = any(layer.dtype == torch.float64 for layer in regularizer.layers)
        dtype = torch.float64 if wide else torch.float32
        self.value = torch.full((), float("nan"), dtype=dtype, device=regularizer.layers[0].device)
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._arrival, self._survival = Arrival(), Survival()
        self._is_stepping = self._is_computed = False
        # A resumed optimizer beside an attachment that starts anew would repeat the bases of the first rounds.
        self._is_behind = has_stepped(optimizer) and regularizer.round == 0 and not anew
        self._is_loaded = False
        self._hooks: list[RemovableHandle] = []
        self._adopted: set[int] = set()

    def register(self) -> None:
        self._adopt_bases()
        for _, leaf in self._leaves.values():
            _attached[leaf] = weakref.ref(self)
        for parameter in self.regularizer.parameters():
            self._leaves[id(parameter)] = ("the learned basis", parameter)
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
            self.optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def _adopt_bases(self) -> None:
        """Learned bases join the group of the first layer: a group more would break schedulers that exist already."""
        owned = parameters(self.optimizer)
        group = next(g for g in self.optimizer.param_groups if any(id(p) in self._leaves for p in g["params"]))
        for name, parameter in self.regularizer.named_parameters():
            if id(parameter) not in owned:
                group["params"].append(parameter)
                if "param_names" in group:
                    group["param_names"].append(name)
                self._adopted.add(id(parameter))

    def detach(self) -> None:
        """Undo the attachment; the optimizer is as it was. Calling it again does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for _, leaf in self._leaves.values():
            _attached.pop(leaf, None)
        for group in self.optimizer.param_groups if self._adopted else ():
            kept = [i for i, parameter in enumerate(group["params"]) if id(parameter) not in self._adopted]
            for words in ("params", "param_names"):
                if words in group:
                    group[words][:] = [group[words][i] for i in kept]
        for parameter in self.regularizer.parameters():
            if id(parameter) in self._adopted:
                self.optimizer.state.pop(parameter, None)
        self._adopted = set()
        self._gradients, self._leaves = [], {}

    def __repr__(self) -> str:
        mode = "decoupled" if self.decoupled else "in the gradient"
        state = "attached" if self._hooks else "detached"
        return f"Attachment({self.regularizer!r}, {type(self.optimizer).__name__}, {mode}, {state})"

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: seed, round, learning rate and learned bases, under the names of the layers."""
        return dict(self.regularizer.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.regularizer.load_state_dict(state)
        self._is_behind, self._is_loaded = False, True

    def _after_load(self, optimizer: Optimizer) -> None:
        self._is_behind = not self._is_loaded

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._is_behind:
            raise RuntimeError(
                "the optimizer has a past that the attachment has not seen: call load_state_dict(...) with what the "
                "attachment's state_dict() gave then, or attach(..., anew=True) to begin at round 0"
            )
        if self._is_stepping and is_within_a_step(optimizer):  # a subclass that calls super().step()
            return None
        if why := self._survival.failure(optimizer):
            self._fail(self._survival.parameter, why, "Use decoupled=False")
        self._is_stepping, self._is_computed = True, False
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self.decoupled or not callable(closure):
            self._compute()
            if not self.decoupled:
                self._add()
            return None

        # The closure zeroes gradients and fills them anew: ours come after it, each time it is called.
        def with_penalty() -> Any:
            loss = closure()
            self._compute()
            self._add()
            return loss

        if len(args) > 1:
            return (args[0], with_penalty, *args[2:]), kwargs
        return args, {**kwargs, "closure": with_penalty}

    def _compute(self) -> None:
        self.regularizer.set_lr(of_group(self.optimizer, "lr")[next(iter(self._leaves))])
        leaves = [leaf for _, leaf in self._leaves.values() if leaf.requires_grad]
        with torch.enable_grad():
            value = self.regularizer()
            gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
            if value.requires_grad:
                gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        self.value = self.value.to(value)  # where the model has moved meanwhile
        self.value.copy_(value.detach())
        self._gradients = [(leaf, g) for leaf, g in zip(leaves, gradients, strict=True) if g is not None]
        self._is_computed = True

    @torch.no_grad()
    def _add(self) -> None:
        # A fused optimizer under a gradient scaler holds scaled gradients still, and divides by this itself.
        scale: Tensor | None = getattr(self.optimizer, "grad_scale", None)
        rates, ascends = of_group(self.optimizer, "lr"), of_group(self.optimizer, "maximize")
        probed = self._arrival.choose(self._gradients, rates)
        for leaf, gradient in self._gradients:
            without = None if leaf.grad is None or leaf is not probed else leaf.grad.clone()
            if ascends[id(leaf)]:
                gradient = -gradient
            if scale is not None:  # lifted, as the scale alone can exceed what half precision holds
                gradient = (lift(gradient) * scale.to(gradient.device)).to(gradient.dtype)
            if leaf.grad is None:
                # In the strides of the weight, which fused optimizers take for granted.
                leaf.grad = torch.empty_like(leaf).copy_(gradient)
            elif leaf.grad.is_sparse:
                leaf.grad = gradient + leaf.grad  # in this order the duplicates add up as autograd adds them
            else:
                leaf.grad.add_(gradient)
            if scale is not None and leaf.grad.dtype == torch.float16:
                # The scaler has looked for overflows already: ours must not become one.
                largest = torch.finfo(torch.float16).max
                leaf.grad.clamp_(-largest, largest)
            if leaf is probed:
                self._arrival.watch(leaf, without)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_stepping:
            return
        self._is_stepping = False
        overflow: Tensor | None = getattr(optimizer, "found_inf", None)
        rates = of_group(self.optimizer, "lr")
        probed = self._survival.choose(self._gradients, rates) if self.decoupled else None
        for leaf, gradient in self._gradients if self.decoupled else ():
            step = gradient * rates[id(leaf)]
            if overflow is not None:
                step = torch.where(overflow.to(step.device) == 0, step, 0.0)
            if leaf is probed:
                self._survival.watch(leaf, leaf - step)
            leaf.sub_(step)
        if not self._is_computed:
            self._fail(None, "the optimizer did not call its closure", _REMEDY)
        if why := self._arrival.failure(optimizer, rates):
            self._fail(self._arrival.parameter, why, _REMEDY)
        for leaf, _ in self._gradients:
            if id(leaf) in self._adopted:  # nobody else zeroes the gradient of a basis
                leaf.grad = None
        self._gradients, self._is_loaded = [], False
        self.regularizer.advance(skipped=overflow)

    def _fail(self, parameter: Tensor | None, why: str, remedy: str) -> NoReturn:
        """The regularizer is without effect: say so, and leave the optimizer as it was."""
        layer = next((f"layer {name!r}" for name, leaf in self._leaves.values() if leaf is parameter), "any layer")
        self.detach()
        raise RuntimeError(f"the regularizer's gradient did not reach the update of {layer}: {why}. {remedy}")


def attach(
    method: str | Regularizer,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    decoupled: bool = False,
    anew: bool = False,
    **overrides: Any,
) -> Attachment:
    """Regularize every step of `optimizer` from now on, by a method's name or a regularizer built before.

    decoupled=False adds the gradient to `.grad` before the update, once a step, after accumulation and clipping: the
    numbers of the penalty in the loss. decoupled=True applies p -= lr x gradient after the update instead, unseen by
    the optimizer's moments, as AdamW decays weights; under Adam the two differ tenfold and more. Either way the energy
    falls, under `maximize=True` too.

    `overrides` are those of `build`. Served are the layers whose parameters this optimizer holds now; one that is
    unfrozen or added later is not. The state of the attachment belongs beside the optimizer's in a checkpoint: next to
    an optimizer that has stepped before, `load_state_dict` that state, or say `anew=True` to begin at round 0.
    """
    optimizer = innermost(optimizer)
    if isinstance(method, Regularizer):
        if overrides:
            raise TypeError(f"{', '.join(overrides)}: settings belong to the regularizer that was given")
        _check_ownership(method, model, optimizer)
        regularizer = method
    else:
        if find_method(method).parametrization:
            raise ValueError(
                f"{method!r} replaces the weights that the optimizer holds: call comhe.build({method!r}, model) first, "
                "then make the optimizer, then attach what build returned"
            )
        owned = parameters(optimizer)
        regularizer = build(method, model, serves=_in(owned), **overrides)
    attachment = Attachment(regularizer, optimizer, decoupled, anew)
    attachment.register()
    return attachment


def _refuse_attached(leaves: Iterable[tuple[str, nn.Parameter]]) -> None:
    def taken() -> list[str]:
        return [name for name, leaf in leaves if leaf in _attached and _attached[leaf]() is not None]

    if taken():
        gc.collect()  # an optimizer that nobody holds any more, and its attachment, refer to each other
    for name in taken():
        raise ValueError(f"layer {name!r} is attached already: detach() the first attachment before a second one")


def _in(owned: set[int]) -> Callable[[Layer], bool]:
    return lambda layer: any(id(leaf) in owned for leaf in layer.leaves())


def _check_ownership(regularizer: Regularizer, model: nn.Module, optimizer: Optimizer) -> None:
    inside = {id(module) for module in model.modules()}
    if foreign := [layer.name for layer in regularizer.layers if id(layer.module) not in inside]:
        raise ValueError(f"{', '.join(foreign)}: the regularizer was built for another model than the one given")
    serves = _in(parameters(optimizer))
    missing = [layer.name for layer in regularizer.layers if not serves(layer)]
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: not among this optimizer's parameters; attach by the method's name, which serves "
            "the layers of each optimizer apart"
        )
