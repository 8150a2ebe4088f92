"""What one call of `fn` depended on besides its sources: noted in the forward, put back for the replay, and restored
after it (R3, R4, R7, R9).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from .bindings import MISSING, Binding, Swapped, exchange, exchange_hooks, hooks_of, is_dtensor, put_back, without_graph
from .buffers import Before
from .capture import Capture, Rehearsal, current
from .frames import Remembered, running
from .joins import JOINS
from .plain import Known, known
from .reach import Reached, reach
from .streams import leaves_of, versions
from .surroundings import Surroundings, restore, state
from .update import Update

T = TypeVar("T")

_needs: Callable[[Tensor], bool] = operator.attrgetter("requires_grad")


class Call:
    """What one call of `fn` depended on besides its sources and the surroundings."""

    # Few calls have more than the first of these.
    known: Known | None = None  # what a plain module uses
    remembered: list[Remembered]
    # generators: whence, and whither the forward moved each, if it did (R4)
    random: Sequence[tuple[torch.Generator, Any, int | None]] = ()
    drawn: Sequence[tuple[torch.Generator, Any, int]] = ()  # those that it moved
    twin: Sequence[tuple[torch.Generator, torch.Generator]] = ()  # instead, inside a CUDA graph: see capture.py
    spent = False
    found: Sequence[nn.Module] = ()  # the modules that fn can be seen to use
    held: Sequence[Binding] = ()  # what their members, and variables, are bound to
    hooks: Sequence[dict[str, Any] | None] = ()  # and the hooks of each that has some
    moved: Sequence[tuple[nn.Module, dict[str, Tensor | None]]] = ()  # copies of buffers that the forward moved
    leaves: Sequence[Tensor] = ()  # those of the tensors that fn reads,
    needs: Sequence[bool] = ()  # and which need gradients
    read: Sequence[Tensor] = ()  # what must not change until the replay (R7),
    versions: Sequence[int | None] = ()  # and at which version it was
    shown: Sequence[Tensor] = ()  # weights of modules that fn shows without being made of them,
    shown_versions: Sequence[int | None] = ()  # likewise

    def __init__(self, index: int, update: Update, surroundings: Surroundings) -> None:
        self.index, self.update, self.surroundings = index, update, surroundings
        self.remembered = []

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Those that `fn` can be seen to use."""
        return self.found if self.known is None else [self.update.fn, *self.known.below]  # type: ignore[list-item]

    def forward(self, function: Callable[[], T], states: list[Any]) -> tuple[T, bool]:
        """Run `fn` for the first time and note what it depends on; also whether it can be replayed.

        `states` are those of the surroundings' generators if they are known, and are known afterwards.
        """
        update = self.update
        if type(update.join) in JOINS and not update.kwargs and (plain := known(update.fn)) is not None:
            self.known = plain
            self.read = self.leaves = plain.weights
            self.versions, self.needs = versions(plain.weights), list(map(_needs, plain.weights))
            out = self._first(function, [], states)
            if versions(plain.weights) != self.versions:
                self._refuse_changes_by_fn()
            return out, True
        return self._forward(reach(update.fn, update.kwargs), function, states)

    def _forward(self, reached: Reached, function: Callable[[], T], states: list[Any]) -> tuple[T, bool]:
        """The same for any `fn`."""
        if type(self.update.join) not in JOINS:
            reached.look(self.update.join, 5)
        self.found = reached.modules
        if any(isinstance(module, LazyModuleMixin) for module in reached.modules):
            states.clear()  # its weights are not there yet, and will be drawn
            return running(self.index, self.update, function, None), False
        self.shown = reached.shown
        self.shown_versions = versions(self.shown)
        # Without their graphs: a tensor that fn left in a module holds the graph of the call before, and so its tape.
        tensors = [tensor if tensor.is_leaf else tensor.detach() for tensor in reached.tensors]
        self.read = tensors + reached.weights
        self.versions = versions(self.read)
        self.leaves = [t for t in reached.tensors + reached.weights + reached.shown if t.is_leaf]
        self.needs = list(map(_needs, self.leaves))
        before = [Before(module, id(module) in reached.own) for module in reached.modules if module._buffers]

        out = self._first(function, reached.generators, states)

        self._refuse_changes_by_fn()
        bound = self._bind(reached.members, reached.variables)
        if len(bound) < len(reached.variables):
            gone = {id(value) for _, _, value in reached.variables} - {id(value) for _, _, value in bound}
            kept = [tensor for tensor, found in zip(tensors, reached.tensors, strict=True) if id(found) not in gone]
            self.read = kept + reached.weights
            self.versions = versions(self.read)
        return out, self._settle(before) if before else True

    def _bind(self, members: list[Binding], variables: list[Binding]) -> list[Binding]:
        """After the forward: note what a replay must find. What has a name is put back as the members are, but not what
        fn itself binds anew: that may go."""
        bound = [each for each in variables if each[0].get(each[1], MISSING) is each[2]]
        self.held = members + [(where, name, without_graph(value)) for where, name, value in bound]
        self.hooks = [hooks_of(m) if m._forward_hooks or m._forward_pre_hooks else None for m in self.found]
        return bound

    def _refuse_changes_by_fn(self) -> None:
        if (changed := self._changed()) is not None:
            raise RuntimeError(
                f"{self.update.label(self.index)}: fn changes {changed} in place, and a replay would change it again; "
                "return what is new, hold it in a buffer, or give this update policy=Keep()"
            )

    def _first(self, function: Callable[[], T], own: list[torch.Generator], states: list[Any]) -> T:
        """Run `fn` and note which generators it moves: the default ones, or those that it holds (R4)."""
        recording, surroundings = current(), self.surroundings
        generators = surroundings.generators + own
        if isinstance(recording, Capture):
            out = running(self.index, self.update, function, self.remembered, generators)
            self.twin = recording.twin()
            return out
        before = (states or surroundings.states()) + list(map(state, own))
        out = running(self.index, self.update, function, self.remembered, generators)
        after = surroundings.states() + list(map(state, own))
        if before == after and not own:  # one note for all calls that leave them alone
            states[:], self.random = before, surroundings.stood(before)
        else:
            # One state for those that leave a generator alone: 5 KB each on a CPU.
            after = [then if then == now else now for then, now in zip(before, after, strict=True)]
            states[:] = after[: len(surroundings.generators)]
            self.random = [
                (generator, then, None if then is now else hash(now))
                for generator, then, now in zip(generators, before, after, strict=True)
            ]
            self.drawn = [(generator, then, to) for generator, then, to in self.random if to is not None]
        if isinstance(recording, Rehearsal):
            recording.note(self.update.label(self.index), [(generator, then) for generator, then, _ in self.drawn])
        return out

    def _settle(self, before: list[Before]) -> bool:
        """After the forward: note what the buffers were that it moved, and watch the others. False where no copy was
        taken of one that moved."""
        replayable = True
        for each in before:
            if moved := each.moved():
                copies = each.copies()
                self.moved = [*self.moved, (each.module, copies)]
                self.held = [*self.held, *each.changed_marks()]
                replayable = replayable and moved <= copies.keys()
            elif each.own:
                buffers = [buffer for buffer, _, _ in each.buffers.values() if buffer is not None]
                self.read = [*self.read, *buffers]
                self.versions = [*self.versions, *versions(buffers)]
        return replayable

    def replay(self, function: Callable[[], T], stood: dict[int, bool] | None = None) -> T:
        """Run `fn` again as it ran, and leave no trace (R3). `stood` is what one pass knows of the generators.

        Called where the surroundings are those of the forward.
        """
        stood = {} if stood is None else stood
        if versions(self.read) != self.versions:
            self._refuse_changes_since()
        drawn = [(*each, state(each[0])) for each in self.random if each[2] is not None or self._elsewhere(each, stood)]
        if drawn or self.twin or self.differs():
            out = self._replay_as_it_was(function, drawn)
        else:
            out = running(self.index, self.update, function, self.remembered, (), replaying=True)
        if self.shown and self.shown_changed():
            self._refuse_changed(out)
        return out

    def _refuse_changes_since(self) -> None:
        raise RuntimeError(
            f"{self.update.label(self.index)}: {self._changed()} was changed in place between forward and backward; "
            "change it after the backward, or give this update policy=Keep()"
        )

    def launch(self, graph: Callable[[], None]) -> None:
        """A replay by a graph: launch it, with the random numbers of the forward."""
        if versions(self.read) != self.versions:
            self._refuse_changes_since()
        drawn = [(*each, state(each[0])) for each in self.drawn]
        try:
            for generator, then, _, _ in drawn:
                restore(generator, then)
            graph()
            if any(hash(state(generator)) != whither for generator, _, whither, _ in drawn):
                self._refuse_drawn()
        finally:
            for generator, _, _, here in drawn:
                restore(generator, here)

    def _refuse_drawn(self) -> None:
        raise RuntimeError(
            f"{self.update.label(self.index)} draws other random numbers in its replay than in its forward (an "
            "operator with dropout under Reverse(save=...), a fn that is not deterministic, or another thread "
            "that draws from the same generator); give it policy=Keep(), or the thread a generator of its own"
        )

    def differs(self) -> bool:
        """Whether anything must be put back that the forward saw otherwise."""
        if list(map(_needs, self.leaves)) != self.needs:
            return True
        return self.known is None or not self.known.holds(self.update.fn)  # type: ignore[arg-type]

    def _replay_as_it_was(self, function: Callable[[], T], drawn: list[tuple[Any, Any, int | None, Any]]) -> T:
        """The replay, with all that `fn` depended on put back, and put back again after it."""
        twins = [(generator, twin, generator.graphsafe_get_state()) for generator, twin in self._twin()]
        frozen = [t for t, needed in zip(self.leaves, self.needs, strict=True) if t.requires_grad != needed]
        modules = self.modules
        hooks_then = self.hooks or [None] * len(modules)  # none at all in a plain module
        swapped: Swapped = []
        try:
            for tensor in frozen:
                tensor.requires_grad_(not tensor.requires_grad)
            if self.known is not None:
                self.known.put_back(swapped)
            for where, name, then in self.held:
                if where.get(name, MISSING) is not then:  # another than in the forward: functional_call
                    exchange(where, name, then, swapped)
            for module, hooks in zip(modules, hooks_then, strict=True):
                if hooks is not None or module._forward_hooks or module._forward_pre_hooks:
                    exchange_hooks(module, hooks, swapped)
            for module, copies in self.moved:
                for name, copy in copies.items():
                    exchange(module._buffers, name, None if copy is None else copy.clone(), swapped)
            for generator, then, _, _ in drawn:
                restore(generator, then)
            for generator, twin, _ in twins:
                restore(generator, twin)
            out = running(self.index, self.update, function, self.remembered, (), replaying=True)
            if any(
                whither is not None and hash(end := state(generator)) != whither and end != then
                for generator, then, whither, _ in drawn  # none at all is fine
            ):
                self._refuse_drawn()
            return out
        finally:
            for generator, _, _, here in drawn:
                restore(generator, here)
            for generator, _, here in twins:
                restore(generator, here)
            put_back(swapped)
            for tensor in frozen:
                tensor.requires_grad_(not tensor.requires_grad)

    @staticmethod
    def _elsewhere(noted: tuple[torch.Generator, Any, int | None], stood: dict[int, bool]) -> bool:
        """Whether a generator that the forward left where it was is elsewhere now: fn may have drawn and put it back,
        as fork_rng does. Asked once a pass, since the calls that left it alone share its state."""
        generator, then, _ = noted
        if (answer := stood.get(id(then))) is None:
            answer = stood[id(then)] = state(generator) == then
        return not answer

    def shown_changed(self) -> bool:
        """Whether a weight that `fn` shows, and perhaps reads, has changed in place."""
        return bool(self.shown) and versions(self.shown) != self.shown_versions

    def _refuse_changed(self, out: Any) -> None:
        """An error if the replay used such a weight: saved or not, it computes with it."""
        now = versions(self.shown)
        changed = {id(p) for p, a, b in zip(self.shown, now, self.shown_versions, strict=True) if a != b}
        for weight in _weights_of(leaves_of(out, Tensor)):
            if id(weight) in changed:
                raise RuntimeError(
                    f"{self.update.label(self.index)}: {self._named(weight)} of shape {tuple(weight.shape)} was "
                    "changed in place between forward and backward; change it after the backward, or give this "
                    "update policy=Keep()"
                )

    def _twin(self) -> Sequence[tuple[torch.Generator, torch.Generator]]:
        """Inside a CUDA graph: what to draw from. A twin has moved on after its first use, and cannot be put back."""
        if self.spent:
            raise RuntimeError(
                f"{self.update.label(self.index)} draws random numbers and is replayed twice in a captured step (two "
                "backward passes over one forward); give it policy=Keep(), or run two forwards"
            )
        self.spent = bool(self.twin)
        return self.twin

    def outside(self) -> list[Tensor]:
        """What `fn` reads and others hold: tensors, keywords and weights, also those that FSDP2 has gathered for it."""
        weights = (p for module in self.modules for p in module._parameters.values() if p is not None)
        return [*self.read, *weights]

    def must_finish(self) -> bool:
        """Whether a replay must come to the end of `fn`: FSDP2 acts there, and TorchScript cannot be left before."""
        return any(hasattr(m, "reshard") or isinstance(m, torch.jit.ScriptModule) for m in self.modules)

    def sharded(self) -> list[Any]:
        """The modules whose parameters FSDP2 holds in shards at this moment."""
        return [
            module
            for module in self.modules
            if hasattr(module, "reshard") and any(is_dtensor(p) for p in module.parameters())
        ]

    def _changed(self) -> str | None:
        """What has changed in place of all that `fn` reads, in words."""
        now = versions(self.read)
        if now == self.versions:
            return None
        tensor = next(t for t, a, b in zip(self.read, now, self.versions, strict=True) if a != b)
        return f"{self._named(tensor)} of shape {tuple(tensor.shape)}"

    def _named(self, tensor: Tensor) -> str:
        for key, value in self.update.kwargs.items():
            if any(leaf is tensor or _same_memory(leaf, tensor) for leaf in leaves_of(value, Tensor)):
                return f"its keyword {key!r}"
        for where, name, member in self.held if self.known is None else self.known.members:
            if member is tensor:
                for module in self.modules:
                    for kind, members in (("parameter", module._parameters), ("buffer", module._buffers)):
                        if members is where:
                            return f"the {kind} {name!r} of {type(module).__name__}"
                return f"the tensor {name!r}"
        return "a captured tensor"


def _same_memory(a: Tensor, b: Tensor) -> bool:
    strided = a.layout is b.layout is torch.strided
    return strided and a.numel() > 0 and a.data_ptr() == b.data_ptr()


def _weights_of(leaves: list[Tensor]) -> Iterator[Tensor]:
    """The leaves of the graph behind these tensors."""
    seen: set[Any] = set()
    todo = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            if (variable := getattr(node, "variable", None)) is not None:
                yield variable
            todo += [inner for inner, _ in node.next_functions if inner is not None]
