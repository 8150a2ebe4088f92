"""Each update of a program by itself: `check` looks here for what is wrong with it.

A program is run forward and back, update by update, with every stream kept: each `fn` twice on the same inputs, once
more on the reconstructed ones, and once with its saved tensors taken away, to see what it holds besides.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .engine import segments
from .entry import Flat, fresh
from .joins import ExactAdd
from .measure import LiveBytes
from .policies import Policy, Reverse
from .replay import Call
from .report import Drift, Kind, Problem
from .streams import Stream, Structure, flatten, leaves_of, map_tensors, versions
from .surroundings import Surroundings, restore, state
from .update import Step, Update

ON_CHOICES = "take the choice once: remember(lambda: ...); or join=ExactAdd(), which reconstructs every bit"
ON_DETERMINISM = (
    "draw random numbers from torch's generators, hold state in buffers, do not ask for the time or a counter; or give "
    "this update policy=Keep()"
)
ON_INPUTS = "use the out-of-place operation (inplace=False), or clone the input in fn"
ON_MEMORY = (
    "use ctx.save_for_backward in place of ctx.x = tensor, and do not store tensors on modules in the forward; this "
    "memory grows with depth"
)
ON_JOINS = "invert(apply(target, out), out) must give the target back; for Scale, a `keep` nearer to 1"


class Program:
    """One call of one `Reversible`: its updates, the streams that entered, and what surrounded it."""

    def __init__(self, name: str, updates: list[Update], streams: Mapping[str, Stream], policy: Policy) -> None:
        self.name, self.updates, self.policy = name, updates, policy
        self.streams = {stream: copied(value) for stream, value in streams.items()}
        self.surroundings = Surroundings(leaf.device for leaf in leaves_of(self.streams, Tensor))
        self.random = [(generator, state(generator)) for generator in self.surroundings.generators]


class _Examined:
    """An update that has run forward on the true streams."""

    def __init__(self, step: Step, call: Call, flags: list[list[bool]], before: list[Tensor]) -> None:
        self.step, self.call, self.flags, self.before = step, call, flags, before
        self.choices: list[Tensor | None] = []
        self.replayable = True

    def replay(self, flat: Flat) -> tuple[list[list[Tensor]], list[Tensor]]:
        """`fn` once more, as the engine replays it, on the sources of these streams: its output, and what it saves."""
        sources = _fresh(self.step, flat, self.flags)
        target = flat[self.step.update.target]
        saved: list[Tensor] = []
        with _collecting(saved):
            parts = self._called(sources, target)
        return parts, saved

    def _called(self, sources: list[list[Tensor]], target: list[Tensor]) -> list[list[Tensor]]:
        function = functools.partial(self.step.call, sources, target)
        return self.call.surroundings.run(lambda: self.call.replay(function))

    def held(self, flat: Flat) -> int:
        """The bytes that the graph of a call, or anything else, holds when its saved tensors are taken away."""
        target = flat[self.step.update.target]
        live: list[Tensor] = []

        def pack(tensor: Tensor) -> int:
            live.append(tensor)
            return len(live) - 1

        with LiveBytes() as memory:
            # Copies that are no leaves: what stays of them is held by someone, and not as a leaf of the graph.
            sources = [[leaf.clone() for leaf in leaves] for leaves in _fresh(self.step, flat, self.flags)]
            with saved_tensors_hooks(pack, live.__getitem__):
                parts = self._called(sources, target)
            graph = [leaf.grad_fn for part in parts for leaf in part]
            live.clear()
            sources.clear()
            del parts
            if memory.live:
                gc.collect()
            held = memory.live
        del graph
        return held


class Examination:
    """Runs a program forward and back, update by update, and notes what is wrong with each.

    Where an update raises, `run` raises; `problems` then says why, if the update itself is to blame.
    """

    def __init__(self, program: Program, prefix: str, tolerance: float) -> None:
        self.program, self.prefix, self.tolerance = program, prefix, tolerance
        self.drift: list[Drift] = []
        self.problems: list[Problem] = []
        self.examined: list[_Examined] = []

    def run(self) -> None:
        structures: dict[str, Structure] = {}
        flat: Flat = {}
        for name, stream in self.program.streams.items():
            flat[name], structures[name] = flatten(stream)
        steps = [Step(i, update, update.fn, structures) for i, update in enumerate(self.program.updates)]
        for generator, then in self.program.random:
            restore(generator, then)
        for name, join in {step.update.target: step.update.join for step in steps}.items():
            if isinstance(join, ExactAdd):
                flat[name] = [join.enter(leaf) for leaf in flat[name]]
        needs = {name: [leaf.requires_grad for leaf in leaves] for name, leaves in flat.items()}
        flat = {name: [leaf.detach() for leaf in leaves] for name, leaves in flat.items()}
        for step in steps:
            self._forward(step, flat, needs)
        self._back(steps, flat)

    def _forward(self, step: Step, flat: Flat, needs: dict[str, list[bool]]) -> None:
        """One update on the true streams, twice; then without its saved tensors."""
        update = step.update
        call = Call(step.index, update, self.program.surroundings)
        examined = _Examined(step, call, [needs[name] for name in update.sources], flat[update.target])
        # Copies, and no leaves: work in place must be possible, so that it can be seen, and must not spoil the streams.
        sources = [[leaf.clone() for leaf in each] for each in _fresh(step, flat, examined.flags)]
        leaves: list[Tensor] = [leaf for each in sources for leaf in each]
        saved: list[Tensor] = []
        seen = versions(leaves)
        try:
            with _collecting(saved):
                parts, examined.replayable = self.program.surroundings.run(
                    lambda: call.forward(lambda: step.call(sources, examined.before), [])
                )
                after = step.join(fresh(examined.before, needs[update.target]), parts)
        except Exception:
            if versions(leaves) != seen:
                self._problem("changes its inputs", step, f"fn changes a source {update.sources} in place", ON_INPUTS)
            elif (changed := call._changed()) is not None:
                self._problem("changes its inputs", step, f"fn changes {changed} in place", ON_INPUTS)
            raise
        examined.choices = [tensor if _is_choice(tensor) else None for tensor in saved]
        self.examined.append(examined)
        if examined.replayable and isinstance(update.policy or self.program.policy, Reverse):
            self._again(examined, flat, parts, saved)
            self._held(examined, flat)
            self._undone_at_once(step, examined.before, _detached(after), [_detached(part) for part in parts])
        needs[update.target] = [leaf.requires_grad for leaf in after]
        flat[update.target] = _detached(after)

    def _again(self, examined: _Examined, flat: Flat, parts: list[list[Tensor]], saved: list[Tensor]) -> None:
        """The same call on the same inputs must give the same."""
        step = examined.step
        try:
            again, saved_again = examined.replay(flat)
        except Exception as error:
            self._problem("not deterministic", step, f"a second run raised {error}", ON_DETERMINISM)
            raise
        if [_slot(tensor) for tensor in saved] != [_slot(tensor) for tensor in saved_again]:
            seen = f"a second run on the same inputs saved other tensors ({len(saved_again)} after {len(saved)})"
            self._problem("not deterministic", step, seen, ON_DETERMINISM)
            return
        exact = isinstance(step.update.join, ExactAdd)  # needs every bit
        outputs = [[leaf for part in each for leaf in part] for each in (parts, again)]
        for what, allowed, then, now in (
            ("returned", 0.0 if exact else self.tolerance, *outputs),
            ("saved", self.tolerance, saved, saved_again),
        ):
            error = max((relative_error(a, b) for a, b in zip(now, then, strict=True)), default=0.0)
            if error > allowed:
                seen = f"a second run on the same inputs {what} values that differ by {error:.1e} (relative)"
                self._problem("not deterministic", step, seen, ON_DETERMINISM)
                return

    def _held(self, examined: _Examined, flat: Flat) -> None:
        update = examined.step.update
        held = examined.held(flat)
        streams = sum(leaf.nbytes for name in (update.target, *update.sources) for leaf in flat[name])
        if held > streams / 8:
            seen = f"{held} bytes stay alive after fn that are not saved tensors ({streams} in the streams it touches)"
            self._problem("holds memory", examined.step, seen, ON_MEMORY)

    def _undone_at_once(self, step: Step, before: list[Tensor], after: list[Tensor], parts: list[list[Tensor]]) -> None:
        """The join, undone with the very output it was made with."""
        for was, new, found in zip(before, after, step.unjoin(after, parts), strict=True):
            error = relative_error(found, was, new)
            allowed = max(self.tolerance, 32 * torch.finfo(was.dtype).eps if was.is_floating_point() else 0.0)
            if error > allowed:
                seen = f"{step.update.join} was undone with a relative error of {error:.1e}"
                self._problem("join", step, seen, ON_JOINS)

    def _back(self, steps: list[Step], true: Flat) -> None:
        """Reverse the program from its end as the engine does, and compare with what was there."""
        true, position = dict(true), len(steps)
        rows: list[Drift] = []
        pieces = list(segments(steps, [self.program.policy] * len(steps)))
        for piece in reversed([piece for policy, piece in pieces if isinstance(policy, Reverse)]):
            while position > piece[-1].index + 1:  # kept
                position -= 1
                true[steps[position].update.target] = self.examined[position].before
            rebuilt = dict(true)  # stored at the end of each piece
            for undone, step in enumerate(reversed(piece), 1):
                position, examined, target = step.index, self.examined[step.index], step.update.target
                after, true[target] = true[target], examined.before
                if examined.replayable:
                    parts, saved = examined.replay(rebuilt)
                    rebuilt[target] = step.unjoin(rebuilt[target], [_detached(part) for part in parts])
                    self._flipped(examined, saved)
                else:
                    rebuilt[target] = examined.before
                tensors = zip(rebuilt[target], examined.before, after, strict=True)
                error = max((relative_error(*each) for each in tensors), default=0.0)
                rows.append(Drift(self._where(step), error, undone))
        self.drift = rows[::-1]

    def _flipped(self, examined: _Examined, saved: list[Tensor]) -> None:
        """What was chosen on the true inputs must be chosen on the reconstructed ones."""
        if any(problem.where == self._where(examined.step) for problem in self.problems):
            return  # not deterministic: then this would be no news
        if len(saved) != len(examined.choices):
            seen = f"on reconstructed inputs it saved {len(saved)} tensors, on the true ones {len(examined.choices)}"
            self._problem("discrete choice", examined.step, seen, ON_CHOICES)
            return
        for choice, now in zip(examined.choices, saved, strict=True):
            if choice is None:
                continue
            if choice.shape != now.shape or not torch.equal(choice, now):
                flipped = int((choice != now).sum()) if choice.shape == now.shape else "all"
                seen = f"{flipped} of {choice.numel()} choices differ on the reconstructed inputs (indices or a mask)"
                self._problem("discrete choice", examined.step, seen, ON_CHOICES)
                return

    def _where(self, step: Step) -> str:
        return self.prefix + step.update.label(step.index)

    def _problem(self, kind: Kind, step: Step, seen: str, remedy: str) -> None:
        self.problems.append(Problem(kind, self._where(step), seen, remedy))


def _detached(leaves: Iterable[Tensor]) -> list[Tensor]:
    return [leaf.detach() for leaf in leaves]


def _fresh(step: Step, flat: Flat, flags: list[list[bool]]) -> list[list[Tensor]]:
    """The sources of an update as new leaves of a graph."""
    return [fresh(flat[name], needs) for name, needs in zip(step.update.sources, flags, strict=True)]


@contextlib.contextmanager
def _collecting(saved: list[Tensor]) -> Iterator[None]:
    """Collect what autograd saves."""

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())  # not the tensor itself: as its own node's, it could never die
        return saved[-1]

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _slot(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _is_choice(tensor: Tensor) -> bool:
    """Indices, masks, and what is made of them: one-hot vectors and signs in floating point."""
    if tensor.dim() == 0 or tensor.dtype == torch.uint64:  # seeds and offsets of attention kernels
        return False
    if tensor.is_floating_point():
        return tensor.numel() > 0 and bool(((tensor == 0) | (tensor.abs() == 1)).all())
    return not tensor.is_complex()


def relative_error(*tensors: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest magnitude in all but the first.

    Infinite where one of the two is finite and the other is not.
    """
    found, expected, *others = (tensor.detach() for tensor in tensors)
    if not found.is_floating_point() and not found.is_complex():
        return 0.0 if torch.equal(found, expected) else math.inf
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(found), finite):
        return math.inf
    if not finite.any():
        return 0.0
    wide = torch.complex128 if found.is_complex() else torch.float64
    difference = (found.to(wide) - expected.to(wide))[finite].abs().max()
    scale = max(float(each[finite].abs().max()) for each in (expected, *others))
    return float(difference) / scale if scale else (math.inf if difference else 0.0)


def copied(tree: Any, keep: set[int] | None = None) -> Any:
    """The same tree with copies of its tensors: leaves of a graph that need gradients where those did."""
    copies: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (keep and id(leaf) in keep):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return map_tensors(copy, tree)
