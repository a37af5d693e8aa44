"""The projections, one class a file. The folder is the registry: a file added here is found by name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

from comhe.names import did_you_mean
from comhe.projections._base import Basis, Layer, Map, Projection


def _classes() -> dict[str, type[Projection]]:
    found = {}
    for info in pkgutil.iter_modules(__path__):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        for name, member in inspect.getmembers(module, inspect.isclass):
            if issubclass(member, Projection) and member.__module__ == module.__name__:
                found[name] = member
    return found


REGISTRY: dict[str, type[Projection]] = _classes()

__all__ = ["REGISTRY", "Basis", "Layer", "Map", "Projection", *sorted(REGISTRY)]


def __getattr__(name: str) -> Any:
    if name in REGISTRY:
        return REGISTRY[name]
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"no projection {name!r}{did_you_mean(name, REGISTRY)}")
