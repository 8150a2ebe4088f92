"""What the code of a class names: globals, attributes of the class, functions of its package.

Only code is read here. What the names lead to is searched in reach.py; whether it has changed is looked at in plain.py.
"""

from __future__ import annotations

import dis
import functools
import types
from abc import ABCMeta
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from .bindings import MISSING, Attribute, Binding

SIMPLE = (type(None), str, bytes, int, float, complex, type, types.ModuleType, types.BuiltinFunctionType, torch.dtype)
PLAIN = frozenset({*SIMPLE, bool})  # the same by exact type, which is found faster
CALL = frozenset({"__call__"})
FORWARD = CALL | {"forward"}


@functools.lru_cache(4096)
def globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function and the functions inside it name."""
    steps = chain.from_iterable(map(dis.get_instructions, _codes(code)))
    return tuple({step.argval: None for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")})


class Code(NamedTuple):
    """Methods of a class, with what they call of it and of its package."""

    named: tuple[tuple[Any, str], ...]  # the globals and class attributes that they name, less what can hold nothing
    names: frozenset[str]  # all names in their code
    functions: frozenset[types.FunctionType]


@functools.lru_cache(1024)
def code_of(kind: type, methods: frozenset[str]) -> Code:
    """What these methods of a class name. This is found once for a class; what the names are bound to, at each call."""
    found: dict[tuple[int, str], tuple[Any, str]] = {}
    package, functions, names = package_of(kind), [], [*methods]
    seen: set[str] = set()
    searched: set[types.FunctionType] = set()
    while names or functions:
        if names:
            name = names.pop()
            if name in seen:
                continue
            seen.add(name)
            for base in kind.__mro__:  # all of them: a method may call that of a base
                if name not in vars(base) or base in (object, nn.Module):
                    continue
                member = vars(base)[name]
                member = getattr(member, "__func__", getattr(member, "fget", member))  # of a class, static, a property
                if isinstance(member, types.FunctionType):
                    functions += [member] if package_of(member) not in ("torch", "retrograd") else []
                elif not callable(member) and type(member) not in PLAIN:
                    found[id(base), name] = vars(base), name
            continue
        function = functions.pop()
        if function in searched:
            continue
        searched.add(function)
        names += chain.from_iterable(code.co_names for code in _codes(function.__code__))
        for name in globals_of(function.__code__):
            value = function.__globals__.get(name, MISSING)
            if isinstance(value, types.FunctionType):
                functions += [value] if package_of(value) == package != "retrograd" else []
            elif value is not MISSING and not isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
                found[id(function.__globals__), name] = function.__globals__, name
    return Code(tuple(found.values()), frozenset(seen), frozenset(searched))


@functools.lru_cache(1024)
def bound_by(kind: type[nn.Module], methods: frozenset[str]) -> tuple[Binding, ...] | None:
    """All that the code of a class can read besides its module, its arguments and what it is seen to name, and what it
    is bound to: only what is constant. `methods` are those that other modules may call. None where that cannot be told.
    """
    if type(kind) not in (type, ABCMeta):
        return None
    own, of_torch = [], []
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        (of_torch if package_of(base) == "torch" else own).append(base)
    # Torch calls these, by their names or without; its layers change only if someone exchanges their forward.
    called = {name for base in of_torch for f in vars(base).values() if _is_function(f) for name in f.__code__.co_names}
    compared: list[Binding] = [(vars(base), "forward", vars(base).get("forward", MISSING)) for base in of_torch]
    code = code_of(kind, methods | called | {name for base in own for name in _IMPLICIT & vars(base).keys()})
    if own and not code.names.isdisjoint(_UNSEEN):
        return None
    bound: list[Binding] = [(vars(base), name, vars(base).get(name, MISSING)) for base in own for name in code.names]
    seen = {(id(where), name) for where, name in code.named}
    for function in code.functions:
        names, where = globals_of(function.__code__), function.__globals__
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        closed = set(function.__code__.co_freevars) <= {"__class__"} and vars(function).keys() <= {"__wrapped__"}
        if not (closed and all(map(constant, defaults)) and _imports_torch_alone(function.__code__)):
            return None
        bound += [(where, name, where.get(name, MISSING)) for name in names if (id(where), name) not in seen]
        bound += _of_modules([where.get(name) for name in names], code.names)
        compared += [(Attribute(function), name, getattr(function, name)) for name in _OF_FUNCTIONS]
    for _, _, value in bound:
        inner = value.fget if type(value) is property else getattr(value, "__func__", value)
        if not (inner is MISSING or constant(inner) or (_is_function(inner) and inner in code.functions)):
            return None
    return tuple(compared + bound)


_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_IMPLICIT = frozenset(
    {"__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__", "__getitem__", "__iter__"}
    | {"__next__", "__len__", "__contains__", "__bool__", "__eq__", "__hash__", "__enter__", "__exit__", "__index__"}
    | {"__add__", "__radd__", "__mul__", "__rmul__", "__matmul__", "__int__", "__float__"}
)
_UNSEEN = frozenset(
    {"eval", "exec", "compile", "globals", "locals", "vars", "dir", "open", "input", "__import__", "import_module"}
    | {"getattr", "hasattr", "__dict__", "attrgetter", "methodcaller", "grad", "checkpoint"}
    | {"Generator", "manual_seed", "initial_seed", "seed", "fork_rng", "get_rng_state", "set_rng_state"}
)
"""With these, code may read anything, or draw from where nobody looks."""
_FIXED = frozenset({"torch", "math", "builtins", "operator"})
"""Packages in which nothing changes."""


def _of_modules(values: list[Any], names: frozenset[str]) -> list[Binding]:
    """What modules, such as torch, are asked for by these names, and so on with the modules found there."""
    found: list[Binding] = []
    modules = [value for value in values if isinstance(value, types.ModuleType)]
    seen: set[int] = set()
    while modules:
        module = modules.pop()
        if id(module) not in seen:
            seen.add(id(module))
            inside = [(vars(module), name, value) for name, value in vars(module).items() if name in names]
            found += inside
            modules += [value for _, _, value in inside if isinstance(value, types.ModuleType)]
    return found


def _is_function(value: Any) -> bool:
    return type(value) is types.FunctionType


def constant(value: Any) -> bool:
    """Whether this is the same wherever it is read, and leads to nothing that may change."""
    kind = type(value)  # a dead proxy is no instance of anything
    if kind is tuple:
        return all(map(constant, value))
    if issubclass(kind, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)):
        return package_of(value) in _FIXED
    return kind in PLAIN or kind is torch.device


def package_of(value: Any) -> str:
    """Of a module, a class or a function; those that are built in may have it from what they belong to."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(name or getattr(getattr(value, "__self__", None), "__module__", "")).split(".")[0]


def _imports_torch_alone(code: types.CodeType) -> bool:
    steps = chain.from_iterable(map(dis.get_instructions, _codes(code)))
    return all(step.argval.split(".")[0] in _FIXED for step in steps if step.opname == "IMPORT_NAME")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """That of a function, and those of the functions inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)
