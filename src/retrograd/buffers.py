"""Buffers that a forward moves (batch statistics, codebooks): what they were before it, for a replay to begin from.

A module that leaves its buffers alone is known after its first call, and no copies are made any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .bindings import MISSING
from .reach import of_torch
from .streams import version

# Modules whose buffers did not move in their last call, in training and not: theirs are not copied beforehand. A wrong
# guess costs memory once: the call is kept. Writes through `.data` nobody can see.
_still: dict[bool, weakref.WeakSet[nn.Module]] = {True: weakref.WeakSet(), False: weakref.WeakSet()}

# Modules whose buffers have moved, in training and not; of those, the ones whose buffers move without a new version:
# torch's batch norm does that to the statistics it is given. That is found by comparing values, once for each module.
_moving: dict[bool, weakref.WeakSet[nn.Module]] = {True: weakref.WeakSet(), False: weakref.WeakSet()}
_restless: dict[bool, weakref.WeakSet[nn.Module]] = {True: weakref.WeakSet(), False: weakref.WeakSet()}


class Before:
    """The buffers of one module before a forward, and the numbers and flags in its attributes: they are the other half
    of the same state.

    A module that `fn` is made of (`own`) is known to run. Of one that a closure shows nothing can be learned from a
    call that leaves it alone; until it has moved once, only what may be statistics (a vector) is copied.
    """

    __slots__ = ("module", "own", "training", "buffers", "marks")

    def __init__(self, module: nn.Module, own: bool) -> None:
        self.module, self.own, self.training = module, own, module.training
        if own:
            most = -1 if module in _still[self.training] else _ANY
        else:
            most = _ANY if module in _moving[self.training] else 1
        self.buffers = {
            name: (None, None, None)
            if buffer is None
            else (buffer, version(buffer), buffer.detach().clone() if buffer.dim() <= most else None)
            for name, buffer in module._buffers.items()
        }
        self.marks = _marks(module)

    def moved(self) -> set[str]:
        """After the forward: the buffers that it has moved. There can be no replay if one has no copy."""
        moved = {
            name
            for name, (buffer, then, _) in self.buffers.items()
            if self.module._buffers.get(name) is not buffer or (buffer is not None and version(buffer) != then)
        }
        restless = _restless[self.training]
        if not moved and self.module not in restless and self._differ():
            restless.add(self.module)
        if self.module in restless:
            moved |= {name for name, (_, _, copy) in self.buffers.items() if copy is not None}
        if moved:
            _moving[self.training].add(self.module)
            _still[self.training].discard(self.module)
        elif self.own:
            _still[self.training].add(self.module)
        return moved

    def _differ(self) -> bool:
        """Whether a buffer differs from its copy. Where values cannot be compared (fake, sparse), versions must do."""
        return any(
            not torch.equal(buffer, copy)
            for buffer, _, copy in self.buffers.values()
            if isinstance(buffer, Tensor) and isinstance(copy, Tensor) and _comparable(copy)
        )

    def copies(self) -> dict[str, Tensor | None]:
        """What the buffers were, as far as they were copied."""
        return {name: copy for name, (buffer, _, copy) in self.buffers.items() if buffer is None or copy is not None}

    def changed_marks(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """The numbers and flags that the forward has changed: where, which, and what it was."""
        now = _marks(self.module)
        for name in self.marks | now:
            if now.get(name, MISSING) is not (then := self.marks.get(name, MISSING)):
                yield self.module.__dict__, name, then


_ANY = 1 << 30  # dimensions


def _comparable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and type(tensor).__name__ != "FakeTensor"


def _marks(module: nn.Module) -> dict[str, Any]:
    if of_torch(type(module)):
        return {}
    return {
        name: value
        for name, value in module.__dict__.items()
        if name != "training" and (value is None or type(value) in (bool, int, float))
    }
