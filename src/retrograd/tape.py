"""The tape: one call of one reversed piece of a program, from its forward to the end of its last backward.

Each entry (entry.py) runs its update inside saved-tensor hooks that store slot numbers; the exit node saves the final
streams; in a backward pass, a reversal replays the entries from the last to the first and serves the slots. With
engine.py and entry.py this is all the autograd code there is; the rules cited here are listed in engine.py.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from .alarms import DriftWatch, RangeAlarms, settle_drifts
from .arena import Launched, Lent
from .auto import Learned
from .entry import Entry, Flat, Slot
from .joins import JOINS
from .launch import may_launch, replayed
from .plain import ReadBy
from .policies import Reverse
from .saved import Saved, Storing, UntilEnough
from .streams import dense, version
from .surroundings import Surroundings, numerics, transformed
from .update import Step

_NOTHING = contextlib.nullcontext()


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
        self.lent: Callable[[], Lent | None] = lambda: None
        if "torch._dynamo" in sys.modules:
            _hide_from_dynamo()

    def run(self, flat: Flat, targets: Container[str]) -> None:
        """The forward: every update inside hooks, then the exit. `targets` are those of the whole program."""
        if self.policy.watch is not None:
            self.watch = DriftWatch(self.policy, [leaf for name in self.names for leaf in flat[name]])
        for name in self.names:
            if name in targets:  # a reconstruction is dense, and operators may save other shapes of what is not
                flat[name] = list(map(dense, flat[name]))
        states: list[Any] = []  # of the generators, handed from update to update
        alike: dict[int, list[Slot]] = {}
        graphed = self.policy.graphed
        for position, entry in enumerate(self.entries):
            unpack = Lent(self, position).__getitem__ if graphed else functools.partial(self.serve, position)
            entry.run(flat, unpack, states, self.alarms, self.learned, alike)
            if type(entry.step.update.join) not in JOINS:
                states.clear()  # a join of one's own may draw random numbers
        self.sizes = [len(flat[name]) for name in self.names]
        leave(self, self.names, targets, flat)

    def begin(self, finals: list[Tensor], *, again: bool) -> Reversal:
        """A backward pass has come to the exit. `again`: it builds a graph whose backward may not come by here."""
        current = _current_pass()
        while len(self.passes) >= 8:  # those that failed elsewhere; passes inside of passes are few
            self.passes.pop(next(iter(self.passes)))
        rest = iter(finals)
        streams = {name: [next(rest) for _ in range(size)] for name, size in zip(self.names, self.sizes, strict=True)}
        graphed = self.policy.graphed and may_launch()
        reversal = self.passes[current] = Reversal(self.entries, streams, self.watch, graphed=graphed)
        if (lent := self.lent()) is not None:
            lent.clear()  # of an earlier pass
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
        """The saved tensor that autograd asks for. It is released as it is taken."""
        reversal = self.passes.get(_current_pass())
        saved = None if reversal is None else reversal.captured.get(position)
        tensor = None if saved is None else saved.tensors[slot]
        if saved is None or tensor is None:
            entry = self.entries[position]
            if reversal is None and entry.live is not None:
                entry.differentiates = True
                return entry.live.unpack(slot)
            saved = self._captured(reversal, position, slot)
            tensor = saved.tensors[slot]
            assert tensor is not None
        saved.tensors[slot] = None
        if tensor._version != saved.versions[slot]:
            self.passes.pop(_current_pass(), None)
            raise RuntimeError(f"{self.entries[position]}: {saved.changed(tensor, slot)}")
        return tensor

    def lend(self, lent: Lent) -> None:
        """Once an update is replayed: let autograd get at what its graph saved, if it has one."""
        reversal = self.passes.get(_current_pass())
        saved = None if reversal is None else reversal.captured.get(lent.position)
        if type(saved) is Launched:
            saved.lend(lent)
            self.lent = weakref.ref(lent)

    def _captured(self, reversal: Reversal | None, position: int, slot: int) -> Saved:
        """What an update saves, after reversing the program up to there."""
        if reversal is None:
            reversal = self.begin(self._finals(position), again=False)
        try:
            return reversal.back_to(position, slot)
        except BaseException:
            self.passes.pop(_current_pass(), None)  # it has failed, and will not come to its end
            raise

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
                raise RuntimeError(
                    f"{self.entries[position]}: an output of its program was changed in place before the second "
                    "backward; clone the output before changing it"
                )
        return [leaf for leaf, _ in self.finals]


class Reversal:
    """One backward pass over a tape: the streams as far as they are reconstructed, and what replays saved (R12)."""

    def __init__(self, entries: list[Entry], streams: Flat, watch: DriftWatch | None, *, graphed: bool) -> None:
        self.entries, self.streams, self.watch = entries, streams, watch
        self.graphed, self.numerics = graphed, numerics() if graphed else None
        self.position = len(entries)  # every update from here on is undone in `streams`
        self.captured: dict[int, Saved] = {}
        self.placed: set[str] = set()  # streams that lie where graphs read and write them
        self.standing: dict[ReadBy, bool] = {}  # see plain.stands
        self.stood: dict[int, bool] = {}  # see Call.replay
        self.lock = threading.RLock()  # autograd runs one thread per device

    def back_to(self, position: int, slot: int) -> Saved:
        """What an update saves, with the tensor of this slot, from a replay."""
        with self.lock:
            while self.position > position:
                self._forget(self.entries[position].slots[slot][2])
                self._step_back(passing=self.position - 1 > position)
            saved = self.captured.get(position)
            return self._again(position) if saved is None or saved.tensors[slot] is None else saved

    def _step_back(self, *, passing: bool) -> None:
        """Reverse one update. `passing`: only to get to an earlier one, since nobody asked for what this one saved."""
        entry = self.entries[self.position - 1]
        sharded = entry.call.sharded() if passing else []
        if _plain_here():
            captured, before = replayed(entry, self) if self.graphed else entry.replay(self.streams, self.stood)
        else:
            with _outside_transforms(), _as_subclasses():
                captured, before = entry.replay(self.streams, self.stood)
        for module in sharded:
            module.reshard()  # FSDP2 expects no forward after a module's backward, and would leave it whole
        self.streams[entry.step.update.target] = before
        self.position -= 1
        self.captured[self.position] = captured
        if self.position == 0 and self.watch is not None:
            self.watch.compare([leaf for leaves in self.streams.values() for leaf in leaves], _current_pass())

    def move_out(self, name: str) -> None:
        """Give a stream memory of its own: it lies in that of graphs (launch.py)."""
        self.streams[name] = [leaf.clone() for leaf in self.streams[name]]
        self.placed.discard(name)

    def move_out_all(self) -> None:
        """The same for all that lies there: another pass is about to use it."""
        for name in [*self.placed]:
            self.move_out(name)
        for saved in self.captured.values():
            if type(saved) is Launched:
                saved.move_out()

    def _forget(self, device: torch.device) -> None:
        """Drop what later updates saved on this device and nobody took.

        Autograd runs the nodes of one device from the last to the first, so none of it will be asked for any more.
        """
        for position, saved in list(self.captured.items()):
            if not saved.forget(device):
                del self.captured[position]

    def _again(self, position: int) -> Saved:
        """A second time in one pass (a custom function that reads `ctx.saved_tensors` twice): replay once more."""
        entry = self.entries[position]
        if position != self.position:
            raise RuntimeError(
                f"{entry}: a saved tensor was asked for twice in one backward pass, the second time after the pass "
                "had gone on"
            )
        with _as_subclasses():
            self.captured[position], _ = entry.replay(self.streams, self.stood, undone=True)
        return self.captured[position]


def leave(tape: Tape | None, names: Sequence[str], targets: Container[str], flat: Flat) -> None:
    """These streams go through an exit; what comes out replaces those that are not as they entered."""
    leaves = [leaf for name in names for leaf in flat[name]]
    if any(leaf.requires_grad for leaf in leaves):
        through = iter(Exit.apply(tape, *leaves))  # type: ignore[arg-type]
        for name in names:
            after = [next(through) if leaf.requires_grad else leaf for leaf in flat[name]]
            flat[name] = after if name in targets else flat[name]


class Exit(torch.autograd.Function):
    """The identity after the last update. With a tape, it saves the final streams, so autograd guards them like any
    saved tensor."""

    @staticmethod
    def forward(ctx: Any, tape: Tape | None, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        if tape is None:
            ctx.tape = lambda: None
        else:
            ctx.tape = weakref.ref(tape)  # slots keep the tape alive; the outputs of the program must not
            ctx.save_for_backward(*leaves)
        return tuple(leaf.detach() for leaf, needed in zip(leaves, ctx.needs_input_grad[1:], strict=True) if needed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if (tape := ctx.tape()) is not None:
            with _as_subclasses():
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

    for hook in (
        Saved.pack,
        Storing.pack,
        UntilEnough.pack,
        Saved.unpack,
        Entry._refuse_inside,
        Lent.__missing__,
        Tape.serve,
    ):
        skip_code(hook.__code__)


def _at_end_of_pass(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _as_subclasses() -> Any:
    """The backward of a tensor subclass runs where subclasses are plain tensors; its forward did not."""
    return _NOTHING if torch._C._is_torch_function_enabled() else torch._C._EnableTorchFunction()  # pyright: ignore[reportAttributeAccessIssue]


def _plain_here() -> bool:
    """Whether there are no transforms to leave, and subclasses are what they are."""
    levels = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return levels == 0 and torch._C._is_torch_function_enabled() and not transformed()  # pyright: ignore[reportAttributeAccessIssue]


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
