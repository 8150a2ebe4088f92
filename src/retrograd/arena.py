"""Where the graphs of replays (launch.py) read and write.

A graph uses the same memory at each launch. So all graphs share an arena: the streams, which each of them takes one
update back in place, and one piece of memory for what they save, since only one replay is being differentiated at a
time. When another pass comes to use it, what is left there is moved out first.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .saved import Saved
from .streams import counter

if TYPE_CHECKING:
    from .tape import Reversal, Tape

T = TypeVar("T")


class Launched(Saved):
    """What a graph saved: it lies in the arena, until the next launch."""

    __slots__ = ("arena", "lent")

    def __init__(self, arena: Arena, tensors: list[Tensor], lent: dict[int, Tensor]) -> None:
        self.tensors: list[Tensor | None] = [*tensors]
        self.versions = [*map(counter, tensors)]
        self.arena, self.lent = arena, lent

    def lend(self, borrower: Lent) -> None:
        """Until the next launch: all that nobody else can change meanwhile."""
        borrower.update(self.lent)
        self.arena.borrower = weakref.ref(borrower)

    def forget(self, device: torch.device) -> bool:
        return device != self.arena.device

    def move_out(self) -> None:
        """Into memory of its own."""
        self.tensors = [None if tensor is None else tensor.clone() for tensor in self.tensors]
        self.versions = [0] * len(self.tensors)
        self.lent = {}


class Lent(dict[int, Tensor]):
    """What the graph of an update saved (launch.py), by slot: autograd gets at it here. What is not here, the tape
    serves."""

    __slots__ = ("tape", "position", "__weakref__")

    def __init__(self, tape: Tape, position: int) -> None:
        self.tape, self.position = tape, position

    def __missing__(self, slot: int) -> Tensor:
        tensor = self.tape.serve(self.position, slot)
        if not self:
            self.tape.lend(self)
        return tensor


class Arena:
    """The memory that the graphs of one thread have in common, on one stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.aside = torch.cuda.Stream(device)
        self.streams: weakref.WeakValueDictionary[Any, Tensor] = weakref.WeakValueDictionary()
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.pool: Any = None
        self.user: Callable[[], Reversal | None] = lambda: None
        self.borrower: Callable[[], Lent | None] = lambda: None

    def take(self, reversal: Reversal) -> None:
        """This pass is about to launch something."""
        if (borrower := self.borrower()) is not None:
            borrower.clear()
        before = self.user()
        if before is not reversal:
            if before is not None:
                before.move_out_all()
            self.user = weakref.ref(reversal)

    def place(self, name: str, leaf: Tensor) -> Tensor:
        """Where graphs find a stream that is laid out like this one."""
        key = name, leaf.shape, leaf.stride(), leaf.dtype
        place = self.streams.get(key)
        if place is None:
            place = self.streams[key] = torch.empty_like(leaf)
        return place

    def record(self, function: Callable[[], T]) -> tuple[T, Any]:
        """What a function returns, and a graph of all that it launches. The device does not run it."""
        if not self.graphs:  # a pool ends with its last graph
            self.pool = torch.cuda.graph_pool_handle()
        graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[self.device.index]
        spare = generator.clone_state()
        self.aside.wait_stream(torch.cuda.current_stream(self.device))
        collecting = gc.isenabled()
        gc.disable()  # a graph must not be freed while another one is captured
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self.aside):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    out = function()
                finally:
                    graph.capture_end()
        except BaseException:
            generator.graphsafe_set_state(spare)  # a capture that fails leaves the other one unable to draw
            self.graphs, self.aside = weakref.WeakSet(), torch.cuda.Stream(self.device)
            raise
        finally:
            if collecting:
                gc.enable()
        self.graphs.add(graph)
        return out, graph


class _Memory:
    """The memory of a tensor that was allocated in a capture, for as long as the graph lives. It is described as Numba
    and CuPy do it, which torch reads. So the tensor itself can go, and the next capture use the same memory."""

    def __init__(self, tensor: Tensor, graph: Any) -> None:
        storage = tensor.untyped_storage()
        self.graph = graph
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def in_place(tensor: Tensor, graph: Any) -> Tensor:
    """The same tensor, which does not own its memory."""
    if not tensor.numel():
        return torch.empty_like(tensor)
    memory = torch.as_tensor(_Memory(tensor, graph), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Arenas(threading.local):
    """Those of a thread: autograd has one for each device."""

    def __init__(self) -> None:
        self.found: dict[tuple[torch.device, torch.cuda.Stream], Arena] = {}

    def on(self, device: torch.device) -> Arena:
        key = device, torch.cuda.current_stream(device)
        if (arena := self.found.get(key)) is None:
            arena = self.found[key] = Arena(device)
        return arena


ARENAS = _Arenas()
