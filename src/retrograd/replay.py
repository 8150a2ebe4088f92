"""What one call of `fn` depended on besides its sources: captured in the forward, put back for the replay, and restored
after it (R3, R4, R5, R9). Also what a `fn` may ask about itself: `phase` and `remember` (R10).

A `Surroundings` is the global state a whole program runs in; a `Call` is what a single update adds to it. Autograd is
not mentioned here: see engine.py.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .streams import leaves_of
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


@contextmanager
def running(index: int, update: Update, remembered: list[Any] | None, *, replaying: bool = False) -> Iterator[None]:
    """Say, to `phase` and `remember`, which `fn` runs; and in the traceback, if it fails."""
    _frames.stack.append(_Frame(Phase(index, update.target, replaying), remembered))
    try:
        yield
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


class Surroundings:
    """The global state that a program runs in: autocast, the attention backends allowed, the random generators."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        devices = set(devices)
        kinds = sorted({"cpu"} | {device.type for device in devices})
        self.autocast = _autocast(kinds)
        self.attention = _attention()
        self.generators = _generators(devices)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run the program as it is called, with autocast's weight cache off (R5)."""
        with ExitStack() as stack:
            for kind, dtype in self.autocast.items():
                if dtype is not None:
                    stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Run as the forward ran, whatever surrounds the backward."""
        attention = _attention()
        now = _autocast(self.autocast)
        with ExitStack() as stack:
            for kind, dtype in self.autocast.items():
                if dtype is not None:
                    stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
                elif now[kind] is not None:
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if attention != self.attention:
                stack.callback(_allow_attention, attention)
                _allow_attention(self.attention)
            yield


class Call:
    """What one call of `fn` depended on besides its sources and the surroundings."""

    __slots__ = ("index", "update", "surroundings", "remembered", "random", "modules", "buffers", "watched", "lost")

    def __init__(self, index: int, update: Update, surroundings: Surroundings) -> None:
        self.index, self.update, self.surroundings = index, update, surroundings
        self.remembered: list[Any] = []
        self.random: list[tuple[Any, Any]] = []  # (generator, its state before the forward), where it moved (R4)
        self.modules: list[tuple[nn.Module, bool, list[tuple[str, nn.Parameter]]]] = []  # training flag and parameters
        self.buffers: list[
            tuple[nn.Module, dict[str, Tensor | None]]
        ] = []  # as they were, where the forward moved them
        self.watched: list[tuple[str, Tensor, int | None]] = []  # what must not change until the replay (R7)
        self.lost = False  # a buffer changed that was not copied in time: this call cannot be replayed

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run `fn` for the first time and note what it depended on."""
        modules, reached, direct = reach(self.update.fn)
        reached += [(f"keyword {k!r}", t) for k, v in self.update.kwargs.items() for t in leaves_of(v, Tensor)]
        copies: list[tuple[nn.Module, dict[str, tuple[Tensor | None, int | None, Tensor | None]]]] = []
        for module in modules:
            parameters = [(name, p) for name, p in module._parameters.items() if p is not None]
            self.modules.append((module, module.training, parameters))
            if direct:
                reached += [(f"parameter {name!r}", p) for name, p in parameters]
            if module._buffers:
                copy = module not in _steady
                copies.append((module, {name: _snapshot(b, copy) for name, b in module._buffers.items()}))
        self.watched = [(label, tensor, version(tensor)) for label, tensor in reached]
        generators = self.surroundings.generators + leaves_of(dict(self.update.kwargs), torch.Generator)
        before = [_state(generator) for generator in generators]

        with running(self.index, self.update, self.remembered):
            yield

        for generator, state in zip(generators, before, strict=True):
            if not _same(_state(generator), state):
                self.random.append((generator, state))
        for label, tensor, seen in self.watched:
            if version(tensor) != seen:
                raise RuntimeError(
                    f"{self.update.label(self.index)}: fn changes its {label} in place, and a replay would change it "
                    "again; return what is new, hold it in a buffer, or give this update policy=Keep()"
                )
        for module, entries in copies:
            self._settle(module, entries, direct)

    def _settle(self, module: nn.Module, entries: dict[str, Any], direct: bool) -> None:
        """Keep the copies of a module whose buffers moved; remember those whose buffers do not."""
        moved = any(
            module._buffers.get(name) is not buffer or (buffer is not None and version(buffer) != seen)
            for name, (buffer, seen, _) in entries.items()
        )
        if not moved:
            _steady.add(module)
            if direct:
                self.watched += [
                    (f"buffer {name!r}", b, seen) for name, (b, seen, _) in entries.items() if b is not None
                ]
        elif module in _steady:
            _steady.discard(module)
            self.lost = True
        else:
            self.buffers.append((module, {name: copy for name, (_, _, copy) in entries.items()}))

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Run `fn` again as it ran, and leave no trace (R3)."""
        for label, tensor, seen in self.watched:
            if version(tensor) != seen:
                raise RuntimeError(
                    f"{self.update.label(self.index)}: {label} of shape {tuple(tensor.shape)} was changed in place "
                    f"between the forward and the backward (it is at version {version(tensor)}, expected {seen}); "
                    "change it after the backward, or give this update policy=Keep()"
                )
        generators = self.surroundings.generators + [g for g, _ in self.random if g not in self.surroundings.generators]
        now = [_state(generator) for generator in generators]
        swapped: list[tuple[dict[str, Any], str, Tensor | None]] = []
        flipped: list[nn.Module] = []
        try:
            for module, training, parameters in self.modules:
                if module.training != training:
                    flipped.append(module)
                    module.training = training
                for name, parameter in parameters:
                    # Other weights than in the forward (functional_call). DTensors are left to FSDP2, which exchanges
                    # sharded and whole parameters by itself.
                    current = module._parameters.get(name)
                    if current is not parameter and not _is_dtensor(current) and not _is_dtensor(parameter):
                        swapped.append((module._parameters, name, current))
                        module._parameters[name] = parameter
            for module, buffers in self.buffers:
                for name, buffer in buffers.items():
                    swapped.append((module._buffers, name, module._buffers.get(name)))
                    module._buffers[name] = None if buffer is None else buffer.clone()
            for generator, state in self.random:
                _restore(generator, state)
            with self.surroundings.replay(), running(self.index, self.update, self.remembered, replaying=True):
                yield
        finally:
            for generator, state in zip(generators, now, strict=True):
                if not _same(_state(generator), state):
                    _restore(generator, state)
            for where, name, tensor in reversed(swapped):
                where[name] = tensor
            for module in flipped:
                module.training = not module.training


# Modules whose buffers have not moved in a call: theirs are not copied beforehand. A wrong guess costs memory once (see
# Call.lost), never a wrong gradient.
_steady: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def reach(fn: Any) -> tuple[list[nn.Module], list[tuple[str, Tensor]], bool]:
    """The modules and tensors that a callable can be seen to use, and whether it is itself a module.

    A module is searched whole. A function is searched through its closure, its globals, its partial arguments and the
    object it is bound to; what it finds elsewhere (in attributes of other objects) stays unseen.
    """
    modules: list[nn.Module] = []
    if isinstance(fn, nn.Module):
        _walk(fn, modules)
        return modules, [], True
    found: list[tuple[str, Tensor]] = []
    seen: set[int] = set()

    def look(name: str, value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            _walk(value, modules)
        elif isinstance(value, Tensor):
            found.append((f"captured tensor {name!r}", value))
        elif isinstance(value, (list, tuple)):
            for item in value:
                look(name, item)
        elif isinstance(value, dict):
            for item in value.values():
                look(name, item)
        elif isinstance(value, functools.partial):
            look(name, (value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            look(name, (value.__self__, value.__func__))
        elif isinstance(value, types.FunctionType):
            if not value.__module__ or value.__module__.split(".")[0] == "torch":
                look(name, getattr(value, "__wrapped__", None))
                return
            for cell_name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    look(cell_name, cell.cell_contents)
                except ValueError:  # a cell that is still empty
                    continue
            for global_name in value.__code__.co_names:
                if isinstance(value.__globals__.get(global_name), (nn.Module, Tensor, types.FunctionType)):
                    look(global_name, value.__globals__[global_name])
            look(name, getattr(value, "__wrapped__", None))
        elif value is fn and hasattr(value, "__dict__"):  # a callable object
            look(name, vars(value))

    look("fn", fn)
    return modules, found, False


@contextmanager
def no_random_numbers(what: str, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Refuse a program that draws random numbers: they would be other numbers than those of its forward."""
    generators = _generators({tensor.device for tensor in tensors})
    before = [_state(generator) for generator in generators]
    yield
    if not all(_same(_state(generator), state) for generator, state in zip(generators, before, strict=True)):
        raise RuntimeError(
            f"{what}: an update draws random numbers (dropout?), which are not those of the forward; "
            "use eval mode in both directions"
        )


