"""What one call of `fn` depended on besides its sources: noted in the forward, put back for the replay, and restored
after it (R3, R4, R7, R9). Also what a `fn` may ask about itself: `phase` and `remember` (R10).

Autograd is not mentioned here: see engine.py.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .streams import leaves_of, version, versions
from .surroundings import Surroundings, restore, same, state
from .update import Update

T = TypeVar("T")


@dataclass(frozen=True)
class Phase:
    """Where a `fn` is being run: the index of its update, its target, and whether this is a replay."""

    update: int
    target: str
    replaying: bool


class _Frame:
    """One running `fn`. `remembered` is None where there will be no replay."""

    __slots__ = ("phase", "remembered", "recalled")

    def __init__(self, phase: Phase, remembered: list[Any] | None) -> None:
        self.phase, self.remembered, self.recalled = phase, remembered, 0

    def recall(self) -> Any:
        assert self.remembered is not None
        if self.recalled == len(self.remembered):
            raise RuntimeError(
                f"update {self.phase.update} (target {self.phase.target!r}) calls remember() more often in its replay "
                f"than in its forward ({self.recalled} times): fn is not deterministic"
            )
        self.recalled += 1
        return self.remembered[self.recalled - 1]


class _Frames(threading.local):
    """The running `fn`s of this thread, outermost first: a reversible network may run inside a `fn` of another."""

    def __init__(self) -> None:
        self.stack: list[_Frame] = []


_frames = _Frames()


def running(
    index: int, update: Update, function: Callable[[], T], remembered: list[Any] | None, replaying: bool = False
) -> T:
    """Call `function`, and say to `phase` and `remember` which `fn` it is; also in the traceback, if it fails."""
    _frames.stack.append(_Frame(Phase(index, update.target, replaying), remembered))
    try:
        return function()
    except Exception as error:
        error.add_note(f"retrograd: in {update.label(index)}, {'replayed in the backward' if replaying else 'forward'}")
        raise
    finally:
        _frames.stack.pop()


def phase() -> Phase | None:
    """Which update runs, and whether this is its forward or its replay. None outside a program.

    >>> import retrograd as rg
    >>> def fn(b):
    ...     print(rg.phase())
    ...     return b
    >>> _ = rg.run([rg.Update("a", fn, "b")], {"a": torch.zeros(1), "b": torch.ones(1)})
    Phase(update=0, target='a', replaying=False)
    """
    return _frames.stack[-1].phase if _frames.stack else None


def remember(compute: Callable[[], T]) -> T:
    """Run `compute` in the forward and return the very same value in the replay.

    For discrete choices (hash buckets, expert routing, top-k): a reconstructed input differs in its last bits, and a
    choice taken twice could differ with it. `compute` runs without grad; what it returns is stored until the backward.

    >>> import retrograd as rg
    >>> def route(x):
    ...     expert = rg.remember(lambda: x.argmax(-1))
    ...     return x * torch.nn.functional.one_hot(expert, x.shape[-1])
    >>> rg.run([rg.Update("a", route, "b")], {"a": torch.zeros(2), "b": torch.tensor([1.0, 3.0])})["a"]
    tensor([0., 3.])
    """
    frames = [frame for frame in _frames.stack if frame.remembered is not None]
    # The outermost replay decides: what runs inside it, forward or backward, must repeat what ran then.
    recalled = [frame.recall() for frame in frames if frame.phase.replaying]
    if recalled:
        value = recalled[0]
    else:
        with torch.no_grad():
            value = compute()
    for frame in frames:
        if not frame.phase.replaying:
            frame.remembered.append(value)  # type: ignore[union-attr]
    return value


class Call:
    """What one call of `fn` depended on besides its sources and the surroundings."""

    __slots__ = ("index", "update", "surroundings", "remembered", "random", "modules", "buffers", "watched", "versions")

    def __init__(self, index: int, update: Update, surroundings: Surroundings) -> None:
        self.index, self.update, self.surroundings = index, update, surroundings
        self.remembered: list[Any] = []
        self.random: list[tuple[torch.Generator, Any]] = []  # generators the forward moved, and from which state (R4)
        self.modules: list[tuple[nn.Module, bool, dict[str, Any]]] = []  # their training flags and parameters
        self.buffers: list[tuple[nn.Module, dict[str, Tensor | None]]] = []  # copies from before, where they moved
        self.watched: list[Tensor] = []  # what must not change until the replay (R7),
        self.versions: list[int | None] = []  # and at which version it was

    def forward(self, function: Callable[[], T]) -> tuple[T, bool]:
        """Run `fn` for the first time and note what it depends on; also whether a replay will be possible."""
        modules, captured, direct = reach(self.update.fn)
        self.modules = [(module, module.training, module._parameters.copy()) for module in modules]
        self.watched = captured + (leaves_of(self.update.kwargs, Tensor) if self.update.kwargs else [])
        if direct:
            self.watched += [p for module in modules for p in module._parameters.values() if p is not None]
        self.versions = versions(self.watched)
        before = [(module, _snapshot(module)) for module in modules if module._buffers]
        generators = self.surroundings.generators
        if self.update.kwargs:
            generators = generators + leaves_of(self.update.kwargs, torch.Generator)
        states = [state(generator) for generator in generators]

        out = running(self.index, self.update, function, self.remembered)

        self.random = [(g, seen) for g, seen in zip(generators, states, strict=True) if not same(state(g), seen)]
        if (changed := self._changed()) is not None:
            raise RuntimeError(
                f"{self.update.label(self.index)}: fn changes {changed} in place, and a replay would change it again; "
                "return what is new, hold it in a buffer, or give this update policy=Keep()"
            )
        replayable = [self._settle(module, buffers, direct) for module, buffers in before]
        return out, all(replayable)

    def _settle(
        self, module: nn.Module, before: dict[str, tuple[Tensor, int | None, Tensor | None] | None], direct: bool
    ) -> bool:
        """After the forward: keep the copies of buffers that moved. False where they moved and no copy was taken."""
        moved = any(
            module._buffers.get(name) is not (seen and seen[0]) or (seen is not None and version(seen[0]) != seen[1])
            for name, seen in before.items()
        )
        if moved and module not in _steady:
            self.buffers.append((module, {name: seen and seen[2] for name, seen in before.items()}))
        elif moved:
            _steady.discard(module)
            return False
        else:
            _steady.add(module)
            if direct:
                still = [seen[0] for seen in before.values() if seen is not None]
                self.watched = self.watched + still
                self.versions = self.versions + versions(still)
        return True

    def replay(self, function: Callable[[], T]) -> T:
        """Run `fn` again as it ran, and leave no trace (R3)."""
        if (changed := self._changed()) is not None:
            raise RuntimeError(
                f"{self.update.label(self.index)}: {changed} was changed in place between forward and backward; "
                "change it after the backward, or give this update policy=Keep()"
            )
        now = [(generator, state(generator)) for generator, _ in self.random]
        flipped: list[nn.Module] = []
        swapped: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for module, training, parameters in self.modules:
                if module.training != training:
                    flipped.append(module)
                    module.training = training
                for name, parameter in parameters.items():
                    current = module._parameters.get(name)
                    # Other weights than in the forward (functional_call). DTensors are left to FSDP2, which exchanges
                    # sharded and whole parameters by itself.
                    if current is not parameter and not _is_dtensor(current) and not _is_dtensor(parameter):
                        swapped.append((module._parameters, name, current))
                        module._parameters[name] = parameter
            for module, buffers in self.buffers:
                for name, buffer in buffers.items():
                    swapped.append((module._buffers, name, module._buffers.get(name)))
                    module._buffers[name] = None if buffer is None else buffer.clone()
            for generator, seen in self.random:
                restore(generator, seen)
            return self.surroundings.run(
                lambda: running(self.index, self.update, function, self.remembered, replaying=True)
            )
        finally:
            for generator, seen in now:
                restore(generator, seen)
            for where, name, tensor in reversed(swapped):
                where[name] = tensor
            for module in flipped:
                module.training = not module.training

    def _changed(self) -> str | None:
        """What has changed in place of all that `fn` reads, in words."""
        now = versions(self.watched)
        if now == self.versions:
            return None
        tensor = next(t for t, a, b in zip(self.watched, now, self.versions, strict=True) if a != b)
        return f"{self._named(tensor)} of shape {tuple(tensor.shape)}"

    def _named(self, tensor: Tensor) -> str:
        for key, value in self.update.kwargs.items():
            if any(leaf is tensor for leaf in leaves_of(value, Tensor)):
                return f"its keyword {key!r}"
        for module, _, parameters in self.modules:
            for kind, members in (("parameter", parameters), ("buffer", module._buffers)):
                for name, member in members.items():
                    if member is tensor:
                        return f"the {kind} {name!r} of {type(module).__name__}"
        return "a captured tensor"


# Modules whose buffers have not moved in a call: theirs are not copied beforehand. A wrong guess costs memory once (see
# Call._settle), never a wrong gradient.
_steady: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def reach(fn: Any) -> tuple[list[nn.Module], list[Tensor], bool]:
    """The modules and tensors that a callable can be seen to use, and whether it is itself a module.

    A module is searched whole. A function is searched through its closure, its globals, its partial arguments and the
    object it is bound to; what it finds elsewhere (in attributes of other objects) stays unseen.
    """
    modules: list[nn.Module] = []
    if isinstance(fn, nn.Module):
        _walk(fn, modules)
        return modules, [], True
    found: list[Tensor] = []
    seen: set[int] = set()

    def look(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            _walk(value, modules)
        elif isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                look(item)
        elif isinstance(value, dict):
            for item in value.values():
                look(item)
        elif isinstance(value, functools.partial):
            look((value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            look((value.__self__, value.__func__))
        elif isinstance(value, types.FunctionType):
            if not value.__module__ or value.__module__.split(".")[0] == "torch":
                look(getattr(value, "__wrapped__", None))
                return
            for cell in value.__closure__ or ():
                try:
                    look(cell.cell_contents)
                except ValueError:  # a cell that is still empty
                    continue
            for name in value.__code__.co_names:
                if isinstance(value.__globals__.get(name), (nn.Module, Tensor, types.FunctionType)):
                    look(value.__globals__[name])
            look(getattr(value, "__wrapped__", None))
        elif value is fn and hasattr(value, "__dict__"):  # a callable object
            look(vars(value))

    look(fn)
    return modules, found, False


def _walk(module: nn.Module, found: list[nn.Module]) -> None:
    # `_modules`, `_parameters` and `_buffers` instead of the public generators: ten times faster, and parameters can
    # be exchanged for plain tensors. tests/test_replay.py fails when they change.
    found.append(module)
    for child in module._modules.values():
        if child is not None:
            _walk(child, found)


def _snapshot(module: nn.Module) -> dict[str, tuple[Tensor, int | None, Tensor | None] | None]:
    """Each buffer of one module, its version, and a copy unless the module is known to leave its buffers alone."""
    copy = module not in _steady
    return {
        name: None if buffer is None else (buffer, version(buffer), buffer.detach().clone() if copy else None)
        for name, buffer in module._buffers.items()
    }


def _is_dtensor(tensor: Tensor | None) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)  # by name: the import is slow
