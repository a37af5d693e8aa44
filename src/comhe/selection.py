"""Who is selected, by glob, type, module or predicate, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from comhe.names import did_you_mean
from comhe.neurons import Layer

Selector = str | type[nn.Module] | nn.Module | Callable[[Layer], bool]
Selection = Selector | Iterable[Selector]


class Skipped(NamedTuple):
    name: str
    reason: str


class Unreadable(NamedTuple):
    """Stands for a layer that cannot be looked at, an error as soon as it is selected."""

    name: str
    weight_name: str
    module: nn.Module
    parameter: str
    why: str


@dataclass(frozen=True)
class Because:
    """An exclusion that says why: `reason` stands beside what `selector` leaves out."""

    selector: Selector
    reason: str

    def __call__(self, layer: Layer) -> bool:
        return matches(self.selector, layer)


@dataclass(frozen=True)
class Named:
    """The layers of these names, as they are."""

    names: frozenset[str]

    def __call__(self, layer: Layer) -> bool:
        return layer.name in self.names


def matches(selector: Selector, layer: Layer | Unreadable) -> bool:
    if isinstance(selector, str):
        full = f"{layer.name}.weight" if layer.parameter == "weight" else layer.name
        return fits(selector, (layer.name, full, layer.weight_name))
    if isinstance(selector, type):
        return isinstance(layer.module, selector)
    if isinstance(selector, nn.Module):
        return any(module is layer.module for module in selector.modules())
    if isinstance(selector, Because):
        return matches(selector.selector, layer)
    if isinstance(layer, Unreadable):
        raise ValueError(layer.why)
    return bool(selector(layer))


def fits(pattern: str, names: Iterable[str]) -> bool:
    """Whether a glob fits one of the names; a name without wildcards also stands for all that is inside it."""
    inside = "" if is_glob(pattern) else f"{pattern}."
    return any(fnmatchcase(name, pattern) or (inside and name.startswith(inside)) for name in names)


def selectors(selection: Selection | None) -> tuple[Selector, ...]:
    if selection is None:
        return ()
    if isinstance(selection, str) or callable(selection) or not isinstance(selection, Iterable):
        selection = (selection,)
    found = tuple(selection)
    for selector in found:
        if not isinstance(selector, str) and not callable(selector):
            raise TypeError(
                f"{selector!r} selects no layers: give a glob on names, a module or its type, or a predicate"
            )
    return found


def is_glob(pattern: str) -> bool:
    return any(sign in pattern for sign in "*?[")


def exact_names(chosen: Iterable[Selector]) -> set[str]:
    """The names without wildcards among them."""
    return {selector for selector in chosen if isinstance(selector, str) and not is_glob(selector)}


class Choice:
    """Decides one weight after the other by the same rules, wherever the weights come from."""

    def __init__(self, include: Selection | None, exclude: Selection | None) -> None:
        self._includes = None if include is None else selectors(include)
        self._excludes = selectors(exclude)
        self.asked, self._unwanted = exact_names(self._includes or ()), exact_names(self._excludes)
        self.skipped: list[Skipped] = []
        self._owners: dict[Hashable, tuple[str, str]] = {}
        self._answered: set[str] = set()
        self._known: set[str] = set()

    def owns(self, owner: str, aliases: set[str], identity: Hashable) -> None:
        """A weight that is asked for by this name counts under it, however many names it is tied to."""
        if self.asked & aliases:
            self._owners.setdefault(identity, (owner, "counts once"))

    def takes(
        self,
        name: str,
        aliases: set[str],
        owner: str,
        identity: Hashable,
        is_matched: Callable[[Selector], bool],
        *,
        unfit: str = "",
        unless_named: str = "",
        unless_meant: str = "",
    ) -> bool:
        """Whether a set of neurons takes part; if not, and if it might have been expected to, why is noted.

        `aliases` are all its names, `owner` and `identity` those of its weight. What is `unfit` is an error only where
        asked for by its exact name. `unless_named` and `unless_meant` are as in `Part`.
        """
        self._known |= {name, owner}
        self._answered |= aliases
        by_name = bool(self.asked & aliases)
        reason = unfit or ("" if by_name else unless_named)
        if unless_meant and not (
            reason or by_name or any(_is_meant(s) and is_matched(s) for s in self._includes or ())
        ):
            reason = unless_meant
        if not reason:
            if self._includes is not None and not by_name and not any(map(is_matched, self._includes)):
                return False
            # The first name under which a tied weight is wanted speaks for all of them.
            excluded = next((_why(s) for s in self._excludes if is_matched(s)), "")
            fate = "is excluded" if excluded else "counts once"
            first, fate = self._owners.setdefault(identity, (owner, fate))
            if first == owner and not excluded:
                return True
            if first == owner:
                self.skipped.append(Skipped(name, excluded))
                return False
            reason = f"tied to {first}, which {fate}"
        if by_name:
            raise ValueError(f"{name} was asked for by name but is {reason}: leave it out")
        self.skipped.append(Skipped(name, reason))
        return False

    def check_names(self, others: Iterable[str]) -> None:
        """Every exact name must be that of a layer, or of what holds one; `others` may be excluded all the same."""
        for name in sorted((self.asked | (self._unwanted - set(others))) - self._answered):
            if any(known.startswith(f"{name}.") for known in self._known):
                continue
            raise ValueError(f"no layer {name!r}{did_you_mean(name, self._known)}")


def _is_meant(selector: Selector) -> bool:
    """Whether it singles out what it matches: a glob does by the last part of its pattern, "*.gate" and not "*"."""
    if isinstance(selector, str):
        return bool(selector.rpartition(".")[2].strip("*?"))
    return selector is not nn.Module


def _why(selector: Selector) -> str:
    return selector.reason if isinstance(selector, Because) else "excluded"
