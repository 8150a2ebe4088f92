"""Plain modules: what a call of one uses is known from the call before, and only looked over.

Most networks are plain: parameters, submodules that are plain too, and numbers and words beside them. To search them
anew at each call (reach.py) takes the host longer than a kernel; to see that nothing has changed does not.
"""

from __future__ import annotations

import operator
import types
import weakref
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from .bindings import MISSING, Binding, Swapped, exchange, exchange_all
from .named import FORWARD, PLAIN, bound_by, code_of, constant, package_of
from .reach import REGISTRIES, Reached, of_torch, reach

_CORE = ("_parameters", "_forward_hooks", "_forward_pre_hooks")
_INNER = ("_buffers", "_modules")  # nothing that comes into these changes what a layer of torch computes


ReadBy = tuple[tuple[type, frozenset[str]] | None, ...]
"""The classes and methods whose code reads what is in a module; None where that may lead anywhere."""


class Known:
    """What a plain module uses, to be found again by a look whether anything has changed.

    Plain is a module with nothing but parameters, submodules that are plain, and attributes and globals that are
    numbers, words and the like: no buffers, hooks, or tensors of its own. Most networks are.
    """

    def __init__(self, reached: Reached, entries: list[Binding], code: ReadBy) -> None:
        # Not the module itself: whoever knows it would keep it alive.
        self.code = code
        self.below, self.weights = reached.modules[1:], reached.weights
        self.ways: list[Any] = []  # in which it was called, each with the graph of its replay: see launch.py
        once = {(id(where), name): (where, name, value) for where, name, value in reached.variables + entries}
        self.members, self.variables = reached.members, [*once.values()]
        self._kinds, self._dicts = [*map(type, reached.modules)], [*map(vars, reached.modules)]
        self._where, self._names, self._values = map(list, zip(*self.members, *self.variables, strict=True))
        # Dicts that may grow, and those whose order counts.
        registries = [m._parameters for m in reached.modules]
        registries += [d for m in reached.modules if not _is_layer(m) for d in (m._buffers, m._modules)]
        self._registries = [(d, d.copy()) for d in registries]
        self._attributes = [*map(tuple, self._dicts)]
        none = [(where, name) for where, name, value in self.members + self.variables if value is None]
        self._none = [[where for where, _ in none], [name for _, name in none]]  # to be told from what is not there
        self._growing = self._dicts + registries
        self._sizes = [*map(len, self._growing)]
        self._ordered = [m._modules for m in reached.modules if len(m._modules) > 1]
        self._orders = [*map(tuple, self._ordered)]
        self._hooks = [d for m in reached.modules for d in (m._forward_hooks, m._forward_pre_hooks)]

    def holds(self, fn: nn.Module) -> bool:
        """Whether everything is as it was found."""
        modules = [fn, *self.below]
        return (
            all(map(operator.is_, map(dict.get, self._where, self._names), self._values))
            and all(map(operator.contains, *self._none))
            and [*map(len, self._growing)] == self._sizes
            and [*map(tuple, self._ordered)] == self._orders
            and not any(self._hooks)
            and [*map(type, modules)] == self._kinds
            and all(map(operator.is_, map(vars, modules), self._dicts))
        )

    def put_back(self, swapped: Swapped) -> None:
        """Bind every name to what it was bound to, and unbind those that have come since."""
        for where, name, value in zip(self._where, self._names, self._values, strict=True):
            if where.get(name, MISSING) is not value:
                exchange(where, name, value, swapped)
        for where, names in zip(self._dicts, self._attributes, strict=True):
            for name in where.keys() - names:
                exchange(where, name, MISSING, swapped)
        for where, then in self._registries:
            if [*where] != [*then] or not all(map(operator.is_, where.values(), then.values())):
                exchange_all(where, then, swapped)


_known: dict[int, tuple[weakref.ref[nn.Module], Known | None]] = {}


