"""A stand-in for CUDA graphs on a CPU: to launch one is to run its function again and write where it wrote first.

Like theirs, its memory is not its own: what a graph saved is gone once another one is launched.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from retrograd import arena, launch


class Graph:
    def __init__(self, arena: Arena, function: Callable[[], list[Tensor]]) -> None:
        self.arena, self.function = arena, function
        self.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self.memory: list[Tensor | None] = []  # None: not the graph's

    def replay(self) -> None:
        self.arena.launched += 1
        last = self.arena.last()
        for tensor in [] if last is None or last is self else last.memory:
            if tensor is not None:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
        self.arena.last = weakref.ref(self)
        enabled, dtype = self.autocast
        with torch.autocast("cpu", dtype, enabled=enabled, cache_enabled=False):
            for tensor, new in zip(self.memory, self.function(), strict=True):
                if tensor is not None:
                    tensor.copy_(new.detach())


class Arena(arena.Arena):
    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.streams, self.graphs = weakref.WeakValueDictionary(), weakref.WeakSet()
        self.user = self.borrower = self.last = lambda: None
        self.recorded = self.launched = 0

    def record(self, function):
        self.recorded += 1
        graph = Graph(self, function)
        streams = [(stream, stream.clone()) for stream in self.streams.values()]
        with torch.random.fork_rng([]):
            saved = function()
        for stream, before in streams:  # a capture runs nothing
            stream.data.copy_(before)
        others = {stream.untyped_storage().data_ptr() for stream, _ in streams}
        for index, tensor in enumerate(saved):
            weight = tensor if tensor._base is None else tensor._base
            if tensor.untyped_storage().data_ptr() in others or isinstance(weight, torch.nn.Parameter):
                graph.memory.append(None)
            else:
                saved[index] = tensor.detach().clone()
                graph.memory.append(saved[index])
        self.graphs.add(graph)
        return saved, graph


def on_cpu(patch: pytest.MonkeyPatch) -> Arena:
    """Graphs on the CPU from here on."""
    shared = Arena()
    patch.setattr(launch, "KIND", "cpu")
    patch.setattr(arena.ARENAS, "on", lambda device: shared)
    patch.setattr(launch, "in_place", lambda tensor, graph: tensor)
    patch.setattr(launch, "_waiting", lambda: contextlib.nullcontext([]))
    patch.setattr(launch, "_warned", set())
    return shared
