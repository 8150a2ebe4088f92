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
# guess costs memory once (see `copied`), and a wrong gradient only where a buffer is written through `.data`, which
# nobody can see.
_still: dict[bool, weakref.WeakSet[nn.Module]] = {True: weakref.WeakSet(), False: weakref.WeakSet()}

# Modules whose buffers move without a new version, in training and not: torch's batch norm does that to the statistics
# it is given. Found by comparing values, once for each module.
_restless: dict[bool, weakref.WeakSet[nn.Module]] = {True: weakref.WeakSet(), False: weakref.WeakSet()}


class Before:
    """The buffers of one module before a forward, and the numbers and flags in its attributes: they are the other half
    of the same state."""

    __slots__ = ("module", "training", "copied", "buffers", "marks")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.training = module, module.training
        self.copied = module not in _still[self.training]
        self.buffers = {
            name: (None, None, None)
            if buffer is None
            else (buffer, version(buffer), buffer.detach().clone() if self.copied else None)
            for name, buffer in module._buffers.items()
        }
        self.marks = {} if of_torch(type(module)) else _marks(module)

    def moved(self) -> bool:
        """After the forward: whether it has moved the buffers. If so and not `copied`, there can be no replay."""
        still, restless = _still[self.training], _restless[self.training]
        changed = any(
            self.module._buffers.get(name) is not buffer or (buffer is not None and version(buffer) != then)
            for name, (buffer, then, _) in self.buffers.items()
        )
        if not changed and self.copied and self.module not in restless and self._differ():
            restless.add(self.module)
        moved = changed or self.module in restless
        (still.discard if moved else still.add)(self.module)
        return moved

    def _differ(self) -> bool:
        """Whether a buffer differs from its copy. Where values cannot be compared (fake, sparse), versions must do."""
        return any(
            not torch.equal(buffer, copy)
            for buffer, _, copy in self.buffers.values()
            if isinstance(buffer, Tensor) and isinstance(copy, Tensor) and _comparable(copy)
        )

    def copies(self) -> dict[str, Tensor | None]:
        """What the buffers were."""
        return {name: copy for name, (_, _, copy) in self.buffers.items()}

    def changed_marks(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """The numbers and flags that the forward has changed: where, which, and what it was."""
        now = _marks(self.module) if not of_torch(type(self.module)) else {}
        for name in self.marks | now:
            if now.get(name, MISSING) is not (then := self.marks.get(name, MISSING)):
                yield self.module.__dict__, name, then


def _comparable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and type(tensor).__name__ != "FakeTensor"


def _marks(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in module.__dict__.items()
        if name != "training" and (value is None or type(value) in (bool, int, float))
    }
