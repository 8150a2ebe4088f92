"""What a callable can be seen to use: modules, tensors and generators, found through its submodules, its closure, its
globals, its defaults, and the objects these lead to. What it reaches in other ways stays unseen.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_SIMPLE = (type(None), str, bytes, int, float, complex, type, types.ModuleType, types.BuiltinFunctionType, torch.dtype)
_REGISTRIES = frozenset(nn.Module().__dict__)
_FAR = 1 << 30
_MANY = 4096  # a longer container is data; looking through more than that at each call would take too long


class Reached:
    """The modules, tensors and generators that a call can be seen to use."""

    __slots__ = ("modules", "own", "tensors", "variables", "generators", "_seen")

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []  # all of them
        self.own: list[nn.Module] = []  # those that fn itself is made of
        self.tensors: list[Tensor] = []
        self.variables: list[tuple[Any, str, Tensor]] = []  # where a tensor is bound to a name
        self.generators: list[torch.Generator] = []
        self._seen: dict[int, int] = {}  # how far each object was followed

    def walk(self, module: nn.Module, *, own: bool) -> None:
        """A module and its submodules; and what its hooks and its attributes lead to."""
        # `_modules`, `_parameters` and `_buffers` instead of the public generators: ten times faster, and parameters
        # can be exchanged for plain tensors. tests/test_reach.py fails when they change.
        if id(module) in self._seen:
            return
        self._seen[id(module)] = _FAR
        self.modules.append(module)
        if own:
            self.own.append(module)
        if "forward" in module.__dict__:  # patched
            self.look(module.__dict__["forward"], 3)
        if module._forward_hooks or module._forward_pre_hooks:
            self.look([*module._forward_hooks.values(), *module._forward_pre_hooks.values()], 3)
        if not _of_torch(type(module)):
            for name, value in module.__dict__.items():
                kind = type(value)
                if kind is torch.Generator:
                    self.generators.append(value)
                elif kind is Tensor:
                    self.variables.append((module.__dict__, name, value))
                    if own:
                        self.tensors.append(value)
                elif kind in (list, tuple, dict, set) and name not in _REGISTRIES:
                    self.look(value, 3)
        for child in module._modules.values():
            if child is not None:
                self.walk(child, own=own)

    def look(self, value: Any, depth: int) -> None:
        """Follow closures, globals, defaults, partial arguments, bound objects, containers and their like."""
        if depth <= self._seen.get(id(value), 0) or isinstance(value, _SIMPLE) or len(self._seen) > _MANY:
            return
        first = id(value) not in self._seen
        self._seen[id(value)] = depth
        if isinstance(value, Tensor):
            if first:
                self.tensors.append(value)
        elif isinstance(value, torch.Generator):
            if first:
                self.generators.append(value)
        elif isinstance(value, nn.Module):
            del self._seen[id(value)]
            self.walk(value, own=False)
        elif isinstance(value, types.MethodType):
            self.look(value.__self__, depth)
            self.look(value.__func__, depth)
        elif isinstance(value, functools.partial):
            for inner in (value.func, *value.args, *value.keywords.values()):
                self.look(inner, depth)
        else:
            if isinstance(value, types.FunctionType):
                self.variables += _variables(value)
            for inner in _held_by(value):
                self.look(inner, depth - 1)


@functools.lru_cache(1024)
def _of_torch(kind: type[nn.Module]) -> bool:
    """Modules that keep all they have in the registries."""
    return kind.__module__.startswith("torch.nn.modules.")


def reach(fn: Any, kwargs: Mapping[str, Any]) -> Reached:
    """What a call of `fn` can be seen to use. A module is searched whole; anything else as far as it shows."""
    reached = Reached()
    if isinstance(fn, nn.Module):
        reached.walk(fn, own=True)
    else:
        reached.look(fn, 5)
    for value in kwargs.values():
        reached.look(value, 5)
    return reached


def _held_by(value: Any) -> Iterator[Any]:
    """The objects that a function, a container or another object refers to."""
    if isinstance(value, types.FunctionType):
        yield getattr(value, "__wrapped__", None)
        if (value.__module__ or "").split(".")[0] == "torch":
            return
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is still empty
                yield cell.cell_contents
        for name in _names(value.__code__):
            if not isinstance(known := value.__globals__.get(name), _SIMPLE):
                yield known
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value if len(value) <= _MANY else ()
    elif isinstance(value, dict):
        yield from value.values() if len(value) <= _MANY else ()
    else:
        yield from getattr(value, "__dict__", {}).values()
        for name in getattr(type(value), "__slots__", ()):
            yield getattr(value, name, None)


class Cell:
    """A variable of a closure, to be read and written as if it were in a dict."""

    __slots__ = ("cell",)

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def get(self, name: str) -> Any:
        with contextlib.suppress(ValueError):  # it is empty
            return self.cell.cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self.cell.cell_contents = value


def _variables(function: types.FunctionType) -> Iterator[tuple[Any, str, Tensor]]:
    """The tensors that a function finds in its closure and among its globals."""
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
        if isinstance(known := (variable := Cell(cell)).get(name), Tensor):
            yield variable, name, known
    for name in _names(function.__code__):
        if isinstance(known := function.__globals__.get(name), Tensor):
            yield function.__globals__, name, known


def _names(code: types.CodeType) -> Iterator[str]:
    """The globals that a function and the functions inside it may use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