def known(fn: Any) -> Known | None:
    """What a plain module uses; None for all else."""
    entry = _known.get(id(fn))
    if entry is not None and entry[0]() is fn:
        if entry[1] is None or entry[1].holds(fn):
            return entry[1]
    elif not isinstance(fn, nn.Module):
        return None
    plain = _plain(fn)
    if plain is not None and any(map(_is_disturbed, fn.modules())):
        return None  # at this call
    found = None if plain is None else Known(reach(fn, {}), *plain)
    key = id(fn)

    def forget(gone: weakref.ref[nn.Module]) -> None:
        if key in _known and _known[key][0] is gone:
            del _known[key]

    _known[key] = weakref.ref(fn, forget), found
    return found


def _is_disturbed(module: nn.Module) -> bool:
    """Whether there is something on a plain module that may go again: hooks, or tensors in place of its parameters."""
    return (
        bool(module._forward_hooks or module._forward_pre_hooks)
        or "forward" in vars(module)
        or any(weight is not None and type(weight) is not nn.Parameter for weight in module._parameters.values())
    )


def stands(code: ReadBy) -> bool:
    """Whether all that the code of a plain module reads can be told, and is bound as it was when it was first seen."""
    for each in code:
        bound = None if each is None else bound_by(*each)
        if bound is None or any(where.get(name, MISSING) is not value for where, name, value in bound):
            return False
    return True


def _plain(fn: nn.Module) -> tuple[list[Binding], ReadBy] | None:
    """Where the entries stand that make a module plain, and what they are, and what code reads them; None if it is not
    plain."""
    entries: list[Binding] = []
    read: list[Any] = []
    called = FORWARD
    for module in fn.modules():
        mine, kind = vars(module), type(module)
        if any(child is fn for child in module._modules.values()):  # who knows it would keep it alive
            return None
        if "training" not in mine or module._buffers or isinstance(module, LazyModuleMixin):  # not there: TorchScript
            return None
        entries += [(mine, name, mine[name]) for name in _CORE]
        if any(issubclass(type(value), Tensor) for value in mine.values()):  # a dead proxy is no instance of anything
            return None
        attributes = [(mine, name, value) for name, value in mine.items() if name not in _APART]
        if not _is_layer(module):
            entries += [(mine, name, mine[name]) for name in _INNER]
        weights = [weight for weight in mine["_parameters"].values() if weight is not None]
        of_weights = [(vars(weight), name, value) for weight in weights for name, value in vars(weight).items()]
        beside = [*attributes, *of_weights] if of_torch(kind) else of_weights
        if not all(name in _LISTS or constant(value) for _, name, value in beside):  # it may lead to this module
            return None
        entries += beside
        read.append(kind if of_torch(kind) or all(constant(value) for _, _, value in attributes) else None)
        if of_torch(kind):
            continue
        code = code_of(kind, called)
        named, called = [(where, name, where.get(name)) for where, name in code.named], code.names
        if not all(type(where) is dict and _means_itself(value) for where, _, value in attributes + named):
            return None
        entries += attributes + named
    # What one module calls of another: names add up, whatever the order.
    names, kinds = frozenset[str](), {kind for kind in read if kind is not None}
    while names != called:
        names = called
        for kind in kinds:
            called |= code_of(kind, called).names
    return entries, tuple({(kind, called) if kind is not None else None: None for kind in read})


_APART = REGISTRIES | {"forward"}  # this one may go again: see _is_disturbed
_LISTS = frozenset(
    {"_reversed_padding_repeated_twice", "_flat_weights", "_flat_weights_names", "_flat_weight_refs", "_all_weights"}
)
"""Of torch's layers, which nobody else changes."""


def _is_layer(module: nn.Module) -> bool:
    """One of torch's own that computes by itself."""
    kind = type(module)
    return not module._modules and of_torch(kind) and kind.__module__ != nn.Sequential.__module__  # may be empty yet


def _means_itself(value: Any) -> bool:
    """A number, a word, a function of torch, or a tuple of these: nothing that leads to tensors or can change."""
    if type(value) is tuple:
        return all(map(_means_itself, value))
    if type(value) is types.FunctionType:
        return package_of(value) == "torch"
    return type(value) in PLAIN
