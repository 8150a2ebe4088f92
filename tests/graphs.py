"""A stand-in for CUDA graphs on a CPU: it holds the operators that ran at the capture, with their memory, and to
launch it is to run these again.

So like a real one it does not know what Python would do now; and its memory is not its own: what a graph saved is gone
once another one is launched.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from retrograd import arena, launch
from retrograd.plain import _known


class Recorder(TorchDispatchMode):
    """Notes every operator, with what it read and what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = operator(*args, **kwargs)
        held = [
            tree_map(lambda leaf: leaf.data if isinstance(leaf, Tensor) else leaf, it) for it in (args, kwargs, out)
        ]
        self.operators.append((operator, *held))
        return out


class Graph:
    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.operators: list[tuple[Any, Any, Any, Any]] = []
        self.memory: list[Tensor] = []  # what it allocated

    def replay(self) -> None:
        self.arena.launched += 1
        last = self.arena.last()
        for tensor in [] if last is None or last is self else last.memory:
            tensor.fill_(torch.nan if tensor.is_floating_point() or tensor.is_complex() else 1)
        self.arena.last = weakref.ref(self)
        plain = torch.no_grad(), torch.autocast("cpu", enabled=False), _disable_current_modes()
        with plain[0], plain[1], plain[2], torch._C.DisableTorchFunction():  # pyright: ignore[reportAttributeAccessIssue]
            for operator, args, kwargs, out in self.operators:
                for place, new in zip(tree_leaves(out), tree_leaves(operator(*args, **kwargs)), strict=True):
                    if isinstance(place, Tensor) and place.numel() and place.data_ptr() != new.data_ptr():
                        place.copy_(new)


class Arena(arena.Arena):
    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.streams, self.graphs = weakref.WeakValueDictionary(), weakref.WeakSet()
        self.user = self.borrower = self.last = lambda: None
        self.recorded = self.launched = 0

    def record(self, function: Callable[[], Any]) -> tuple[Any, Graph]:
        self.recorded += 1
        graph = Graph(self)
        streams = [(stream, stream.clone()) for stream in self.streams.values()]
        with torch.random.fork_rng([]), Recorder() as recorder:
            saved = function()
        for stream, before in streams:  # a capture runs nothing
            stream.data.copy_(before)
        graph.operators = recorder.operators
        given: set[int] = set()
        made: set[int] = set()
        for _, args, kwargs, out in graph.operators:
            given |= {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)} - made
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor) and _memory(leaf) not in given:
                    made.add(_memory(leaf))
                    graph.memory.append(leaf)
        self.graphs.add(graph)
        return saved, graph


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Arenas(threading.local):
    """One for each thread."""

    def __init__(self) -> None:
        self.arena = Arena()


def ways(net: torch.nn.Module) -> list[Any]:
    """In which the modules of a network were called, each with its graph if it has one."""
    found = [_known[id(fn)][1] for fn in net.modules() if id(fn) in _known]
    return [way for known in found if known is not None for way in known.ways]


def equal(got: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> bool:
    """To the bit; None only where the other is."""
    return all(a is b is None or torch.equal(a, b) for a, b in zip(got, expected, strict=True))  # type: ignore[arg-type]


def on_cpu(patch: pytest.MonkeyPatch) -> Arena:
    """Graphs on the CPU from here on; the arena of this thread."""
    arenas = Arenas()
    patch.setattr(launch, "KIND", "cpu")
    patch.setattr(arena._Arenas, "on", lambda self, device: arenas.arena)
    patch.setattr(launch, "in_place", lambda tensor, graph: tensor)
    patch.setattr(launch, "_waiting", lambda: contextlib.nullcontext([]))
    patch.setattr(launch, "_warned", set())
    return arenas.arena
