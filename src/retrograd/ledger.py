"""What is alive during a training step, to the byte, and what each storage is for.

A dispatch mode sees every tensor that an operator makes, and a weak reference tells when its storage dies. `LiveBytes`
counts; `Ledger` also tells weights, gradients, streams and saved tensors apart. measure.py and plan.py run a step
under it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from .streams import leaves_of
from .tape import _current_pass
from .update import Step


class _Storage:
    """What is known of one living storage: its bytes, how often it is in each role (see `Ledger.kinds`), and whether an
    update has saved it."""

    __slots__ = ("size", "roles", "of_update")

    def __init__(self, size: int, roles: int = 0) -> None:
        self.size, self.roles, self.of_update = size, [0] * roles, False


class LiveBytes(TorchDispatchMode):
    """Count the bytes of storages made inside the `with` block and still alive: `live` now, `peak` at most.

    What existed before (weights, inputs) is not counted, nor is what an operator allocates and frees by itself.

    >>> with LiveBytes() as memory:
    ...     x = torch.zeros(256)
    ...     y = x + 1
    ...     del x
    >>> memory.peak, memory.live
    (2048, 1024)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[weakref.ref[torch.UntypedStorage], _Storage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in leaves_of([args, kwargs or {}], Tensor):
            self._seen(tensor, made=False)  # from before, unless it is known already
        out = func(*args, **(kwargs or {}))
        for tensor in leaves_of([out], Tensor):
            self._seen(tensor, made=True)
        self.peak = max(self.peak, self.live)
        return out

    def _seen(self, tensor: Tensor, *, made: bool) -> _Storage:
        if tensor.layout is not torch.strided:
            return _Storage(0)  # sparse: it has no storage, and its parts are tensors of their own
        storage = tensor.untyped_storage()
        key = weakref.ref(storage, self._freed)
        known = self._known.get(key)  # references to one living storage are equal
        if known is None:
            known = self._known[key] = self._new(tensor, storage.nbytes() if made else 0)
            self.live += known.size
        return known

    def _new(self, tensor: Tensor, size: int) -> _Storage:
        return _Storage(size)

    def _freed(self, key: weakref.ref[torch.UntypedStorage]) -> None:
        if (storage := self._known.pop(key, None)) is not None:
            self.live -= storage.size


class Ledger(LiveBytes):
    """`LiveBytes` that knows what each storage is for. Bytes on other devices count as none.

    A storage in several roles counts as the first of `kinds`. Only what a stream is now counts as a stream: what it
    was, if kept for the backward, is a saved tensor. `rounding`: what the allocator rounds each storage up to.
    """

    kinds = ("weights", "gradients", "streams", "saved", "rest")
    _weights, _gradients, _streamed, _saved = range(4)  # the first of them, as roles of a storage

    def __init__(self, device: torch.device, rounding: int = 1) -> None:
        super().__init__()
        self.device, self.rounding = device, rounding
        self.split = [0] * len(self.kinds)
        self.at_peak = (0,) * len(self.kinds)
        self.timeline: list[tuple[int, ...]] = []
        self.updates: dict[Hashable, UpdateCost] = {}
        self.backward_at = 0
        self._running: list[UpdateCost] = []  # a program may run inside an update of another
        self._streams: dict[Hashable, list[_Storage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.peak
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.peak > before:
            self.at_peak = tuple(self.split)
        for row in self._running:
            row.peak = max(row.peak, self.live)
        self.timeline.append(tuple(self.split))
        return out

    def hold(self, tensors: Iterable[Tensor], kind: str | None = None) -> None:
        """Count tensors that were there before."""
        for tensor in tensors:
            storage = self._seen(tensor, made=True)
            if kind is not None:
                self._role(storage, self.kinds.index(kind), 1)
        self.peak, self.at_peak = self.live, tuple(self.split)

    def note_gradient(self, tensor: Tensor) -> None:
        """The hook of a leaf whose `.grad` is there now."""
        if tensor.grad is not None:
            self._role(self._seen(tensor.grad, made=True), self._gradients, 1)
            self.timeline.append(tuple(self.split))

    def note_stream(self, key: Hashable, leaves: Sequence[Tensor]) -> None:
        """What a stream is from now on."""
        before, now = self._streams.get(key, []), [self._seen(leaf, made=False) for leaf in leaves]
        for storage in now:
            self._role(storage, self._streamed, 1)
        for storage in before:
            self._role(storage, self._streamed, -1)
        self._streams[key] = now

    def note_saved(self, tensor: Tensor) -> None:
        """Autograd saves this tensor. It counts as saved until it dies."""
        storage = self._seen(tensor, made=False)
        if not storage.roles or storage.roles[self._weights]:
            return  # a weight, or on another device
        if self._running and not storage.of_update and _current_pass() == -1:
            self._running[-1].saved += storage.size
            storage.of_update = True
        self._role(storage, self._saved, 1)

    def note_call(self, step: Step) -> None:
        """An update begins."""
        update, replayed = step.update, _current_pass() != -1
        key = (step.index, update.target, update.sources, id(update.fn))
        row = self.updates.get(key)
        if row is None:
            row = self.updates[key] = UpdateCost(step.index, update.target, update.name, update.sources, fn=update.fn)
        row.calls, row.replays = row.calls + 1, row.replays + replayed
        self._running = [row] if replayed else [*self._running, row]

    def note_join(self) -> None:
        """A forward ends; a replay goes on until the next one, since its backward follows."""
        if _current_pass() == -1 and self._running:
            self._running.pop()

    def _new(self, tensor: Tensor, size: int) -> _Storage:
        if tensor.device.type != self.device.type:
            return _Storage(0)
        storage = _Storage(-(-size // self.rounding) * self.rounding, len(self.kinds) - 1)
        self.split[-1] += storage.size
        return storage

    def _role(self, storage: _Storage, role: int, change: int) -> None:
        if storage.roles:
            self.split[_kind(storage)] -= storage.size
            storage.roles[role] += change
            self.split[_kind(storage)] += storage.size

    def _freed(self, key: weakref.ref[torch.UntypedStorage]) -> None:
        if (storage := self._known.get(key)) is not None and storage.roles:
            self.split[_kind(storage)] -= storage.size
            storage.roles = []  # a stream that is replaced later may still be listed
        super()._freed(key)


def _kind(storage: _Storage) -> int:
    return next((role for role, count in enumerate(storage.roles) if count), -1)


@dataclass
class UpdateCost:
    """One row of the table: an update, how often it ran (replays included), the bytes that autograd saved in its
    forward and no earlier update had saved, and the peak of the whole step while it ran."""

    index: int
    target: str
    name: str
    sources: tuple[str, ...]
    calls: int = 0
    replays: int = 0
    saved: int = 0
    peak: int = 0
    fn: Any = field(default=None, repr=False)  # held: its identity names the row


# What a ledger is told is taken from four places, all of them here. tests/test_measure.py fails when one of them moves.


@contextmanager
def observed(ledger: Ledger) -> Iterator[None]:
    """Tell the ledger what updates run, what becomes of streams, and what autograd saves, also under others' hooks."""

    def call(original: Callable[..., Any], step: Step, sources: list[list[Tensor]], target: list[Tensor]) -> Any:
        for name, leaves in zip((*step.update.sources, step.update.target), (*sources, target), strict=True):
            ledger.note_stream((id(step.structures), name), leaves)
        ledger.note_call(step)
        return original(step, sources, target)

    def join(original: Callable[..., Any], step: Step, *args: Any) -> list[Tensor]:
        leaves = original(step, *args)
        ledger.note_stream((id(step.structures), step.update.target), leaves)
        ledger.note_join()
        return leaves

    def enter(original: Callable[..., Any], hooks: saved_tensors_hooks) -> None:
        pack = hooks.pack_hook

        def pack_and_note(tensor: Tensor) -> Any:
            ledger.note_saved(tensor)
            return pack(tensor)

        hooks.pack_hook = pack_and_note
        try:
            original(hooks)
        finally:
            hooks.pack_hook = pack

    places = (
        (Step, "call", call),
        (Step, "join", join),
        (Step, "unjoin", join),
        (saved_tensors_hooks, "__enter__", enter),
    )
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for (owner, name, wrapper), (_, _, original) in zip(places, originals, strict=True):
            setattr(owner, name, functools.partialmethod(_through, wrapper, original))
        # Tensors are saved as they would be: leaves themselves, others without their graph, or it would never die.
        with saved_tensors_hooks(lambda t: t if t.is_leaf else t.detach(), lambda t: t):
            yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _through(self: Any, wrapper: Callable[..., Any], original: Callable[..., Any], *args: Any) -> Any:
    return wrapper(original, self, *args)
