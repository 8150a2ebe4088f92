"""The engine: it runs any program of updates and decides what autograd stores meanwhile (with tape.py, entry.py and
saved.py, the graphs of launch.py, the sum of rounding.py and the shelf of offload.py: all the autograd code there is).

Autograd builds its ordinary graph. While an update's `fn` runs, saved-tensor hooks store a slot number in place of
each tensor; an *exit* node after the last update stores the final streams. In the backward, the exit hands these to
the tape, and the first slot that is asked for makes the tape reverse the program up to there: replay `fn`, undo the
join, serve the slots from what the replay saved. Whatever autograd can do with a graph it can do with this one.

The rules it keeps (the code cites them):

R1   The target is not among the sources, every name exists, `fn` returns the target's structure and shapes; a stream
     keeps its dtype.
R2   With grad disabled the program is the plain loop: no tape, no hooks, nothing recorded.
R3   A replay sees what the forward saw: random numbers, autocast, training flags, hooks, parameters, buffers, what
     names in closures, globals and attributes were bound to, and which of its sources and parameters need gradients.
     After it, each of these is what it was before it.
R4   Random state is recorded only where the forward moved it; all calls that leave it alone share one.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .alarms import RangeAlarms
from .auto import Auto, Learned, learned_for
from .capture import current
from .entry import Flat
from .frames import running
from .joins import ExactAdd
from .offload import Shelf
from .policies import Keep, Offload, Policy, Reverse
from .reach import reach
from .streams import Stream, Structure, flatten, leaves_of, unflatten
from .surroundings import Surroundings, default_generators, no_random_numbers, transformed
from .tape import Tape, leave
from .update import Step, Update, program


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
    _named(streams)
    with no_random_numbers("invert", default_generators({leaf.device for leaf in leaves_of(dict(streams), Tensor)})):
        backwards = [update.inverse() for update in reversed(program(updates, streams))]
        theirs = [generator for update in backwards for generator in reach(update.fn, update.kwargs).generators]
        with no_random_numbers("invert", theirs):
            return execute(backwards, streams, policy, inverted=True)


def checked(policy: Any) -> Policy:
    """A policy that a program can have; anything else is a TypeError."""
    if not isinstance(policy, (Reverse, Keep, Offload, Auto)):
        raise TypeError(f"policy must be Reverse(), Keep(), Offload() or Auto(budget), not {policy!r}")
    return policy


def _named(streams: Any) -> None:
    if not isinstance(streams, Mapping):
        raise TypeError(
            f"streams must be a dict from names to tensors or trees of tensors, not {type(streams).__name__}"
        )


def execute(
    updates: Iterable[Update],
    streams: Mapping[str, Stream],
    policy: Policy,
    through: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    inverted: bool = False,
) -> dict[str, Stream]:
    """`run`, with each `fn` called as `through(fn)`. `inverted`: the program is read backwards, so its updates are
    counted from the end, and a stream that leaves the range of its join is an error here."""
    checked(policy)
    _named(streams)
    flat: Flat = {}
    structures: dict[str, Structure] = {}
    for name, stream in streams.items():
        try:
            flat[name], structures[name] = flatten(stream)
        except TypeError as error:
            raise TypeError(f"stream {name!r}: {error}") from None
    found = program(updates, streams)
    numbers = reversed(range(len(found))) if inverted else range(len(found))
    steps = [
        Step(index, update, update.fn if through is None else through(update.fn), structures)
        for index, update in zip(numbers, found, strict=True)
    ]
    plain = not torch.is_grad_enabled() or torch.compiler.is_exporting() or _hooks_forbidden()  # R2, R11
    alarms = _enter(steps, flat, alarmed=inverted or not plain)
    if plain:
        _keep(steps, flat, alarms)
    else:
        surroundings = Surroundings(leaf.device for leaves in flat.values() for leaf in leaves)
        learned = learned_for(policy, flat, found, surroundings) if isinstance(policy, Auto) else None
        policies = [policy] * len(steps) if learned is None else learned.choose(steps)
        surroundings.run(lambda: _run(steps, policies, flat, surroundings, alarms, learned))
        if learned is not None:
            learned.check()
    if alarms is not None:
        alarms.send()
        if inverted:
            alarms.check(wait=True)
    return {name: unflatten(flat[name], structures[name]) for name in streams}


def _enter(steps: list[Step], flat: Flat, *, alarmed: bool) -> RangeAlarms | None:
    """Put the targets of exact joins on their grid; the alarms of the program, if it has such joins."""
    exact = {step.update.target: step for step in reversed(steps) if isinstance(step.update.join, ExactAdd)}
    alarms = RangeAlarms(steps) if exact and alarmed else None
    for name, first in exact.items():
        join = first.update.join
        assert isinstance(join, ExactAdd)
        for step in steps:
            other = step.update.join
            if step.update.target == name and not (isinstance(other, ExactAdd) and other.grid == join.grid):
                raise ValueError(
                    f"{step.update.label(step.index)}: {other} meets {join} on stream {name!r}; a stream is exact only "
                    "if all its updates are, on one grid"
                )
        flags = [alarms and alarms.flag(-1, leaf.device) for leaf in flat[name]]
        flat[name] = [join.enter(leaf, flag) for leaf, flag in zip(flat[name], flags, strict=True)]
    return alarms


def _run(
    steps: list[Step],
    policies: Sequence[Policy],
    flat: Flat,
    surroundings: Surroundings,
    alarms: RangeAlarms | None,
    learned: Learned | None,
) -> None:
    """Run each piece of the program as its policy says."""
    targets = {step.update.target for step in steps}
    kept: list[str] = []  # those that are not behind an exit
    for policy, segment in segments(steps, policies):
        _refuse_in_graph(policy)
        touched = {name for step in segment for name in (step.update.target, *step.update.sources)}
        kept = [name for name in kept if name not in touched]
        if isinstance(policy, Reverse):
            Tape(segment, policy, surroundings, alarms, learned).run(flat, targets)
        else:
            _keep(segment, flat, alarms, Shelf(policy.smallest) if isinstance(policy, Offload) else None)
            kept += sorted(touched & targets)
    # What is returned is the end of the program under any policy: a gradient by it, or a hook on it, is not about
    # what later updates read of the same values.
    leave(None, kept, targets, flat)


def _refuse_in_graph(policy: Policy) -> None:
    """What works on the host at each step cannot be captured."""
    if current() is not None and (isinstance(policy, Offload) or (isinstance(policy, Reverse) and policy.watch)):
        raise RuntimeError(f"{policy} works on the host at each step, so it cannot be captured in a CUDA graph")


def segments(steps: list[Step], policies: Sequence[Policy]) -> Iterator[tuple[Policy, list[Step]]]:
    """The program cut where the policy changes and at anchors: each reversed piece has its own tape and exit."""
    effective = {step.index: step.update.policy or policy for step, policy in zip(steps, policies, strict=True)}
    for policy, group in groupby(steps, key=lambda step: effective[step.index]):
        segment = list(group)
        length = (policy.anchor_every if isinstance(policy, Reverse) else None) or len(segment)
        for start in range(0, len(segment), length):
            yield policy, segment[start : start + length]


def _keep(steps: list[Step], flat: Flat, alarms: RangeAlarms | None, shelf: Shelf | None = None) -> None:
    """The plain loop; with a shelf, what it saves goes to the host."""
    for step in steps:
        update = functools.partial(_kept, step, flat, alarms)
        flat[step.update.target] = update() if shelf is None else shelf.run(step.update.label(step.index), update)


def _kept(step: Step, flat: Flat, alarms: RangeAlarms | None) -> list[Tensor]:
    """The target after one update."""
    sources, target = [flat[name] for name in step.update.sources], flat[step.update.target]
    call = functools.partial(step.call, sources, target)
    # While torch.compile or torch.export traces, phase() is not kept: it would be a side effect of the graph.
    parts = call() if torch.compiler.is_compiling() else running(step.index, step.update, call, None)
    return step.join(target, parts, alarms)


# Torch has no public name for this. tests/test_engine.py fails when it changes.
def _hooks_forbidden() -> bool:
    """Inside a transform, or where someone has disabled saved-tensor hooks (R11)."""
    return transformed() or not torch._C._autograd._saved_tensors_hooks_is_enabled()  # pyright: ignore[reportAttributeAccessIssue]
