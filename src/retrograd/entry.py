"""One update on a tape: its forward inside hooks that store slot numbers, its replay, and what the two must agree on.

An entry notes what `fn` saves in the forward without holding it; the replay saves it again, and is refused if that is
not the same (R7). The rules cited here are listed in engine.py; which entry is replayed when is decided in tape.py.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from .alarms import RangeAlarms
from .auto import Learned, Stopwatch
from .joins import JOINS
from .policies import Reverse
from .replay import Call
from .streams import laid_out, versions
from .surroundings import Surroundings
from .update import Step

T = TypeVar("T")

Flat = dict[str, list[Tensor]]
"""The tensors of each stream. The dict changes as a program runs; the lists in it never do."""

Slot = tuple[torch.Size, torch.dtype, torch.device]
"""What forward and replay must agree on for each saved tensor (R7)."""

_slot: Callable[[Tensor], Slot] = operator.attrgetter("shape", "dtype", "device")


class Saved:
    """What autograd saves while `fn` runs: as hooks, it puts slot numbers into the graph and the tensors here."""

    __slots__ = ("tensors", "versions")

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}  # less those that are taken
        self.versions: list[int] = []

    def pack(self, tensor: Tensor) -> int:
        versions = self.versions
        slot = len(versions)
        self.tensors[slot] = tensor
        versions.append(tensor._version)
        return slot

    def moved(self) -> Saved:
        """The same in another object, and nothing here. The hooks hold this one, the graph holds the hooks, and the
        tensors hold the graph: together they would never die."""
        other = Saved()
        other.tensors, other.versions = self.tensors, self.versions
        self.tensors = {}
        return other

    def __getitem__(self, slot: int) -> Tensor:
        """A tensor, if nobody has changed it in place since it was saved: what autograd demands."""
        tensor = self.tensors[slot]
        if tensor._version != self.versions[slot]:
            raise RuntimeError(self.changed(tensor, slot))
        return tensor

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


class Entry:
    """A step on a tape: what its replay needs, and what its replay must save."""

    __slots__ = (
        "step",
        "call",
        "source_grads",
        "target_grads",
        "slots",
        "fn_slots",
        "versions",
        "bases",
        "saving",
        "storing",
        "outputs",
        "live",
        "kept",
    )

    def __init__(self, step: Step, policy: Reverse, surroundings: Surroundings) -> None:
        self.step = step
        self.call = Call(step.index, step.update, surroundings)
        operators = policy.save if isinstance(policy.save, tuple) else ()
        self.saving = create_selective_checkpoint_contexts(list(operators)) if operators else None
        self.storing = policy.save == "output"
        self.outputs: Callable[[], Outputs | None] = lambda: None  # as long as the graph holds them
        self.live: Saved | None = None  # while fn runs: it may differentiate inside
        # What was saved and returned, if the update cannot be replayed.
        self.kept: tuple[Saved, list[list[Tensor]]] | None = None

    def run(
        self,
        flat: Flat,
        unpack: Callable[[int], Tensor],
        states: list[Any],
        alarms: RangeAlarms | None,
        learned: Learned | None,
    ) -> None:
        """The update, inside hooks that store slot numbers in place of tensors."""
        step, update = self.step, self.step.update
        sources, target = [flat[name] for name in update.sources], flat[update.target]
        self.source_grads = [[leaf.requires_grad for leaf in leaves] for leaves in sources]
        self.target_grads = [leaf.requires_grad for leaf in target]
        saved = self.live = Storing() if self.storing else Saved()
        key = None if learned is None else learned.keys[step.index]
        watch = None
        if learned is not None and key in learned.saved and key not in learned.took:
            watch = Stopwatch(learned.device)  # its second call: a first one warms up
        try:
            with saved_tensors_hooks(saved.pack, unpack):
                parts, replayable = self.call.forward(self._function(sources, target, 0), states)
                self.fn_slots = len(saved.tensors)
                flat[update.target] = self._laid_out(step.join(target, parts, alarms), target)
            tensors = [*saved.tensors.values()]
            self.slots, self.versions = list(map(_slot, tensors)), saved.versions
            self.bases = [weakref.ref(tensor if (base := tensor._base) is None else base) for tensor in tensors]
            if watch is not None:
                watch.stop()
                learned.took[key] = watch  # type: ignore[union-attr]
            elif learned is not None and learned.learning:
                learned.learn(key, tensors, self.call.outside())
            if not replayable:
                saved.tensors = {slot: t if t.is_leaf else t.detach() for slot, t in saved.tensors.items()}
                self.kept = saved, [[leaf.detach() for leaf in part] for part in parts]
            elif isinstance(saved, Storing) and self.fn_slots and not self.call.must_finish():
                saved.first.outputs = Outputs(parts)
                self.outputs = weakref.ref(saved.first.outputs)
                del saved.first
        finally:
            self.live = None
            if self.kept is None:
                saved.tensors = {}

    def replay(self, streams: Flat, stood: dict[int, bool], *, undone: bool = False) -> tuple[Saved, list[Tensor]]:
        """Run `fn` again: what it saves, and the target as it was before the update (`undone`: it is that already)."""
        step, update = self.step, self.step.update
        target = streams[update.target]
        if self.kept is not None:
            (kept, parts), saved = self.kept, Saved()
            saved.tensors, saved.versions = {**kept.tensors}, kept.versions
            return saved, target if undone else self._unjoined(target, parts)
        outputs = self.outputs()
        # A weight that fn may read has changed: whether it does shows at its end.
        whole = outputs is None or not outputs.unchanged() or self.call.shown_changed()
        saved = Saved() if whole else UntilEnough(self.fn_slots)
        sources = [fresh(streams[name], needs) for name, needs in zip(update.sources, self.source_grads, strict=True)]

        def again() -> list[Tensor]:
            try:
                parts = self.call.replay(self._function(sources, target, 1), stood)
            except Enough as enough:
                if enough.args[0] is not saved:
                    raise
                parts = outputs.parts  # type: ignore[union-attr]
            with torch.no_grad():
                before = target if undone else self._unjoined(target, parts)
            if len(self.slots) > self.fn_slots:  # a join that saves: apply it again to see what
                step.join(fresh(before, self.target_grads), parts)
            return before

        try:
            with torch.enable_grad(), saved_tensors_hooks(saved.pack, saved.__getitem__):
                before = self.call.surroundings.run(again)
            self.verify(saved)
        finally:
            saved = saved.moved()
        return saved, before

    def _unjoined(self, target: list[Tensor], parts: list[list[Tensor]]) -> list[Tensor]:
        return self._laid_out(self.step.unjoin(target, parts), target)

    def _laid_out(self, joined: list[Tensor], target: list[Tensor]) -> list[Tensor]:
        """A stream keeps its layout: an operator may save other shapes of a tensor that lies otherwise in memory."""
        if type(self.step.update.join) in JOINS:
            return joined
        return [laid_out(leaf, model) for leaf, model in zip(joined, target, strict=True)]

    def _function(self, sources: list[list[Tensor]], target: list[Tensor], context: int) -> Callable[[], Any]:
        """`fn`, with the outputs of the operators that the policy saves stored (context 0) or taken from there (1)."""
        call = functools.partial(self.step.call, sources, target)
        return call if self.saving is None else functools.partial(_inside, self.saving[context], call)

    def verify(self, saved: Saved) -> None:
        """R7: the replay saved what the forward saved, and what is still the same tensor has not changed."""
        slots = list(map(_slot, saved.tensors.values()))
        if slots == self.slots:
            if saved.versions != self.versions:
                self._verify_versions(saved)
            return
        differing = [
            f"saved tensor {i} was {tuple(a[0])} {a[1]} on {a[2]}, now {tuple(b[0])} {b[1]} on {b[2]}"
            for i, (a, b) in enumerate(zip(self.slots, slots, strict=False))
            if a != b
        ]
        raise RuntimeError(
            f"{self} is not deterministic: its replay saved {len(slots)} tensors, its forward {len(self.slots)}"
            + (f" ({differing[0]})" if differing else "")
            + ". fn must do the same in both passes: take choices that depend on the data through remember(), avoid "
            "state outside parameters and buffers, or give this update policy=Keep()"
        )

    def _verify_versions(self, saved: Saved) -> None:
        """A stream is another tensor in the replay, and may have another version."""
        for tensor, base, now, then in zip(
            saved.tensors.values(), self.bases, saved.versions, self.versions, strict=True
        ):
            if now != then and base() is _base(tensor):
                raise RuntimeError(f"{self}: a tensor that fn reads was changed in place between forward and backward")

    def __str__(self) -> str:
        return self.step.update.label(self.step.index)


def _inside(context: AbstractContextManager[Any], function: Callable[[], T]) -> T:
    with context:
        return function()


def _base(tensor: Tensor) -> Tensor:
    """The tensor that it is a view of, or itself: they have one version."""
    return tensor if (base := tensor._base) is None else base


def fresh(leaves: list[Tensor], needs: list[bool]) -> list[Tensor]:
    """The same values as new leaves of a graph."""
    return [leaf.detach().requires_grad_(needed) for leaf, needed in zip(leaves, needs, strict=True)]
