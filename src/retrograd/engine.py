"""The engine: it runs any program of updates and decides what autograd stores meanwhile. The only autograd code here.

Autograd builds its ordinary graph. While an update's `fn` runs, saved-tensor hooks store a slot number in place of
each tensor; an *exit* node after the last update stores the final streams. In the backward, the exit hands these to
the tape, and the first slot that is asked for makes the tape reverse the program up to there: replay `fn`, undo the
join, serve the slots from what the replay saved. Whatever autograd can do with a graph it can do with this one.

The rules it keeps (the code cites them):

R1   The target is not among the sources, every name exists, `fn` returns the target's structure and shapes; a stream
     keeps its dtype.
R2   With grad disabled the program is the plain loop: no tape, no hooks, nothing recorded.
R3   A replay sees what the forward saw: random numbers, autocast, `requires_grad` of the sources, training flags,
     buffers and parameters. After it, each of these is what it was before it.
R4   Random state is recorded only where the forward moved it.
R5   Autocast's weight cache is off inside the engine: it would hold a copy of every weight.
R6   State belongs to the call, never to a module: any number of calls may await their backward.
R7   A replay saves what the forward saved (count, shape, dtype, device), and what `fn` reads must not have changed in
     place since; otherwise an error.
R8   `fn` may not change a stream in place.
R9   Whatever `fn` raises, in either pass, global state is restored.
R10  Discrete choices are taken once: `remember`; `phase` tells a `fn` where it is.
R11  Where torch forbids saved-tensor hooks or custom functions (torch.func, forward-mode AD), the program runs kept.
R12  Each backward pass reverses on its own. A pass that begins inside the program, past its exit, is refused.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .policies import Policy, Reverse
from .replay import Call, Surroundings, no_random_numbers, running, version
from .streams import Stream, Structure, flatten, leaves_of, unflatten
from .update import Update, program

Flat = dict[str, list[Tensor]]
"""The tensors of each stream. The dict changes as a program runs; the lists in it never do."""


def run(updates: Iterable[Update], streams: Mapping[str, Stream], *, policy: Policy = Reverse()) -> dict[str, Stream]:
    """Run a program of updates on named streams and return the streams after it. The given ones are left alone.

    Gradients are those of plain autograd; `policy` decides what they cost in memory. An update may have its own.

    >>> import retrograd as rg
    >>> f, g = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    >>> x = torch.randn(2, 4)
    >>> out = rg.run([rg.Update("a", f, "b"), rg.Update("b", g, "a")], {"a": x, "b": x})
    >>> (out["a"] + out["b"]).sum().backward()
    >>> f.weight.grad.shape
    torch.Size([4, 4])
    """
    return execute(updates, streams, policy)


def invert(
    updates: Iterable[Update], streams: Mapping[str, Stream], *, policy: Policy = Reverse()
) -> dict[str, Stream]:
    """The streams before a program, given the streams after it. Differentiable, and as cheap in memory as `run`.

    An update that draws random numbers cannot be undone afterwards: it is refused.

    >>> import retrograd as rg
    >>> program = [rg.Update("a", torch.sin, "b"), rg.Update("b", torch.cos, "a")]
    >>> start = {"a": torch.ones(1), "b": torch.zeros(1)}
    >>> rg.invert(program, rg.run(program, start))
    {'a': tensor([1.]), 'b': tensor([0.])}
    """
    backwards = [update.inverse() for update in reversed(program(updates, streams))]
    with no_random_numbers("invert", leaves_of(dict(streams), Tensor)):
        return execute(backwards, streams, policy)


def execute(
    updates: Iterable[Update],
    streams: Mapping[str, Stream],
    policy: Policy,
    through: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> dict[str, Stream]:
    """`run`, with each `fn` called as `through(fn)`."""
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be a Policy such as Reverse(), not {policy!r}")
    flat: Flat = {}
    structures: dict[str, Structure] = {}
    for name, stream in streams.items():
        try:
            flat[name], structures[name] = flatten(stream)
        except TypeError as error:
            raise TypeError(f"stream {name!r}: {error}") from None
    steps = [
        Step(index, update, update.fn if through is None else through(update.fn), structures)
        for index, update in enumerate(program(updates, streams))
    ]
    if not torch.is_grad_enabled() or torch.compiler.is_exporting() or _hooks_forbidden():  # R2, R11
        for step in steps:
            step.run(flat)
    else:
        surroundings = Surroundings(leaf.device for leaves in flat.values() for leaf in leaves)
        with surroundings.forward():
            for effective, segment in _segments(steps, policy):
                if isinstance(effective, Reverse):
                    Tape(segment, surroundings).run(flat)
                else:
                    for step in segment:
                        step.run(flat)
    return {name: unflatten(flat[name], structures[name]) for name in streams}


def _segments(steps: list[Step], policy: Policy) -> Iterator[tuple[Policy, list[Step]]]:
    """The program cut where the policy changes and at anchors: each reversed piece has its own tape and exit."""
    for effective, group in groupby(steps, key=lambda step: step.update.policy or policy):
        segment = list(group)
        length = (effective.anchor_every if isinstance(effective, Reverse) else None) or len(segment)
        for start in range(0, len(segment), length):
            yield effective, segment[start : start + length]


class Step:
    """An update at its place in a program, on flat streams."""

    __slots__ = ("index", "update", "fn", "structures")

    def __init__(self, index: int, update: Update, fn: Callable[..., Any], structures: dict[str, Structure]) -> None:
        self.index, self.update, self.fn, self.structures = index, update, fn, structures

    def run(self, flat: Flat) -> None:
        """The update, plainly."""
        target = flat[self.update.target]
        with running(self.index, self.update, None):
            parts = self.call([flat[name] for name in self.update.sources], target)
        flat[self.update.target] = self.join(target, parts)

    def call(self, sources: list[list[Tensor]], target: list[Tensor]) -> list[list[Tensor]]:
        """`fn` on the sources; what it returns, part by part, fits the target (R1). The sources are unchanged (R8)."""
        versions = [version(leaf) for leaves in sources for leaf in leaves]
        streams = [
            unflatten(leaves, self.structures[name]) for name, leaves in zip(self.update.sources, sources, strict=True)
        ]
        out = self.fn(*streams, **self.update.kwargs)
        if versions != [version(leaf) for leaves in sources for leaf in leaves]:
            raise RuntimeError(
                f"{self.update.label(self.index)}: fn changes a source {self.update.sources} in place; streams must "
                "stay as they are: use the out-of-place operation (inplace=False), or clone the input in fn"
            )
        return self.update.parts(self.index, out, target, self.structures[self.update.target])

    def join(self, target: list[Tensor], parts: list[list[Tensor]]) -> list[Tensor]:
        return self._joined(self.update.join.apply, target, parts)

    def unjoin(self, target: list[Tensor], parts: list[list[Tensor]]) -> list[Tensor]:
        return self._joined(self.update.join.invert, target, parts)

    def _joined(self, join: Callable[..., Tensor], target: list[Tensor], parts: list[list[Tensor]]) -> list[Tensor]:
        joined = (join(leaf, *out) for leaf, *out in zip(target, *parts, strict=True))
        return [new if new.dtype == old.dtype else new.to(old.dtype) for new, old in zip(joined, target, strict=True)]


class Entry:
    """A step on a tape: what its replay needs, and what its replay must save."""

    __slots__ = ("step", "call", "source_grads", "target_grads", "slots", "fn_slots", "kept")

    def __init__(self, step: Step, surroundings: Surroundings) -> None:
        self.step = step
        self.call = Call(step.index, step.update, surroundings)
        self.slots: list[tuple[torch.Size, torch.dtype, torch.device, int | None]] = []
        self.kept: list[Tensor] | None = None

    def run(self, flat: Flat, unpack: Callable[[int], Tensor]) -> None:
        """The update, inside hooks that store slot numbers in place of tensors."""
        step, update = self.step, self.step.update
        sources, target = [flat[name] for name in update.sources], flat[update.target]
        self.source_grads = [[leaf.requires_grad for leaf in leaves] for leaves in sources]
        self.target_grads = [leaf.requires_grad for leaf in target]
        known = {id(leaf) for leaves in sources for leaf in leaves}
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> int:
            saved.append(tensor)  # alive until fn returns, as it will be in the replay
            self.slots.append(self.describe(tensor, known))
            return len(saved) - 1

        try:
            with saved_tensors_hooks(pack, unpack):
                with self.call.forward():
                    parts = step.call(sources, target)
                self.fn_slots = len(saved)
                flat[update.target] = step.join(target, parts)
            if self.call.lost:
                self.kept = [tensor.detach() for tensor in saved]
        finally:
            saved.clear()  # the graph holds the hooks, and so this list: tensors in it would never die

    def replay(self, streams: Flat, *, undone: bool = False) -> tuple[list[Tensor | None], list[Tensor]]:
        """Run `fn` again: what it saves, and the target as it was before the update (`undone`: it is that already)."""
        step, update = self.step, self.step.update
        target = streams[update.target]
        sources = [
            [leaf.detach().requires_grad_(needs) for leaf, needs in zip(streams[name], flags, strict=True)]
            for name, flags in zip(update.sources, self.source_grads, strict=True)
        ]
        known = {id(leaf) for leaves in sources for leaf in leaves}
        saved: list[Tensor | None] = []
        slots = []

        def capture(tensor: Tensor) -> None:
            slots.append(self.describe(tensor, known))
            saved.append(tensor.detach())  # detached: the graph of the replay must die with the replay

        with torch.enable_grad(), saved_tensors_hooks(capture, _never_unpacked):
            with self.call.replay():
                parts = step.call(sources, target)
            with torch.no_grad():
                before = target if undone else step.unjoin(target, parts)
            if len(self.slots) > self.fn_slots:  # a join that saves: apply it again to see what
                leaves = [
                    leaf.detach().requires_grad_(needs) for leaf, needs in zip(before, self.target_grads, strict=True)
                ]
                step.join(leaves, parts)
        self.verify(slots)
        return saved, before

    def describe(self, tensor: Tensor, streams: set[int]) -> tuple[torch.Size, torch.dtype, torch.device, int | None]:
        """What forward and replay must agree on (R7). For weights that no module of ours shows, also the version."""
        seen = None
        if not isinstance(self.step.update.fn, nn.Module):
            base = tensor if tensor._base is None else tensor._base
            if isinstance(base, nn.Parameter) and id(base) not in streams:
                seen = version(base)
        return tensor.shape, tensor.dtype, tensor.device, seen

    def verify(self, replayed: list[tuple[torch.Size, torch.dtype, torch.device, int | None]]) -> None:
        """R7: the replay saved what the forward saved."""
        if replayed == self.slots:
            return
        label = self.step.update.label(self.step.index)
        if [slot[:3] for slot in replayed] == [slot[:3] for slot in self.slots]:
            raise RuntimeError(f"{label}: a weight was changed in place between the forward and the backward")
        differing = [
            f"saved tensor {i} was {tuple(a[0])} {a[1]} on {a[2]}, now {tuple(b[0])} {b[1]} on {b[2]}"
            for i, (a, b) in enumerate(zip(self.slots, replayed, strict=False))
            if a[:3] != b[:3]
        ]
        raise RuntimeError(
            f"{label} is not deterministic: its replay saved {len(replayed)} tensors, its forward {len(self.slots)}"
            + (f" ({differing[0]})" if differing else "")
            + ". fn must do the same in both passes: take choices that depend on the data through remember(), avoid "
            "state outside parameters and buffers, or give this update policy=Keep()"
        )


class Tape:
    """One call of one reversed piece of a program. It lives as long as a slot of it may be asked for (R6)."""

    def __init__(self, steps: list[Step], surroundings: Surroundings) -> None:
        self.entries = [Entry(step, surroundings) for step in steps]
        self.names = sorted({name for step in steps for name in (step.update.target, *step.update.sources)})
        self.sizes: list[int] = []
        self.passes: dict[int, Reversal] = {}
        self.finals: list[tuple[Tensor, int | None]] | None = None

    def run(self, flat: Flat) -> None:
        """The forward: every update inside hooks, then the exit."""
        for position, entry in enumerate(self.entries):
            entry.run(flat, functools.partial(self.serve, position))
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
        reversal = self.passes[current] = Reversal(self.entries, streams)
        if again:
            self.finals = [(leaf, version(leaf)) for leaf in finals]
        tape = weakref.ref(self)  # not the tape itself: it must be able to die before the pass ends

        def end() -> None:
            if (alive := tape()) is not None:
                alive.passes.pop(current, None)

        _at_end_of_pass(end)
        return reversal

    def serve(self, position: int, slot: int) -> Tensor:
        """The saved tensor that autograd asks for."""
        kept = self.entries[position].kept
        if kept is not None:
            return kept[slot]
        reversal = self.passes.get(_current_pass())
        if reversal is None:
            reversal = self.begin(self._finals(position), again=False)
        return reversal.serve(position, slot)

    def _finals(self, position: int) -> list[Tensor]:
        """The final streams, for a pass that has not come through the exit: there after `create_graph` only (R12)."""
        step = self.entries[position].step
        if self.finals is None or _current_pass() == -1:
            raise RuntimeError(
                f"{step.update.label(step.index)}: a saved tensor was asked for by a backward pass that did not begin "
                "after the reversible program, so there is nothing to reconstruct it from; differentiate something "
                "computed from the program's outputs, or give this update policy=Keep()"
            )
        for leaf, seen in self.finals:
            if version(leaf) != seen:
                raise RuntimeError("an output of a reversible program was changed in place before its second backward")
        return [leaf for leaf, _ in self.finals]


class Reversal:
    """One backward pass over a tape: the streams as far as they are reconstructed, and what replays saved (R12)."""

    def __init__(self, entries: list[Entry], streams: Flat) -> None:
        self.entries, self.streams = entries, streams
        self.position = len(entries)  # every update from here on is undone in `streams`
        self.captured: dict[int, list[Tensor | None]] = {}
        self.lock = threading.RLock()  # autograd runs one thread per device

    def serve(self, position: int, slot: int) -> Tensor:
        """A saved tensor of one update, reversing up to there if need be; it is released as it is taken."""
        with self.lock:
            while self.position > position:
                self._forget(self.entries[position].slots[slot][2])
                self._step_back()
            tensors = self.captured.get(position)
            if tensors is None or tensors[slot] is None:
                tensors = self._again(position)
            tensor, tensors[slot] = tensors[slot], None
            assert tensor is not None
            return tensor

    def _step_back(self) -> None:
        """Reverse one update."""
        entry = self.entries[self.position - 1]
        saved, before = entry.replay(self.streams)
        self.streams[entry.step.update.target] = before
        self.position -= 1
        self.captured[self.position] = saved

    def _forget(self, device: torch.device) -> None:
        """Drop what later updates saved on this device and nobody took.

        Autograd runs the nodes of one device from the last to the first, so none of it will be asked for any more.
        """
        for position, tensors in list(self.captured.items()):
            left = [None if tensor is None or tensor.device == device else tensor for tensor in tensors]
            if any(tensor is not None for tensor in left):
                self.captured[position] = left
            else:
                del self.captured[position]

    def _again(self, position: int) -> list[Tensor | None]:
        """A second time in one pass (a custom function that reads `ctx.saved_tensors` twice): replay once more."""
        entry = self.entries[position]
        if position != self.position:
            raise RuntimeError(
                f"{entry.step.update.label(entry.step.index)}: a saved tensor was asked for twice in one backward "
                "pass, the second time after the pass had gone on"
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


def _never_unpacked(_: Any) -> Tensor:
    raise AssertionError("the graph of a replay is never run backwards")


# What torch has no public name for. tests/test_engine.py fails when one of these changes.


def _current_pass() -> int:
    """The number of the backward pass that this thread works for; -1 outside one."""
    return torch._C._current_graph_task_id()


def _at_end_of_pass(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _hooks_forbidden() -> bool:
    """Inside a torch.func transform, under forward-mode AD, or where someone has disabled saved-tensor hooks (R11)."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
        or torch.autograd.forward_ad._current_level >= 0
        or not torch._C._autograd._saved_tensors_hooks_is_enabled()  # pyright: ignore[reportAttributeAccessIssue]
    )
