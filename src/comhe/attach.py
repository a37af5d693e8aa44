"""Regularization through the optimizer: one line in anybody's training, and nothing registered on the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from comhe.bases import in_graph
from comhe.build import build
from comhe.methods import find_method
from comhe.neurons import Layer
from comhe.regularizer import Regularizer

# Every parameter that some attachment serves, and the name of its layer.
_attached = WeakIdKeyDictionary()


class _Probe(NamedTuple):
    """One parameter before the optimizer's step, to see afterwards that the step used our gradient."""

    layer: str
    parameter: Tensor
    value: Tensor
    grad_without_ours: Tensor | None


class Attachment:
    """A regularizer at work inside an optimizer. `value` is the last value of the loss, on the device, nan at first."""

    def __init__(self, regularizer: Regularizer, optimizer: Optimizer, decoupled: bool) -> None:
        self.regularizer = regularizer
        self.optimizer = optimizer
        self.decoupled = decoupled
        owned = _parameters(optimizer)
        self._leaves: dict[int, tuple[str, nn.Parameter]] = {}
        for layer in regularizer.layers:
            for leaf in layer.leaves():
                if id(leaf) in owned:
                    self._leaves[id(leaf)] = (layer.name, leaf)
        for name, leaf in self._leaves.values():
            if leaf in _attached:
                raise ValueError(f"{name} is attached already: detach() the first attachment before a second one")
        self.value = torch.full((), float("nan"), device=regularizer.layers[0].device)
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._probe: _Probe | None = None
        self._is_checked = False
        self._hooks: list[RemovableHandle] = []
        self._extra_group: dict[str, Any] | None = None

    def register(self) -> None:
        bases = [p for p in self.regularizer.parameters() if id(p) not in _parameters(self.optimizer)]
        if bases:
            self.optimizer.add_param_group({"params": bases})
            self._extra_group = self.optimizer.param_groups[-1]
        for name, leaf in self._leaves.values():
            _attached[leaf] = name
        for parameter in self.regularizer.parameters():
            self._leaves[id(parameter)] = ("the learned basis", parameter)
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]

    def detach(self) -> None:
        """Undo the attachment; the optimizer is as it was. Calling it again does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for _, leaf in self._leaves.values():
            _attached.pop(leaf, None)
        if self._extra_group is not None:
            for parameter in self._extra_group["params"]:
                self.optimizer.state.pop(parameter, None)
            groups = self.optimizer.param_groups
            groups[:] = [group for group in groups if group is not self._extra_group]
            self._extra_group = None
        self._gradients, self._leaves = [], {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the round and the learned bases."""
        return dict(self.regularizer.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.regularizer.load_state_dict(state)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self.decoupled or closure is None:
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
        leaves = [leaf for _, leaf in self._leaves.values() if leaf.requires_grad]
        with torch.enable_grad():
            value = self.regularizer()
            gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
            if value.requires_grad:
                gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        self.value.copy_(value.detach())
        self._gradients = [(leaf, g) for leaf, g in zip(leaves, gradients, strict=True) if g is not None]

    @torch.no_grad()
    def _add(self) -> None:
        # A fused optimizer under a gradient scaler holds scaled gradients still, and divides by this itself.
        scale: Tensor | None = getattr(self.optimizer, "grad_scale", None)
        self._watch()
        for leaf, gradient in self._gradients:
            if scale is not None:
                gradient = gradient * scale.to(gradient.device, gradient.dtype)
            if leaf.grad is None:
                leaf.grad = gradient.clone()
            elif leaf.grad.is_sparse:
                leaf.grad = leaf.grad.to_dense().add_(gradient)
            else:
                leaf.grad.add_(gradient)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        overflow: Tensor | None = getattr(optimizer, "found_inf", None)
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        if self.decoupled:
            for leaf, gradient in self._gradients:
                step = gradient * rates[id(leaf)]
                if overflow is not None:
                    step = torch.where(overflow.to(step.device) == 0, step, 0.0)
                leaf.sub_(step)
        elif overflow is None:
            self._check_arrival(rates)
        self._gradients = []
        first = next(iter(self._leaves))
        self.regularizer.advance(lr=rates[first], skipped=overflow)

    def _watch(self) -> None:
        self._probe = None
        if self._is_checked or in_graph() or not self._gradients:
            return
        for leaf, gradient in sorted(self._gradients, key=lambda pair: pair[0].numel()):
            if bool(gradient.any()):
                without = None if leaf.grad is None else leaf.grad.detach().clone()
                self._probe = _Probe(self._leaves[id(leaf)][0], leaf, leaf.detach().clone(), without)
                return

    def _check_arrival(self, rates: dict[int, Any]) -> None:
        """Once: the step has moved the parameter, with a gradient that still held our part."""
        probe, self._probe = self._probe, None
        if probe is None or float(rates[id(probe.parameter)]) == 0:
            return
        self._is_checked = True
        grad = probe.parameter.grad
        if torch.equal(probe.parameter, probe.value):
            self._fail(probe.layer, "the step did not move its weight")
        if probe.grad_without_ours is not None and grad is not None and not grad.is_sparse:
            if torch.equal(grad, probe.grad_without_ours.to_dense()):
                self._fail(probe.layer, "the gradient was taken away again before the update")

    def _fail(self, layer: str, why: str) -> None:
        self.detach()
        raise RuntimeError(
            f"the regularizer's gradient did not reach the update of {layer}: {why}. Use decoupled=True, or add "
            "comhe.build(...)() to the loss"
        )


def attach(
    method: str | Regularizer,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    decoupled: bool = False,
    **overrides: Any,
) -> Attachment:
    """Regularize every step of `optimizer` from now on, by a method's name or a regularizer built before.

    decoupled=False adds the gradient to `.grad` before the update, once a step, after accumulation and clipping: the
    numbers of the penalty in the loss. decoupled=True applies p -= lr x gradient after the update instead, unseen by
    the optimizer's moments, as AdamW decays weights; under Adam the two differ tenfold and more.

    `overrides` are those of `build`. Served are the layers whose parameters this optimizer holds. The state of the
    attachment belongs beside the optimizer's in a checkpoint.
    """
    optimizer = _innermost(optimizer)
    if isinstance(method, Regularizer):
        if overrides:
            raise TypeError(f"{', '.join(overrides)}: settings belong to the regularizer that was given")
        _check_ownership(method, optimizer)
        regularizer = method
    else:
        if find_method(method).parametrization:
            raise ValueError(
                f"{method!r} replaces the weights that the optimizer holds: call comhe.build({method!r}, model) first, "
                "then make the optimizer, then attach what build returned"
            )
        owned = _parameters(optimizer)
        regularizer = build(method, model, serves=_in(owned), **overrides)
    attachment = Attachment(regularizer, optimizer, decoupled)
    attachment.register()
    return attachment


def _innermost(optimizer: Any) -> Optimizer:
    """The optimizer inside wrappers that keep it as `.optimizer`."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer={type(optimizer).__name__}: give a torch.optim.Optimizer")
    if isinstance(optimizer, LBFGS):
        raise ValueError("LBFGS evaluates its closure many times a step: add comhe.build(...)() to the loss instead")
    if isinstance(optimizer, SparseAdam):
        raise ValueError("SparseAdam takes sparse gradients only, a regularizer's is dense: use Adam")
    return optimizer


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _in(owned: set[int]) -> Callable[[Layer], bool]:
    return lambda layer: any(id(leaf) in owned for leaf in layer.leaves())


def _check_ownership(regularizer: Regularizer, optimizer: Optimizer) -> None:
    serves = _in(_parameters(optimizer))
    missing = [layer.name for layer in regularizer.layers if not serves(layer)]
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: not among this optimizer's parameters; attach by the method's name, which serves "
            "the layers of each optimizer apart"
        )
