"""Measuring what a training step holds in memory, exactly.

`LiveBytes` counts the storages that are alive, to the byte, on any device: a dispatch mode sees every tensor that an
operator makes, and a weak reference tells when its storage dies.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .streams import leaves_of


class LiveBytes(TorchDispatchMode):
    """Count the bytes of storages made inside the `with` block and still alive: `live` now, `peak` at most.

    What existed before (weights, inputs) is not counted, nor is what an operator allocates and frees by itself.

    >>> with LiveBytes() as memory:
    ...     x = torch.zeros(256)
    ...     y = x + 1
    ...     del x
    >>> memory.peak, memory.live
    (2048, 1024)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in leaves_of([args, kwargs or {}], Tensor):
            self._seen(tensor, 0)  # from before, unless it is known already
        out = func(*args, **(kwargs or {}))
        for tensor in leaves_of([out], Tensor):
            self._seen(tensor, tensor.untyped_storage().nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def _seen(self, tensor: Tensor, size: int) -> None:
        key = weakref.ref(tensor.untyped_storage(), self._freed)
        if key not in self._sizes:  # references to one living storage are equal
            self._sizes[key] = size
            self.live += size

    def _freed(self, key: weakref.ref[torch.UntypedStorage]) -> None:
        self.live -= self._sizes.pop(key, 0)
