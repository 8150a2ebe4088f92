"""The tape: one call of one reversed piece of a program, from its forward to the end of its last backward.

Each entry runs its update inside saved-tensor hooks that store slot numbers; the exit node saves the final streams;
in a backward pass, a reversal replays the entries from the last to the first and serves the slots. With engine.py
this is all the autograd code there is; the rules cited here are listed there.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from .alarms import DriftWatch, RangeAlarms, settle_drifts
from .auto import Learned, Stopwatch, key_of
from .joins import Add, Affine, ExactAdd, Scale
from .policies import Reverse
from .replay import Call
from .streams import version
from .surroundings import Surroundings, transformed
from .update import Step

Flat = dict[str, list[Tensor]]
"""The tensors of each stream. The dict changes as a program runs; the lists in it never do."""

Slot = tuple[torch.Size, torch.dtype, torch.device]
"""What forward and replay must agree on for each saved tensor (R7)."""

_slot: Callable[[Tensor], Slot] = operator.attrgetter("shape", "dtype", "device")

_JOINS = (Add, Affine, ExactAdd, Scale)

_NOTHING = contextlib.nullcontext()


class Saved:
    """What autograd saves while `fn` runs: as hooks, it puts slot numbers into the graph and the tensors here."""

    __slots__ = ("tensors", "versions", "left")

    def __init__(self) -> None:
        self.tensors: list[Any] = []  # None once it is taken
        self.versions: list[int] = []
        self.left = 0  # not taken

    def pack(self, tensor: Tensor) -> int:
        slot = self.left
        self.left = slot + 1
        self.tensors.append(tensor)
        self.versions.append(tensor._version)
        return slot

    def moved(self) -> Saved:
        """The same in another object, and nothing here. The hooks hold this one, the graph holds the hooks, and the
        tensors hold the graph: together they would never die."""
        other = Saved()
        other.tensors, other.versions, other.left = self.tensors, self.versions, self.left
        self.tensors = []
        return other

    def __getitem__(self, slot: int) -> Tensor:
        """A tensor, if nobody has changed it in place since it was saved: what autograd demands."""
        tensor = self.tensors[slot]
        if tensor._version != self.versions[slot]:
            raise RuntimeError(
                "a tensor that fn saved for its backward was changed in place afterwards "
                f"(shape {tuple(tensor.shape)}, version {tensor._version}, expected {self.versions[slot]})"
            )
        return tensor

    def drop(self, slot: int) -> None:
        """Release a tensor."""
        self.tensors[slot] = None
        self.left -= 1


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
        "live",
        "kept",
    )

    def __init__(self, step: Step, policy: Reverse, surroundings: Surroundings) -> None:
        self.step = step
        self.call = Call(step.index, step.update, surroundings)
        self.saving = create_selective_checkpoint_contexts(list(policy.save)) if policy.save else None
        self.live: Saved | None = None  # while fn runs: it may differentiate inside
        self.kept: tuple[Saved, list[list[Tensor]]] | None = (
            None  # what was saved and returned, if it cannot be replayed
        )

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
        saved = self.live = Saved()
        key = None if learned is None else key_of(update.fn)
        watch = None
        if learned is not None and key in learned.saved and key not in learned.took:
            watch = Stopwatch(learned.device)  # its second call: a first one warms up
        try:
            with saved_tensors_hooks(saved.pack, unpack):
                parts, replayable = self.call.forward(lambda: self._called(sources, target, 0), states)
                self.fn_slots = saved.left
                flat[update.target] = step.join(target, parts, alarms)
            self.slots, self.versions = list(map(_slot, saved.tensors)), saved.versions
            self.bases = [weakref.ref(_base(tensor)) for tensor in saved.tensors]
            if watch is not None:
                watch.stop()
                learned.took[key] = watch  # type: ignore[union-attr]
            elif learned is not None and key not in learned.saved:
                learned.learn(key, saved.tensors, self.call.outside())
            if not replayable:
                saved.tensors = [tensor if tensor.is_leaf else tensor.detach() for tensor in saved.tensors]
                self.kept = saved, [[leaf.detach() for leaf in part] for part in parts]
        finally:
            self.live = None
            if self.kept is None:
                saved.tensors = []

    def replay(self, streams: Flat, *, undone: bool = False) -> tuple[Saved, list[Tensor]]:
        """Run `fn` again: what it saves, and the target as it was before the update (`undone`: it is that already)."""
        step, update = self.step, self.step.update
        target = streams[update.target]
        saved = Saved()
        if self.kept is not None:
            kept, parts = self.kept
            saved.tensors, saved.versions, saved.left = [*kept.tensors], kept.versions, len(kept.tensors)
            return saved, target if undone else step.unjoin(target, parts)
        sources = [fresh(streams[name], needs) for name, needs in zip(update.sources, self.source_grads, strict=True)]
        try:
            with torch.enable_grad(), saved_tensors_hooks(saved.pack, saved.__getitem__):
                parts = self.call.replay(lambda: self._called(sources, target, 1))
                with torch.no_grad():
                    before = target if undone else step.unjoin(target, parts)
                if len(self.slots) > self.fn_slots:  # a join that saves: apply it again to see what
                    step.join(fresh(before, self.target_grads), parts)
            self.verify(saved)
        finally:
            saved = saved.moved()
        return saved, before

    def _called(self, sources: list[list[Tensor]], target: list[Tensor], context: int) -> list[list[Tensor]]:
        """`fn`, with the outputs of the operators that the policy saves stored (context 0) or taken from there (1)."""
        with _NOTHING if self.saving is None else self.saving[context]:
            return self.step.call(sources, target)

    def verify(self, saved: Saved) -> None:
        """R7: the replay saved what the forward saved, and what is still the same tensor has not changed."""
        slots = list(map(_slot, saved.tensors))
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
        for tensor, base, now, then in zip(saved.tensors, self.bases, saved.versions, self.versions, strict=True):
            if now != then and base() is _base(tensor):
                raise RuntimeError(f"{self}: a tensor that fn reads was changed in place between forward and backward")

    def __str__(self) -> str:
        return self.step.update.label(self.step.index)


def _base(tensor: Tensor) -> Tensor:
    """The tensor that it is a view of, or itself: they have one version."""
    return tensor if (base := tensor._base) is None else base


def fresh(leaves: list[Tensor], needs: list[bool]) -> list[Tensor]:
    """The same values as new leaves of a graph."""
    return [leaf.detach().requires_grad_(needed) for leaf, needed in zip(leaves, needs, strict=True)]


class Tape:
    """One call of one reversed piece of a program. It lives as long as a slot of it may be asked for (R6)."""

    def __init__(
        self,
        steps: list[Step],
        policy: Reverse,
        surroundings: Surroundings,
        alarms: RangeAlarms | None = None,
        learned: Learned | None = None,
    ) -> None:
        self.policy, self.alarms, self.learned = policy, alarms, learned
        self.watch: DriftWatch | None = None
        self.entries = [Entry(step, policy, surroundings) for step in steps]
        self.names = sorted({name for step in steps for name in (step.update.target, *step.update.sources)})
        self.sizes: list[int] = []
        self.passes: dict[int, Reversal] = {}
        self.finals: list[tuple[Tensor, int | None]] | None = None
        if "torch._dynamo" in sys.modules:
            _hide_from_dynamo()

    def run(self, flat: Flat) -> None:
        """The forward: every update inside hooks, then the exit."""
        if self.policy.watch is not None:
            self.watch = DriftWatch(self.policy, [leaf for name in self.names for leaf in flat[name]])
        states: list[Any] = []  # of the generators, handed from update to update
        for position, entry in enumerate(self.entries):
            entry.run(flat, functools.partial(self.serve, position), states, self.alarms, self.learned)
            if type(entry.step.update.join) not in _JOINS:
                states.clear()  # a join of one's own may draw random numbers
        self.sizes = [len(flat[name]) for name in self.names]
        leaves = [leaf for name in self.names for leaf in flat[name]]
        if any(leaf.requires_grad for leaf in leaves):
            through = iter(Exit.apply(self, *leaves))  # type: ignore[arg-type]
            for name in self.names:
                flat[name] = [next(through) if leaf.requires_grad else leaf for leaf in flat[name]]

    def begin(self, finals: list[Tensor], *, again: bool) -> Reversal:
        """A backward pass has come to the exit. `again`: it builds a graph whose backward may not come by here."""
        current = _current_pass()
        rest = iter(finals)
        streams = {name: [next(rest) for _ in range(size)] for name, size in zip(self.names, self.sizes, strict=True)}
        reversal = self.passes[current] = Reversal(self.entries, streams, self.watch)
        if self.alarms is not None:
            self.alarms.check(wait=False)
        if again:
            self.finals = [(leaf, version(leaf)) for leaf in finals]
        tape = weakref.ref(self)  # not the tape itself: it must be able to die before the pass ends
        policy, alarms = self.policy, self.alarms

        def end() -> None:
            if (alive := tape()) is not None:
                alive.passes.pop(current, None)
            if policy.watch is not None:
                settle_drifts(policy)
            if alarms is not None:
                alarms.check(wait=True)

        _at_end_of_pass(end)
        return reversal

    def serve(self, position: int, slot: int) -> Tensor:
        """The saved tensor that autograd asks for."""
        reversal = self.passes.get(_current_pass())
        if reversal is None:
            if (live := self.entries[position].live) is not None:
                return live[slot]
            reversal = self.begin(self._finals(position), again=False)
        return reversal.serve(position, slot)

    def _finals(self, position: int) -> list[Tensor]:
        """The final streams, for a pass that has not come through the exit: there after `create_graph` only (R12)."""
        if self.finals is None or _current_pass() == -1:
            raise RuntimeError(
                f"{self.entries[position]}: a saved tensor was asked for by a backward pass that did not begin "
                "after the reversible program, so there is nothing to reconstruct it from; differentiate something "
                "computed from the program's outputs, or give this update policy=Keep()"
            )
        for leaf, seen in self.finals:
            if version(leaf) != seen:
                raise RuntimeError("an output of a reversible program was changed in place before its second backward")
        return [leaf for leaf, _ in self.finals]


class Reversal:
    """One backward pass over a tape: the streams as far as they are reconstructed, and what replays saved (R12)."""

    def __init__(self, entries: list[Entry], streams: Flat, watch: DriftWatch | None) -> None:
        self.entries, self.streams, self.watch = entries, streams, watch
        self.position = len(entries)  # every update from here on is undone in `streams`
        self.captured: dict[int, Saved] = {}
        self.lock = threading.RLock()  # autograd runs one thread per device

    def serve(self, position: int, slot: int) -> Tensor:
        """A saved tensor of one update, reversing up to there if need be; it is released as it is taken."""
        with self.lock:
            while self.position > position:
                self._forget(self.entries[position].slots[slot][2])
                self._step_back(passing=self.position - 1 > position)
            saved = self.captured.get(position)
            if saved is None or saved.tensors[slot] is None:
                saved = self._again(position)
            try:
                tensor = saved[slot]
            except RuntimeError as error:
                raise RuntimeError(f"{self.entries[position]}: {error}") from None
            saved.drop(slot)
            if not saved.left:
                del self.captured[position]
            return tensor

    def _step_back(self, *, passing: bool) -> None:
        """Reverse one update. `passing`: only to get to an earlier one, since nobody asked for what this one saved."""
        entry = self.entries[self.position - 1]
        sharded = entry.call.sharded() if passing else []
        with _outside_transforms() if _inside_transforms() else _NOTHING:
            captured, before = entry.replay(self.streams)
        for module in sharded:
            module.reshard()  # FSDP2 expects no forward after a module's backward, and would leave it whole
        self.streams[entry.step.update.target] = before
        self.position -= 1
        self.captured[self.position] = captured
        if self.position == 0 and self.watch is not None:
            self.watch.compare([leaf for leaves in self.streams.values() for leaf in leaves], _current_pass())

    def _forget(self, device: torch.device) -> None:
        """Drop what later updates saved on this device and nobody took.

        Autograd runs the nodes of one device from the last to the first, so none of it will be asked for any more.
        """
        for position, saved in list(self.captured.items()):
            for slot, tensor in enumerate(saved.tensors):
                if tensor is not None and tensor.device == device:
                    saved.drop(slot)
            if not saved.left:
                del self.captured[position]

    def _again(self, position: int) -> Saved:
        """A second time in one pass (a custom function that reads `ctx.saved_tensors` twice): replay once more."""
        entry = self.entries[position]
        if position != self.position:
            raise RuntimeError(
                f"{entry}: a saved tensor was asked for twice in one backward pass, the second time after the pass "
                "had gone on"
            )
        self.captured[position], _ = entry.replay(self.streams, undone=True)
        return self.captured[position]


class Exit(torch.autograd.Function):
    """The identity after the last update. It saves the final streams, so autograd guards them like any saved tensor."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.tape = weakref.ref(tape)  # slots keep the tape alive; the outputs of the program must not
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*leaves)
        return tuple(leaf.detach() for leaf, needed in zip(leaves, ctx.needs_input_grad[1:], strict=True) if needed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if (tape := ctx.tape()) is not None:
            tape.begin([leaf.detach() for leaf in ctx.saved_tensors], again=torch.is_grad_enabled())
        rest = iter(grads)
        return (None, *(next(rest) if needed else None for needed in ctx.needs_input_grad[1:]))


# What torch has no public name for. tests/test_tape.py fails when one of these changes.


_current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that this thread works for; -1 outside one."""


@functools.cache
def _hide_from_dynamo() -> None:
    """A compiled fn calls the hooks where Dynamo watches, which would compile them too, anew for each slot."""
    from torch._dynamo.eval_frame import skip_code

    for hook in (Saved.pack, Saved.__getitem__, Tape.serve):
        skip_code(hook.__code__)


def _at_end_of_pass(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _inside_transforms() -> bool:
    """Whether `_outside_transforms` has something to leave."""
    levels = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return levels > 0 or transformed()


@contextlib.contextmanager
def _outside_transforms() -> Iterator[None]:
    """Out of any vmap: a backward may run inside one (is_grads_batched), its replays must not."""
    levels = torch._C._vmapmode_increment_nesting() - 1  # the older vmap, which torch.autograd still uses
    for _ in range(levels + 1):
        torch._C._vmapmode_decrement_nesting()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(levels):
            torch._C._vmapmode_increment_nesting()
