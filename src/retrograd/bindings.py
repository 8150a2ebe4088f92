"""What names are bound to, exchanged for a replay and put back: entries of dicts, attributes, variables of closures,
and the forward hooks of modules.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

MISSING: Any = object()
"""Stands for the value of a name that is not bound."""

ALL: Any = object()
"""Stands for all names in a dict, in their order; the value is the dict that it was."""

Binding = tuple[Any, Any, Any]
"""Where a name is bound, the name, and to what."""

Swapped = list[Binding]
"""What was exchanged, and what it was bound to."""


class Cell:
    """A variable of a closure, to be read and written as if it were in a dict."""

    __slots__ = ("cell",)

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # it is empty
            return default

    def __setitem__(self, name: str, value: Any) -> None:
        self.cell.cell_contents = value

    def pop(self, name: str) -> None:
        del self.cell.cell_contents


class Attribute:
    """An attribute that is not in the `__dict__` of its owner, as in TorchScript and of functions: likewise."""

    __slots__ = ("owner",)

    def __init__(self, owner: nn.Module | types.FunctionType) -> None:
        self.owner = owner

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self.owner, name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)


def training_flag(module: nn.Module) -> Binding:
    """Whether a module is in training, and where that stands."""
    where = module.__dict__ if "training" in module.__dict__ else Attribute(module)
    return where, "training", module.training


def exchange(where: Any, name: Any, other: Any, swapped: Swapped) -> None:
    """Bind a name to what it was bound to, and note what it is bound to now."""
    current = where.get(name, MISSING)
    # DTensors are left to FSDP2, which exchanges sharded and whole parameters by itself.
    if not is_dtensor(current) and not is_dtensor(other):
        swapped.append((where, name, current))
        _bind(where, name, other)


def exchange_all(where: dict[str, Any], other: dict[str, Any], swapped: Swapped) -> None:
    """Bind all names in a dict, and no others, to what they were bound to, in that order. (DTensors: as above.)"""
    if not any(map(is_dtensor, (*where.values(), *other.values()))):
        swapped.append((where, ALL, where.copy()))
        _bind(where, ALL, other)


def put_back(swapped: Swapped) -> None:
    """Undo the exchanges, the last one first."""
    for where, name, value in reversed(swapped):
        _bind(where, name, value)


def _bind(where: Any, name: Any, value: Any) -> None:
    if name is ALL:
        where.clear()
        where.update(value)
        return
    if value is not MISSING:
        where[name] = value
    elif where.get(name, MISSING) is not MISSING:
        where.pop(name)


def without_graph(value: Any) -> Any:
    """The same values with nothing behind them: what is bound to a name may be the result of an earlier program, and
    hold its tape."""
    if not isinstance(value, Tensor) or value.is_leaf:
        return value
    return value.detach().requires_grad_(value.requires_grad)


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def hooks_of(module: nn.Module) -> dict[str, Any]:
    """The forward hooks of a module as they are."""
    return {name: getattr(module, name).copy() for name in _HOOKS}


def exchange_hooks(module: nn.Module, then: dict[str, Any] | None, swapped: Swapped) -> None:
    """Give a module the hooks that it had, where some were added or removed since."""
    for name in _HOOKS:
        hooks = OrderedDict() if then is None else then[name].copy()  # fn may add one to it
        if hooks != getattr(module, name):
            exchange(module.__dict__, name, hooks, swapped)


def is_dtensor(value: Any) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)  # by name: the import is slow
