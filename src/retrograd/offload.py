"""Saved tensors on the host: `Offload()`.

In the forward each saved tensor is copied to pinned memory on a stream of its own, beside the computation. In the
backward, when the first tensor of an update is asked for, those of the update before it are already being fetched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .streams import version

T = TypeVar("T")


class Shelf:
    """What the updates of one segment have put on the host."""

    def __init__(self, smallest: int) -> None:
        self.smallest = smallest
        self.boxes: list[list[Box]] = []  # for each update
        self.fetched = -1  # the last update whose boxes are on their way back

    def run(self, label: str, function: Callable[[], T]) -> T:
        """Run one update inside hooks that put what is saved on the shelf."""
        position = len(self.boxes)
        boxes: list[Box] = []
        self.boxes.append(boxes)
        seen: list[tuple[Tensor, int | None]] = []

        def pack(tensor: Tensor) -> tuple[Tensor, int | None] | Box:
            if not tensor.is_cuda or tensor.nbytes < self.smallest or _is_weight(tensor):
                stays = tensor if tensor.is_leaf else tensor.detach()  # a node must not hold its own output
                return stays, version(stays)
            seen.append((tensor, version(tensor)))  # alive until fn returns: it must not change under the copy
            boxes.append(Box(tensor))
            return boxes[-1]

        try:
            with saved_tensors_hooks(pack, functools.partial(self.unpack, label, position)):
                out = function()
            if any(version(tensor) != then for tensor, then in seen):
                raise RuntimeError(f"{label}: a tensor that fn saved for its backward was changed in place afterwards")
            return out
        finally:
            seen.clear()

    def unpack(self, label: str, position: int, packed: tuple[Tensor, int | None] | Box) -> Tensor:
        """A saved tensor, back on its device; the update before this one is fetched meanwhile."""
        if isinstance(packed, tuple):
            tensor, then = packed
            if version(tensor) != then:  # autograd does not look where there are hooks
                raise RuntimeError(
                    f"{label}: a tensor of shape {tuple(tensor.shape)} that fn saved for its backward was changed in "
                    "place afterwards; change it after the backward"
                )
            return tensor
        if position != self.fetched:
            self.fetched = position
            for box in self.boxes[position - 1] if position else ():
                box.fetch()
        return packed.open()


class Box:
    """One tensor on the host, and on its way there and back."""

    __slots__ = ("host", "device", "there", "back", "ready")

    def __init__(self, tensor: Tensor) -> None:
        stream = _copies(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self.host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            source = tensor.detach()
            if source.stride() != self.host.stride():  # a view with gaps: only what is dense is copied at full speed
                source = torch.empty_like(source).copy_(source)
            self.host.copy_(source, non_blocking=True)
            self.there = torch.cuda.Event()
            self.there.record()
        tensor.record_stream(stream)  # its memory is not reused before the copy is done
        self.device = tensor.device
        self.back: Tensor | None = None
        self.ready: Any = None

    def fetch(self) -> None:
        """Start the way back."""
        if self.back is None:
            stream = _copies(self.device)
            with torch.cuda.stream(stream):
                stream.wait_event(self.there)
                self.back = self.host.to(self.device, non_blocking=True)
                self.ready = torch.cuda.Event()
                self.ready.record()

    def open(self) -> Tensor:
        """The tensor on its device. A second backward fetches it again."""
        self.fetch()
        assert self.back is not None
        tensor, self.back = self.back, None
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self.ready)
        tensor.record_stream(current)
        return tensor


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """The stream on which this device copies to and from the host."""
    return torch.cuda.Stream(device)
