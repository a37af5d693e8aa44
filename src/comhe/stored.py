"""Weights without their model: state dicts, and the files that hold them."""

from __future__ import annotations

import json
import mmap
import os
import pickle
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from comhe.discovery import WRAPPERS
from comhe.selection import Choice, Selection, Selector, Skipped, fits, selectors

# A training checkpoint keeps the weights under one of these.
_NESTED = ("state_dict", "model_state_dict", "model")

# As the safetensors format names them.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def load(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The state dict in a file written by `torch.save`, alone or in a checkpoint, or in a .safetensors file."""
    path = os.fspath(path)
    if path.endswith(".safetensors"):
        return _read_safetensors(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} holds more than weights: save model.state_dict() instead") from error
    except (KeyError, EOFError, RuntimeError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is damaged or no file of torch.save: {error!r}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds a {type(found).__name__}: save model.state_dict() instead")
    state = next((found[key] for key in _NESTED if isinstance(found.get(key), Mapping)), found)
    if not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} holds no tensors, but {', '.join(map(str, state)) or 'nothing'}: save a state dict")
    return state


def _read_safetensors(path: str) -> dict[str, Any]:
    """The tensors, mapped into memory and not read before they are used; the name of a type unknown here instead."""
    try:
        with open(path, "rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = 8 + int.from_bytes(buffer[:8], "little")
        header = json.loads(buffer[8:start])
        header.pop("__metadata__", None)
        return {name: _tensor(entry, buffer, start) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error


def _tensor(entry: dict[str, Any], buffer: mmap.mmap, start: int) -> Tensor | str:
    shape, dtype = entry["shape"], _DTYPES.get(entry["dtype"])
    if dtype is None:
        return str(entry["dtype"])
    begin, end = entry["data_offsets"]
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    count = (end - begin) // dtype.itemsize
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=start + begin).reshape(shape)


def neurons(
    stored: Mapping[str, Any],
    include: Selection | None,
    exclude: Selection | None,
    columns: tuple[str, ...],
) -> tuple[dict[str, Callable[[], Tensor]], list[Skipped]]:
    """The neurons [N, D] of a state dict under the names that `discover` gives them, and what was left out and why.

    Each floating tensor of two or more dimensions counts, a row a neuron, or a column where `columns` say so; tied
    ones count once. Vectors and single numbers are passed over.
    """
    choice = Choice(_globs(include), _globs(exclude))
    unwrapped = _unwrapped(stored)
    weights = {key: weight for key, weight in unwrapped.items() if not _is_small(weight)}
    for key, weight in weights.items():
        if not _unfit(weight):
            choice.owns(key.removesuffix(".weight"), _names(key), _place(key, weight))
    found: dict[str, Callable[[], Tensor]] = {}
    for key, weight in weights.items():
        name, unfit = key.removesuffix(".weight"), _unfit(weight)
        place = key if unfit else _place(key, weight)
        if choice.takes(name, _names(key), name, place, partial(_matches, key), unfit=unfit):
            found[name] = partial(_read, weight, any(_matches(key, glob) for glob in columns))
    choice.check_names(others=unwrapped)
    return found, choice.skipped


def _globs(selection: Selection | None) -> tuple[str, ...] | None:
    if selection is None:
        return None
    chosen = selectors(selection)
    for selector in chosen:
        if not isinstance(selector, str):
            raise ValueError(f"{selector!r} selects modules, and a state dict has none: select by globs on names")
    return tuple(map(str, chosen))


def _is_small(weight: Any) -> bool:
    return isinstance(weight, Tensor) and weight.ndim < 2


def _names(key: str) -> set[str]:
    return {key, key.removesuffix(".weight")}


def _matches(key: str, glob: Selector) -> bool:
    return fits(str(glob), _names(key))


def _place(key: str, weight: Tensor) -> Hashable:
    """Equal for tied weights."""
    return (weight.device, weight.data_ptr(), weight.shape, weight.stride()) if weight.numel() else key


def _read(weight: Tensor, in_columns: bool) -> Tensor:
    return weight.detach().mT if in_columns else weight.detach().flatten(1)


def _unfit(weight: Any) -> str:
    if not isinstance(weight, Tensor):
        return f"not a tensor ({weight if isinstance(weight, str) else type(weight).__name__})"
    if weight.is_meta:
        return "on the meta device and has no values"
    if weight.is_complex():
        return f"complex ({weight.dtype})"
    return "" if weight.is_floating_point() else f"quantised or integer ({weight.dtype})"


def _unwrapped(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The entries under names free of wrappers' prefixes. "module" is one only where every name begins with it."""
    inner = set(WRAPPERS.values()) - {"module"}
    clean = {
        ".".join(part for part in str(key).split(".") if part not in inner): value for key, value in stored.items()
    }
    tensors = [key for key, value in clean.items() if isinstance(value, Tensor)]
    while tensors and all(key.startswith("module.") for key in tensors):
        clean = {key.removeprefix("module."): value for key, value in clean.items()}
        tensors = [key.removeprefix("module.") for key in tensors]
    return clean
