"""What one call of `fn` depended on besides its sources: noted in the forward, put back for the replay, and restored
after it (R3, R4, R7, R9).

Autograd is not mentioned here: see engine.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from .capture import Capture, Rehearsal, current
from .frames import running
from .reach import reach
from .streams import leaves_of, version, versions
from .surroundings import Surroundings, digest, restore, same, state
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
        "modes",
        "held",
        "moved",
        "grads",
        "read",
        "versions",
    )

    def __init__(self, index: int, update: Update, surroundings: Surroundings) -> None:
        self.index, self.update, self.surroundings = index, update, surroundings
        self.remembered: list[Any] = []
        self.random: list[tuple[torch.Generator, Any, int]] = []  # generators the forward moved: whence, whither (R4)
        self.twin: list[tuple[torch.Generator, torch.Generator]] = []  # instead, inside a CUDA graph: see capture.py
        self.spent = False
        self.modes: list[tuple[nn.Module, bool]] = []  # the modules of fn and their training flags
        self.held: list[tuple[Any, str, Any]] = []  # their parameters and buffers, and variables: where, name, what
        self.moved: list[tuple[nn.Module, dict[str, Tensor | None]]] = []  # copies of buffers that the forward moved
        self.grads: list[tuple[Tensor, bool]] = []  # which of the tensors that fn reads need gradients
        self.read: list[Tensor] = []  # what must not change until the replay (R7),
        self.versions: list[int | None] = []  # and at which version it was

    def forward(self, function: Callable[[], T], states: list[Any]) -> tuple[T, bool]:
        """Run `fn` for the first time and note what it depends on; also whether it can be replayed.

        `states` are those of the surroundings' generators if they are known, and are known afterwards.
        """
        reached = reach(self.update.fn, self.update.kwargs)
        if any(isinstance(module, LazyModuleMixin) for module in reached.modules):
            states.clear()  # its weights are not there yet, and will be drawn
            return running(self.index, self.update, function, None), False
        self.modes = [(module, module.training) for module in reached.modules]
        self.held = [
            (where, name, tensor)
            for module in reached.modules
            for where in (module._parameters, module._buffers)
            if isinstance(where, dict)  # not those of TorchScript, which cannot be exchanged
            for name, tensor in where.items()
        ]
        # Without their graphs: a tensor that fn left in a module holds the graph of the call before, and so its tape.
        tensors = [tensor if tensor.is_leaf else tensor.detach() for tensor in reached.tensors]
        parameters = [p for m in reached.modules for p in m._parameters.values() if p is not None]
        self.grads = [(tensor, tensor.requires_grad) for tensor in reached.tensors + parameters if tensor.is_leaf]
        # A closure may show more modules than fn reads, and those may well change: watch only what fn itself is.
        if len(reached.own) < len(reached.modules):
            parameters = [p for m in reached.own for p in m._parameters.values() if p is not None]
        self.read = tensors + parameters
        self.versions = versions(self.read)
        before = [(module, _snapshot(module)) for module in reached.modules if module._buffers]

        out = self._first(function, reached.generators, states)

        if (changed := self._changed()) is not None:
            raise RuntimeError(
                f"{self.update.label(self.index)}: fn changes {changed} in place, and a replay would change it again; "
                "return what is new, hold it in a buffer, or give this update policy=Keep()"
            )
        # Other tensors with a name are put back as parameters are, but not what fn itself binds anew.
        self.held += [(where, name, tensor) for where, name, tensor in reached.variables if where.get(name) is tensor]
        if not before:
            return out, True
        own = {id(module) for module in reached.own}
        replayable = [self._settle(module, buffers, id(module) in own) for module, buffers in before]
        return out, all(replayable)

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
        changes = zip(generators, before, after, strict=True)
        self.random = [(g, then, digest(now)) for g, then, now in changes if not same(then, now)]
        if isinstance(recording, Rehearsal):
            recording.note(self.update.label(self.index), [(generator, then) for generator, then, _ in self.random])
        return out

    def _settle(self, module: nn.Module, before: dict[str, Any], direct: bool) -> bool:
        """After the forward: keep the copies of buffers that moved. False where they moved and no copy was taken."""
        still, restless = _still[module.training], _restless[module.training]
        changed = any(
            module._buffers.get(name) is not buffer or (buffer is not None and version(buffer) != seen)
            for name, (buffer, seen, _) in before.items()
        )
        if not changed and module not in still and module not in restless and _differ(before):
            restless.add(module)
        if changed or module in restless:
            self.moved.append((module, {name: copy for name, (_, _, copy) in before.items()}))
            if module in still:
                still.discard(module)
                return False
        else:
            still.add(module)
            if direct:
                buffers = [buffer for buffer, _, _ in before.values() if buffer is not None]
                self.read = self.read + buffers
                self.versions = self.versions + versions(buffers)
        return True

    def replay(self, function: Callable[[], T]) -> T:
        """Run `fn` again as it ran, and leave no trace (R3)."""
        if (changed := self._changed()) is not None:
            raise RuntimeError(
                f"{self.update.label(self.index)}: {changed} was changed in place between forward and backward; "
                "change it after the backward, or give this update policy=Keep()"
            )
        now: list[tuple[torch.Generator, Any]] = [(generator, state(generator)) for generator, _, _ in self.random]
        now += [(generator, generator.graphsafe_get_state()) for generator, _ in self._twin()]
        flipped: list[nn.Module] = []
        frozen = [tensor for tensor, needed in self.grads if tensor.requires_grad != needed and tensor.is_leaf]
        swapped: list[tuple[Any, str, Any]] = []
        try:
            for tensor in frozen:
                tensor.requires_grad_(not tensor.requires_grad)
            for module, training in self.modes:
                if module.training != training:
                    flipped.append(module)
                    module.training = training
            for where, name, then in self.held:
                if where.get(name) is not then:  # another than in the forward: functional_call
                    _exchange(where, name, then, swapped)
            for module, copies in self.moved:
                for name, copy in copies.items():
                    _exchange(module._buffers, name, None if copy is None else copy.clone(), swapped)
            for generator, then, _ in self.random:
                restore(generator, then)
            for generator, twin in self.twin:
                restore(generator, twin)
            out = self.surroundings.run(
                lambda: running(self.index, self.update, function, self.remembered, (), replaying=True)
            )
            if any(
                digest(drawn := state(generator)) != after and not same(drawn, then)  # none at all is fine
                for generator, then, after in self.random
            ):
                raise RuntimeError(
                    f"{self.update.label(self.index)} draws other random numbers in its replay than in its forward (an "
                    "operator with dropout under Reverse(save=...), a fn that is not deterministic, or another thread "
                    "that draws from the same generator); give it policy=Keep(), or the thread a generator of its own"
                )
            return out
        finally:
            for generator, seen in now:
                restore(generator, seen)
            for where, name, tensor in reversed(swapped):
                where[name] = tensor
            for module in flipped:
                module.training = not module.training
            for tensor in frozen:
                tensor.requires_grad_(not tensor.requires_grad)

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
        weights = (p for module, _ in self.modes for p in module._parameters.values() if p is not None)
        return [*self.read, *weights]

    def sharding(self) -> list[Any]:
        """The modules whose parameters FSDP2 gathers and shards."""
        return [module for module, _ in self.modes if hasattr(module, "reshard")]

    def sharded(self) -> list[Any]:
        """Those whose parameters are shards at this moment."""
        return [module for module in self.sharding() if any(_is_dtensor(p) for p in module.parameters())]

    def _changed(self) -> str | None:
        """What has changed in place of all that `fn` reads, in words."""
        now = versions(self.read)
        if now == self.versions:
            return None
        tensor = next(t for t, a, b in zip(self.read, now, self.versions, strict=True) if a != b)
        return f"{self._named(tensor)} of shape {tuple(tensor.shape)}"

    def _named(self, tensor: Tensor) -> str:
        for key, value in self.update.kwargs.items():
            if any(leaf is tensor or leaf.data_ptr() == tensor.data_ptr() for leaf in leaves_of(value, Tensor)):
                return f"its keyword {key!r}"
        for where, name, member in self.held:
            if member is tensor:
                for module, _ in self.modes:
                    for kind, members in (("parameter", module._parameters), ("buffer", module._buffers)):
                        if members is where:
                            return f"the {kind} {name!r} of {type(module).__name__}"
                return f"the tensor {name!r}"
        return "a captured tensor"


# Modules whose buffers did not move in their last call, in training and not: theirs are not copied beforehand. A wrong
# guess costs memory once (see Call._settle), never a wrong gradient.
_still: dict[bool, weakref.WeakSet[nn.Module]] = {True: weakref.WeakSet(), False: weakref.WeakSet()}


# Modules whose buffers move without a new version, in training and not: torch's batch norm does that to the statistics
# it is given. Found by comparing values, once for each module.
_restless: dict[bool, weakref.WeakSet[nn.Module]] = {True: weakref.WeakSet(), False: weakref.WeakSet()}


def _exchange(where: Any, name: str, other: Any, swapped: list[tuple[Any, str, Any]]) -> None:
    """Bind a name to what it was bound to, and note what it is bound to now."""
    current = where.get(name)
    # DTensors are left to FSDP2, which exchanges sharded and whole parameters by itself.
    if not _is_dtensor(current) and not _is_dtensor(other):
        swapped.append((where, name, current))
        where[name] = other


def _snapshot(module: nn.Module) -> dict[str, tuple[Tensor | None, int | None, Tensor | None]]:
    """Each buffer of one module, its version, and a copy unless the module is known to leave its buffers alone."""
    copy = module not in _still[module.training]
    return {
        name: (None, None, None)
        if buffer is None
        else (buffer, version(buffer), buffer.detach().clone() if copy else None)
        for name, buffer in module._buffers.items()
    }


def _differ(before: dict[str, Any]) -> bool:
    """Whether a buffer differs from its copy. (Fake tensors have no values: there, versions must do.)"""
    return any(
        not torch.equal(buffer, copy)
        for buffer, _, copy in before.values()
        if copy is not None and type(copy).__name__ != "FakeTensor"
    )


def _is_dtensor(tensor: Tensor | None) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)  # by name: the import is slow
