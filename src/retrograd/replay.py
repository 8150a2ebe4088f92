"""What one call of `fn` depended on besides its sources: noted in the forward, put back for the replay, and restored
after it (R3, R4, R7, R9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from .bindings import MISSING, Binding, Swapped, exchange, exchange_hooks, hooks_of, is_dtensor, put_back, without_graph
from .buffers import Before
from .capture import Capture, Rehearsal, current
from .frames import Remembered, running
from .joins import JOINS
from .reach import reach
from .streams import leaves_of, versions
from .surroundings import Surroundings, restore, state
from .update import Update

T = TypeVar("T")


class Call:
    """What one call of `fn` depended on besides its sources and the surroundings."""

    __slots__ = (
        "index",
        "update",
        "surroundings",
        "remembered",
        "random",
        "twin",
        "spent",
        "modules",
        "held",
        "hooks",
        "moved",
        "grads",
        "read",
        "versions",
        "shown",
        "shown_versions",
    )

    def __init__(self, index: int, update: Update, surroundings: Surroundings) -> None:
        self.index, self.update, self.surroundings = index, update, surroundings
        self.remembered: list[Remembered] = []
        # generators: whence, and whither the forward moved each, if it did (R4)
        self.random: list[tuple[torch.Generator, Any, int | None]] = []
        self.twin: list[tuple[torch.Generator, torch.Generator]] = []  # instead, inside a CUDA graph: see capture.py
        self.spent = False
        self.modules: list[nn.Module] = []  # that fn can be seen to use
        self.held: list[Binding] = []  # what their members, and variables, are bound to
        self.hooks: list[dict[str, Any] | None] = []  # and the hooks of each that has some
        self.moved: list[tuple[nn.Module, dict[str, Tensor | None]]] = []  # copies of buffers that the forward moved
        self.grads: list[tuple[Tensor, bool]] = []  # which of the tensors that fn reads need gradients
        self.read: list[Tensor] = []  # what must not change until the replay (R7),
        self.versions: list[int | None] = []  # and at which version it was
        self.shown: list[Tensor] = []  # weights of modules that fn shows without being made of them,
        self.shown_versions: list[int | None] = []  # likewise

    def forward(self, function: Callable[[], T], states: list[Any]) -> tuple[T, bool]:
        """Run `fn` for the first time and note what it depends on; also whether it can be replayed.

        `states` are those of the surroundings' generators if they are known, and are known afterwards.
        """
        reached = reach(self.update.fn, self.update.kwargs)
        if type(self.update.join) not in JOINS:
            reached.look(self.update.join, 5)
        if any(isinstance(module, LazyModuleMixin) for module in reached.modules):
            states.clear()  # its weights are not there yet, and will be drawn
            out = running(self.index, self.update, function, None)
            self.modules = reached.modules
            return out, False
        self.modules, self.held, self.shown = reached.modules, reached.members, reached.shown
        self.shown_versions = versions(self.shown)
        # Without their graphs: a tensor that fn left in a module holds the graph of the call before, and so its tape.
        tensors = [tensor if tensor.is_leaf else tensor.detach() for tensor in reached.tensors]
        self.read = tensors + reached.weights
        self.versions = versions(self.read)
        read = reached.tensors + reached.weights + reached.shown
        self.grads = [(tensor, tensor.requires_grad) for tensor in read if tensor.is_leaf]
        before = [Before(module, id(module) in reached.own) for module in reached.modules if module._buffers]

        out = self._first(function, reached.generators, states)

        if (changed := self._changed()) is not None:
            raise RuntimeError(
                f"{self.update.label(self.index)}: fn changes {changed} in place, and a replay would change it again; "
                "return what is new, hold it in a buffer, or give this update policy=Keep()"
            )
        # What else has a name is put back as these are, but not what fn itself binds anew: that may go.
        bound = [each for each in reached.variables if each[0].get(each[1], MISSING) is each[2]]
        self.held = self.held + [(where, name, without_graph(value)) for where, name, value in bound]
        if len(bound) < len(reached.variables):
            gone = {id(value) for _, _, value in reached.variables} - {id(value) for _, _, value in bound}
            kept = [tensor for tensor, found in zip(tensors, reached.tensors, strict=True) if id(found) not in gone]
            self.read = kept + reached.weights
            self.versions = versions(self.read)
        self.hooks = [hooks_of(m) if m._forward_hooks or m._forward_pre_hooks else None for m in reached.modules]
        return out, self._settle(before) if before else True

    def _first(self, function: Callable[[], T], own: list[torch.Generator], states: list[Any]) -> T:
        """Run `fn` and note which generators it moves: the default ones, or those that it holds (R4)."""
        recording, generators = current(), self.surroundings.generators + own
        if isinstance(recording, Capture):
            out = running(self.index, self.update, function, self.remembered, generators)
            self.twin = recording.twin()
            return out
        before = (states or self.surroundings.states()) + [state(generator) for generator in own]
        out = running(self.index, self.update, function, self.remembered, generators)
        states[:] = self.surroundings.states()
        after = states + [state(generator) for generator in own]
        for position, (generator, then, now) in enumerate(zip(generators, before, after, strict=True)):
            stood = then == now
            self.random.append((generator, then, None if stood else hash(now)))
            if stood and position < len(states):
                states[position] = then  # one state for all calls that leave it alone
        if isinstance(recording, Rehearsal):
            drawn = [(generator, then) for generator, then, whither in self.random if whither is not None]
            recording.note(self.update.label(self.index), drawn)
        return out

    def _settle(self, before: list[Before]) -> bool:
        """After the forward: note what the buffers were that it moved, and watch the others. False where no copy was
        taken of one that moved."""
        replayable = True
        for each in before:
            if moved := each.moved():
                copies = each.copies()
                self.moved.append((each.module, copies))
                self.held = [*self.held, *each.changed_marks()]
                replayable = replayable and moved <= copies.keys()
            elif each.own:
                buffers = [buffer for buffer, _, _ in each.buffers.values() if buffer is not None]
                self.read = self.read + buffers
                self.versions = self.versions + versions(buffers)
        return replayable

    def replay(self, function: Callable[[], T], stood: dict[int, bool] | None = None) -> T:
        """Run `fn` again as it ran, and leave no trace (R3). `stood` is what one pass knows of the generators.

        Called where the surroundings are those of the forward.
        """
        stood = {} if stood is None else stood
        if (changed := self._changed()) is not None:
            raise RuntimeError(
                f"{self.update.label(self.index)}: {changed} was changed in place between forward and backward; "
                "change it after the backward, or give this update policy=Keep()"
            )
        drawn = [(*each, state(each[0])) for each in self.random if each[2] is not None or self._elsewhere(each, stood)]
        twins = [(generator, twin, generator.graphsafe_get_state()) for generator, twin in self._twin()]
        frozen = [tensor for tensor, needed in self.grads if tensor.requires_grad != needed and tensor.is_leaf]
        swapped: Swapped = []
        try:
            for tensor in frozen:
                tensor.requires_grad_(not tensor.requires_grad)
            for module, hooks in zip(self.modules, self.hooks, strict=True):
                if hooks is not None or module._forward_hooks or module._forward_pre_hooks:
                    exchange_hooks(module, hooks, swapped)
            for where, name, then in self.held:
                if where.get(name, MISSING) is not then:  # another than in the forward: functional_call
                    exchange(where, name, then, swapped)
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
                raise RuntimeError(
                    f"{self.update.label(self.index)} draws other random numbers in its replay than in its forward (an "
                    "operator with dropout under Reverse(save=...), a fn that is not deterministic, or another thread "
                    "that draws from the same generator); give it policy=Keep(), or the thread a generator of its own"
                )
            if self.shown_changed():
                self._refuse_changed(out)
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

    def _twin(self) -> list[tuple[torch.Generator, torch.Generator]]:
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
        for where, name, member in self.held:
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
