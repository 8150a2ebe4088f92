"""The hooks under which `fn` runs: they put slot numbers into autograd's graph in place of the tensors that it saves.

Which of them an update runs under, and what becomes of the tensors, is decided in entry.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .streams import versions


class Saved:
    """What autograd saves while `fn` runs: as hooks, it puts slot numbers into the graph and the tensors here."""

    __slots__ = ("tensors", "versions")

    def __init__(self) -> None:
        self.tensors: list[Tensor | None] = []  # None: taken
        self.versions: list[int] = []  # when each was saved

    def pack(self, tensor: Tensor) -> int:
        versions = self.versions
        slot = len(versions)
        versions.append(tensor._version)
        self.tensors.append(tensor)
        return slot

    def unpack(self, slot: int) -> Tensor:
        """A tensor, if nobody has changed it in place since it was saved: what autograd demands."""
        tensor = self.tensors[slot]
        assert tensor is not None
        if tensor._version != self.versions[slot]:
            raise RuntimeError(self.changed(tensor, slot))
        return tensor

    def forget(self, device: torch.device) -> bool:
        """Drop what lies on a device; whether anything is left."""
        left = False
        for slot, tensor in enumerate(self.tensors):
            if tensor is not None:
                if tensor.device == device:
                    self.tensors[slot] = None
                else:
                    left = True
        return left

    def changed(self, tensor: Tensor, slot: int) -> str:
        return (
            "a tensor that fn saved for its backward was changed in place afterwards "
            f"(shape {tuple(tensor.shape)}, version {tensor._version}, expected {self.versions[slot]}); "
            "change it after the backward"
        )


class Outputs:
    """What `fn` returned, stored: a replay then ends as soon as it has saved all (`Reverse(save="output")`)."""

    __slots__ = ("parts", "versions", "__weakref__")

    def __init__(self, parts: list[list[Tensor]]) -> None:
        self.parts = [[leaf.detach().requires_grad_(leaf.requires_grad) for leaf in part] for part in parts]
        self.versions = [versions(part) for part in self.parts]

    def unchanged(self) -> bool:
        return [versions(part) for part in self.parts] == self.versions


class First(int):
    """Slot 0 of an update whose outputs are stored: the graph holds it, and lets go of it as the backward goes on."""

    outputs: Outputs


class Storing(Saved):
    """The hooks of such an update in its forward."""

    __slots__ = ("first",)

    def pack(self, tensor: Tensor) -> int:
        slot = super().pack(tensor)
        if slot:
            return slot
        self.first = First()
        return self.first


class Enough(BaseException):
    """A replay has saved all that the forward saved. No Exception: `fn` may catch those."""


class UntilEnough(Saved):
    """The hooks of a replay that ends there."""

    __slots__ = ("wanted",)

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.wanted = wanted

    def pack(self, tensor: Tensor) -> int:
        slot = super().pack(tensor)
        if slot + 1 == self.wanted:
            raise Enough(self)
        return slot
