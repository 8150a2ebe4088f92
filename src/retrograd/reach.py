"""What a callable can be seen to use: modules, tensors and generators, found through its submodules, its closure, its
globals, its defaults, the code of its class, and the objects these lead to. What it reaches in other ways stays unseen.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .bindings import MISSING, Binding, Cell, training_flag
from .named import CALL, FORWARD, PLAIN, SIMPLE, code_of, globals_of, package_of

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_MARKS = frozenset({type(None), bool, int, float, str})
_PROXIES = (*weakref.ProxyTypes,)
REGISTRIES = frozenset({*nn.Module().__dict__, "_compiled_call_impl"})
_FAR = 1 << 30
_FEW = 64  # in a longer dict, what is bound anew is not put back
_MANY = 4096  # a longer container is data; looking through more than that at each call would take too long


class Reached:
    """The modules, tensors and generators that a call can be seen to use."""

    __slots__ = ("modules", "own", "weights", "shown", "tensors", "members", "variables", "generators", "_seen")

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []  # all of them
        self.own: set[int] = set()  # the ids of those that fn itself is made of
        self.weights: list[Tensor] = []  # parameters of these,
        self.shown: list[Tensor] = []  # and of the others, which fn may not read, and which may well change
        self.tensors: list[Tensor] = []
        self.members: list[Binding] = []  # training flags, parameters and buffers
        self.variables: list[Binding] = []  # what else has a name
        self.generators: list[torch.Generator] = []
        self._seen: dict[int, int] = {}  # how far each object was followed

    def walk(self, module: nn.Module, *, own: bool, called: frozenset[str] = FORWARD) -> None:
        """A module and its submodules; and what its hooks, its attributes and its code lead to. `called`: what the code
        of the modules around it names, and so the methods of it that they may call."""
        # `_modules`, `_parameters` and `_buffers` instead of the public generators: ten times faster, and parameters
        # can be exchanged for plain tensors. tests/test_reach.py fails when they change.
        if id(module) in self._seen:
            return
        self._seen[id(module)] = _FAR
        self.modules.append(module)
        if own:
            self.own.add(id(module))
        weights = [weight for weight in module._parameters.values() if weight is not None]
        (self.weights if own else self.shown).extend(weights)
        self.members.append(training_flag(module))
        for members in (module._parameters, module._buffers):
            if members and isinstance(members, dict):  # not those of TorchScript, which cannot be exchanged
                self.members += [(members, name, member) for name, member in members.items()]
        if "forward" in module.__dict__:  # patched
            self.look(module.__dict__["forward"], 3)
        if module._forward_hooks or module._forward_pre_hooks:
            self.look([*module._forward_hooks.values(), *module._forward_pre_hooks.values()], 3)
        if not of_torch(kind := type(module)):
            self._attributes(module, own)
            code = code_of(kind, called)
            self._names(code.named)
            called = code.names
        else:
            self._entries(module.__dict__, (Tensor,))  # the p of a dropout; a tensor in place of a parameter
            if own:
                self.tensors += [value for value in module.__dict__.values() if issubclass(type(value), Tensor)]
        if children := module._modules:
            if type(children) is dict:
                self.variables += [(children, name, child) for name, child in children.items()]
            for child in children.values():
                if child is not None:
                    self.walk(child, own=own, called=called)

    def _attributes(self, module: nn.Module, own: bool) -> None:
        """What a module has beside its registries. Objects may lead anywhere, to the whole model: of these only what is
        near is seen."""
        for name, value in module.__dict__.items():
            if type(value) in PLAIN or name in REGISTRIES:
                continue
            with contextlib.suppress(Exception):  # what cannot be looked at, as a dead proxy, shows nothing
                if isinstance(value, Tensor):
                    self.variables.append((module.__dict__, name, value))
                    if own:
                        self.tensors.append(value)
                elif isinstance(value, (*_CONTAINERS, types.FunctionType, functools.partial)):
                    self.look(value, 3)
                elif isinstance(value, nn.Module):
                    if not value._modules:  # else it may be the parent
                        self.walk(value, own=False)
                else:
                    self._near(value)
        self._entries(module.__dict__)

    def _near(self, value: Any) -> None:
        """The generators of an object, or of the object that a method is bound to."""
        value = getattr(value, "__self__", value) if type(value) is types.MethodType else value
        held = vars(value).values() if type(value) not in _PROXIES and _has_dict(value) else ()
        for generator in (value, *held):
            if type(generator) is torch.Generator:
                self.look(generator, 1)

    def _entries(self, entries: dict[Any, Any], kinds: tuple[type, ...] = ()) -> None:
        """The numbers, flags and words in a dict, and what is of `kinds`."""
        self.variables += [
            (entries, name, value)
            for name, value in entries.items()
            if (type(value) in _MARKS or issubclass(type(value), kinds)) and name not in REGISTRIES
        ]

    def look(self, value: Any, depth: int) -> None:
        """Follow closures, globals, defaults, partial arguments, bound objects, containers and their like."""
        if type(value) in _PROXIES or depth <= self._seen.get(id(value), 0) or isinstance(value, SIMPLE):
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
        elif len(self._seen) > _MANY:
            return
        elif isinstance(value, types.MethodType):
            self.look(value.__self__, depth)
            self.look(value.__func__, depth)
        elif isinstance(value, functools.partial):
            for inner in (value.func, *value.args, *value.keywords.values()):
                self.look(inner, depth)
        else:
            if isinstance(value, types.FunctionType):
                self.variables += _variables(value)
            else:
                entries = value if isinstance(value, dict) else vars(value) if _has_dict(value) else {}
                kinds = (Tensor, nn.Module)
                if any(isinstance(each, kinds) for each in entries.values()) and not _holds_graph(entries):
                    self._entries(entries, kinds)
            for inner in _held_by(value):
                if type(inner) not in PLAIN:
                    with contextlib.suppress(Exception):
                        self.look(inner, depth - 1)

    def _names(self, named: tuple[tuple[Any, str], ...]) -> None:
        """What the code of a class names: globals and class attributes."""
        for where, name in named:
            value = where.get(name)
            if isinstance(value, (Tensor, nn.Module, int, float)) and isinstance(where, dict):
                self.variables.append((where, name, value))
            if isinstance(value, (Tensor, nn.Module, torch.Generator)):
                self.look(value, 1)
            elif isinstance(value, _CONTAINERS):
                self.look(value, 2)


@functools.lru_cache(1024)
def of_torch(kind: type[nn.Module]) -> bool:
    """Modules that keep all they have in the registries."""
    return kind.__module__.startswith("torch.nn.modules.")


def reach(fn: Any, kwargs: Mapping[str, Any]) -> Reached:
    """What a call of `fn` can be seen to use. A module is searched whole; anything else as far as it shows."""
    reached = Reached()
    for value in kwargs.values():
        reached.look(value, 5)
    if isinstance(fn, nn.Module):
        reached.walk(fn, own=True)
    else:
        reached.look(fn, 5)
        if not isinstance(fn, (types.FunctionType, types.MethodType, functools.partial)):
            reached._names(code_of(type(fn), CALL).named)
    return reached


def _has_dict(value: Any) -> bool:
    return type(getattr(value, "__dict__", None)) is dict


def _held_by(value: Any) -> Iterator[Any]:
    """The objects that a function, a container or another object refers to."""
    if isinstance(value, types.FunctionType):
        yield getattr(value, "__wrapped__", None)
        if package_of(value) == "torch":
            return
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is still empty
                yield cell.cell_contents
        for name in globals_of(value.__code__):
            yield value.__globals__.get(name)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value if len(value) <= _MANY else ()
    elif isinstance(value, dict):
        yield from value.values() if len(value) <= _MANY else ()
    else:
        yield from vars(value).values() if _has_dict(value) else ()
        for name in getattr(type(value), "__slots__", ()):
            yield getattr(value, name, None)


def _variables(function: types.FunctionType) -> Iterator[tuple[Any, str, Any]]:
    """What the names in a function are bound to: those of its closure; of its globals, tensors, modules and numbers."""
    if package_of(function) == "torch":
        return
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
        if (known := (variable := Cell(cell)).get(name, MISSING)) is not MISSING and not _holds_graph(known):
            yield variable, name, known
    for name in globals_of(function.__code__):
        if isinstance(known := function.__globals__.get(name), (Tensor, nn.Module, int, float)):
            yield function.__globals__, name, known


def _holds_graph(value: Any) -> bool:
    """Whether a container or an object holds results of earlier programs, and so their tapes."""
    if isinstance(value, (Tensor, nn.Module, *SIMPLE, types.FunctionType)):
        return False  # a tensor is held without its graph
    entries = vars(value) if _has_dict(value) else value
    entries = entries.values() if isinstance(entries, dict) else entries
    if not isinstance(entries, (list, tuple, set, frozenset, deque, type({}.values()))) or len(entries) > _FEW:
        return True
    return any(isinstance(each, Tensor) and not each.is_leaf for each in entries)
