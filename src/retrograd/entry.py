"""One update on a tape: its forward inside hooks that store slot numbers, its replay, and what the two must agree on.

An entry notes what `fn` saves in the forward without holding it; the replay saves it again, and is refused if that is
not the same (R7). The rules cited here are listed in engine.py; which entry is replayed when is decided in tape.py.
Both passes come by here for every update, so the common case (one tensor, nothing unusual) takes the short way.
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
from .saved import Enough, Outputs, Saved, Storing, UntilEnough
from .streams import counter, laid_out
from .surroundings import Surroundings
from .update import Step

T = TypeVar("T")

Flat = dict[str, list[Tensor]]
"""The tensors of each stream. The dict changes as a program runs; the lists in it never do."""

Slot = tuple[torch.Size, torch.dtype, torch.device]
"""What forward and replay must agree on for each saved tensor (R7)."""

slot_of: Callable[[Tensor], Slot] = operator.attrgetter("shape", "dtype", "device")


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
        "ends",
        "memory",
        "saving",
        "storing",
        "native",
        "outputs",
        "live",
        "differentiates",
        "kept",
    )

    def __init__(self, step: Step, policy: Reverse, surroundings: Surroundings) -> None:
        self.step = step
        self.call = Call(step.index, step.update, surroundings)
        save = policy.save
        self.saving = create_selective_checkpoint_contexts(list(save)) if type(save) is tuple and save else None
        self.storing = save == "output"
        self.native = type(step.update.join) in JOINS
        self.outputs: Callable[[], Outputs | None] | None = None  # as long as the graph holds them
        self.live: Saved | None = None  # while fn runs: it may differentiate inside,
        self.differentiates = False  # and did
        # What was saved and returned, if the update cannot be replayed.
        self.kept: tuple[Saved, list[list[Tensor]]] | None = None

    def run(
        self,
        flat: Flat,
        unpack: Callable[[int], Tensor],
        states: list[Any],
        alarms: RangeAlarms | None,
        learned: Learned | None,
        alike: dict[int, list[Slot]],
    ) -> None:
        """The update, inside hooks that store slot numbers in place of tensors. `alike`: slots of others, by count."""
        step, update = self.step, self.step.update
        sources, target = [flat[name] for name in update.sources], flat[update.target]
        self.source_grads = [[leaf.requires_grad for leaf in leaves] for leaves in sources]
        self.target_grads = [leaf.requires_grad for leaf in target]
        saved = self.live = Storing() if self.storing else Saved()
        watch = None if learned is None else self._watch(learned)
        try:
            with saved_tensors_hooks(saved.pack, unpack):
                function: Callable[[], Any] = functools.partial(step.call, sources, target)
                if self.saving is not None:
                    function = _inside(self.saving[0], function)
                parts, replayable = self.call.forward(function, states)
                self.fn_slots = len(saved.tensors)
                joined = step.join(target, parts, alarms)
                flat[update.target] = joined if self.native else self._laid_out(joined, target)
            tensors: list[Tensor] = saved.tensors  # type: ignore[assignment]
            self._note(tensors, saved.versions, alike)
            if learned is not None:
                self._learn(learned, watch, tensors)
            if not replayable:
                saved.tensors = [tensor if tensor.is_leaf else tensor.detach() for tensor in tensors]
                self.kept = saved, [[leaf.detach() for leaf in part] for part in parts]
            elif isinstance(saved, Storing) and self.fn_slots and not self.call.must_finish():
                saved.first.outputs = Outputs(parts)
                self.outputs = weakref.ref(saved.first.outputs)
                del saved.first
        finally:
            self.live = None
            if self.kept is None:
                saved.tensors = []

    def _note(self, tensors: list[Tensor], versions: list[int], alike: dict[int, list[Slot]]) -> None:
        """What the replay must save too, and what must not change until then."""
        slots = list(map(slot_of, tensors))
        same = alike.setdefault(len(slots), slots)
        self.slots = same if same == slots else slots  # equal ones are one object: there are many
        ends = list(map(counter, tensors))
        self.versions, self.ends = versions, versions if ends == versions else ends  # as they are saved; at the end
        self.memory = {i: _memory(tensors[i]) for i, v in enumerate(ends) if v} if any(ends) else {}

    def _watch(self, learned: Learned) -> Stopwatch | None:
        """Times the second call of an update: a first one warms up."""
        key = learned.keys[self.step.index]
        return Stopwatch(learned.device) if key in learned.saved and key not in learned.took else None

    def _learn(self, learned: Learned, watch: Stopwatch | None, tensors: list[Tensor]) -> None:
        key = learned.keys[self.step.index]
        if watch is not None:
            watch.stop()
            learned.took[key] = watch
        elif learned.learning:
            learned.learn(key, tensors, self.call.outside())

    def replay(self, streams: Flat, stood: dict[int, bool], *, undone: bool = False) -> tuple[Saved, list[Tensor]]:
        """Run `fn` again: what it saves, and the target as it was before the update (`undone`: it is that already)."""
        step, update = self.step, self.step.update
        target = streams[update.target]
        if self.kept is not None:
            (kept, parts), saved = self.kept, Saved()
            saved.tensors, saved.versions = kept.tensors.copy(), kept.versions
            return saved, target if undone else self._unjoined(target, parts)
        outputs = None if self.outputs is None else self.outputs()
        # A weight that fn may read has changed: whether it does shows at its end.
        whole = outputs is None or not outputs.unchanged() or self.call.shown_changed()
        saved = Saved() if whole else UntilEnough(self.fn_slots)
        # Where nothing is taken before the end, a slot is its place in the list: nothing need be counted.
        counted = self.differentiates or not whole
        pack, unpack = (saved.pack, saved.unpack) if counted else (saved.tensors.append, self._refuse_inside)
        sources = [fresh(streams[name], needs) for name, needs in zip(update.sources, self.source_grads, strict=True)]

        def again() -> list[Tensor]:
            with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
                try:
                    function: Callable[[], Any] = functools.partial(step.call, sources, target)
                    if self.saving is not None:
                        function = _inside(self.saving[1], function)
                    parts = self.call.replay(function, stood)
                except Enough as enough:
                    if enough.args[0] is not saved:
                        raise
                    parts = outputs.parts  # type: ignore[union-attr]
            if undone:
                before = target
            elif torch.is_grad_enabled():  # a backward that builds a graph
                with torch.no_grad():
                    before = self._unjoined(target, parts)
            else:
                before = self._unjoined(target, parts)
            if len(self.slots) > self.fn_slots:
                self._join_again(before, parts, pack, unpack)
            return before

        # The hooks hold this list, the graph holds the hooks, and the tensors hold the graph: together they would
        # never die. So what was saved is handed on in another one.
        packed = saved.tensors
        try:
            before = self.call.surroundings.run(again)
            saved.tensors = packed.copy()
            self._verify(saved, streams, counted)
        finally:
            packed.clear()
        return saved, before

    def replay_bare(self, sources: list[list[Tensor]], target: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The same while it is captured in a graph (launch.py), where nothing can be put back or compared: the caller
        has seen that nothing has changed since the forward."""
        packed: list[Tensor] = []
        sources = [fresh(leaves, needs) for leaves, needs in zip(sources, self.source_grads, strict=True)]
        with torch.enable_grad(), saved_tensors_hooks(packed.append, self._refuse_inside):
            parts = self.step.call(sources, target)
        before = self._unjoined(target, parts)
        if len(self.slots) > self.fn_slots:
            self._join_again(before, parts, packed.append, self._refuse_inside)
        tensors = packed.copy()
        packed.clear()  # as above
        return tensors, before

    def _join_again(
        self,
        before: list[Tensor],
        parts: list[list[Tensor]],
        pack: Callable[[Tensor], Any],
        unpack: Callable[..., Tensor],
    ) -> None:
        """A join that saves: apply it to see what."""
        with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
            self.step.join(fresh(before, self.target_grads), parts)

    def _refuse_inside(self, _: None) -> Tensor:
        raise RuntimeError(f"{self} is not deterministic: it differentiates inside its replay, not in its forward")

    def _unjoined(self, target: list[Tensor], parts: list[list[Tensor]]) -> list[Tensor]:
        before = self.step.unjoin(target, parts)
        return before if self.native else self._laid_out(before, target)

    def _laid_out(self, joined: list[Tensor], target: list[Tensor]) -> list[Tensor]:
        """A stream keeps its layout: an operator may save other shapes of a tensor that lies otherwise in memory."""
        return [laid_out(leaf, model) for leaf, model in zip(joined, target, strict=True)]

    def _verify(self, saved: Saved, streams: Flat, counted: bool) -> None:
        """R7: the replay saved what the forward saved, and what both found there has not changed since."""
        tensors: list[Tensor] = saved.tensors  # type: ignore[assignment]
        slots = list(map(slot_of, tensors))
        if slots != self.slots:
            self._refuse(slots)
        if counted:
            then, now = self.versions, saved.versions
        else:
            then, now = self.ends, list(map(counter, tensors))
            saved.versions = now
            if self.ends is not self.versions:  # fn changes some after they are saved: those may not be asked for
                saved.versions = [n - e + v for n, e, v in zip(now, self.ends, self.versions, strict=True)]
        if now != then:
            for slot, tensor in enumerate(tensors):
                if now[slot] != then[slot] and self._is_same(slot, tensor, streams):
                    raise RuntimeError(
                        f"{self}: a tensor that fn reads was changed in place between forward and backward"
                    )

    def _is_same(self, slot: int, tensor: Tensor, streams: Flat) -> bool:
        """Whether a tensor with another version than in the forward is the one that was saved then. A stream is not:
        it was reconstructed; nor is a buffer that was put back."""
        if slot in self.memory:
            return self.memory[slot]() is _memory(tensor)()
        return not any(_memory(tensor)() is _memory(leaf)() for leaves in streams.values() for leaf in leaves)

    def _refuse(self, slots: list[Slot]) -> None:
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

    def __str__(self) -> str:
        return self.step.update.label(self.step.index)


def _memory(tensor: Tensor) -> weakref.ref[Any]:
    """What is the same for all tensors that lie in one memory, as long as one of them lives."""
    return weakref.ref(tensor.untyped_storage() if tensor.layout is torch.strided else tensor)


def _inside(context: AbstractContextManager[Any], function: Callable[[], T]) -> Callable[[], T]:
    """`function`, with the outputs of the operators that a policy saves stored there, or taken from there."""

    def inside() -> T:
        with context:
            return function()

    return inside


def fresh(leaves: list[Tensor], needs: list[bool]) -> list[Tensor]:
    """The same values as new leaves of a graph."""
    return [leaf.detach().requires_grad_(needed) for leaf, needed in zip(leaves, needs, strict=True)]