def version(tensor: Tensor) -> int | None:
    """The version counter; None for inference tensors, which have none and cannot be saved for a backward."""
    return None if tensor.is_inference() else tensor._version


def _walk(module: nn.Module, found: list[nn.Module]) -> None:
    # `_modules`, `_parameters` and `_buffers` instead of the public generators: ten times faster, and parameters can
    # be exchanged for plain tensors. tests/test_replay.py fails when they change.
    found.append(module)
    for child in module._modules.values():
        if child is not None:
            _walk(child, found)


def _snapshot(buffer: Tensor | None, copy: bool) -> tuple[Tensor | None, int | None, Tensor | None]:
    if buffer is None:
        return None, None, None
    return buffer, version(buffer), buffer.detach().clone() if copy else None


def _is_dtensor(tensor: Tensor | None) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)  # by name: the import is slow


def _autocast(kinds: Iterable[str]) -> dict[str, torch.dtype | None]:
    """The dtype that autocast casts to on each kind of device; None where it is off or unknown."""
    return {
        kind: torch.get_autocast_dtype(kind)
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        else None
        for kind in kinds
    }


def _attention() -> tuple[bool, bool, bool, bool]:
    """Which backends scaled_dot_product_attention may use: each saves other tensors."""
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()


def _allow_attention(allowed: tuple[bool, bool, bool, bool]) -> None:
    cuda = torch.backends.cuda
    flash, efficient, math, cudnn = allowed
    cuda.enable_flash_sdp(flash)
    cuda.enable_mem_efficient_sdp(efficient)
    cuda.enable_math_sdp(math)
    cuda.enable_cudnn_sdp(cudnn)


def _generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The default generators of the CPU and of every accelerator in play, the current one included."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        indices = {device.index for device in devices if device.type == "cuda"} | {torch.cuda.current_device()}
        found += [torch.cuda.default_generators[index] for index in sorted(i for i in indices if i is not None)]
    for device in devices:
        if device.type not in ("cpu", "cuda", "meta"):
            found += getattr(torch.get_device_module(device), "default_generators", ())
    return found


def _state(generator: torch.Generator) -> Any:
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()  # two integers on the host: no synchronisation
    return generator.get_state()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return a == b
    return torch.equal(a.view(torch.int64), b.view(torch.int64)) if a.numel() % 8 == 0 else torch.equal(a, b)


def _restore(generator: torch.Generator, state: Any) -> None:
    if isinstance(state, tuple):
        seed, offset = state
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        generator.set_offset(offset)
    else:
        generator.set_state(state)
