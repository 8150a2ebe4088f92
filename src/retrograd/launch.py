"""Replays as CUDA graphs: `Reverse(graphed=True)`.

Where tensors are small the host takes longer to launch a replay, kernel by kernel, than the device to run it. What a
plain module (plain.py) launches is known, so its replay is captured once and launched whole ever after. Autograd sees
no difference: its own nodes differentiate what the graph saved. Where that lies is the business of arena.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .arena import ARENAS, Arena, Launched, in_place
from .capture import current
from .entry import Entry, Flat, slot_of
from .plain import stands
from .saved import Saved
from .streams import is_dense

if TYPE_CHECKING:
    from .tape import Reversal

KIND = "cuda"
"""The kind of device that has graphs."""

MOST = 16
"""So many graphs of one module are made. Where shapes change all the time, more would cost more than they give."""

Replay = tuple[Saved, list[Tensor]]


class Launch:
    """The replay of one update, captured."""

    def __init__(self, entry: Entry, arena: Arena, streams: Flat, ordinary: Saved) -> None:
        """`streams` are those after the update, `ordinary` is what a replay without a graph saves."""
        update, known = entry.step.update, entry.call.known
        assert known is not None
        self.arena, self.target, self.slots, self.weights = arena, update.target, entry.slots, known.weights
        self.square = [w for w in known.weights if len(set(w.shape)) < w.dim()]  # others show it if they are transposed
        self.pointers = self._pointers()
        self.names = update.target, *update.sources
        self.places = [(name, arena.place(name, streams[name][0])) for name in self.names]
        (_, target), *sources = self.places

        def replay() -> list[Tensor]:
            tensors, before = entry.replay_bare([[source] for _, source in sources], [target])
            target.copy_(before[0])
            return tensors

        captured, self.graph = entry.call.surroundings.run(lambda: arena.record(replay))
        elsewhere = {tensor.untyped_storage().data_ptr() for _, tensor in self.places}
        weights = {weight.untyped_storage().data_ptr() for weight in self.weights}
        self.tensors: list[Tensor] = []
        self.lent: dict[int, Tensor] = {}
        self.constants = False
        for slot, (tensor, usual) in enumerate(zip(captured, ordinary.tensors, strict=False)):
            assert usual is not None
            where = tensor.untyped_storage().data_ptr()
            if usual.device != arena.device:  # while torch captures, some of these lie on the device
                tensor, self.constants = usual.clone(), True
            elif where not in elsewhere and where not in weights:
                tensor = in_place(tensor, self.graph)
            self.tensors.append(tensor.detach())
            if where not in weights:
                self.lent[slot] = self.tensors[-1]

    def _pointers(self) -> list[Any]:
        return [*map(Tensor.data_ptr, self.weights), *map(Tensor.stride, self.square)]

    def moved(self) -> bool:
        """Whether a weight lies elsewhere, or otherwise, than at the capture: `weight.data = ...`."""
        return self._pointers() != self.pointers

    def run(self, entry: Entry, streams: Flat) -> Replay:
        """Launch it, with the random numbers of the forward. `streams` are taken one update back."""
        for name, place in self.places:
            if (leaf := streams[name][0]) is not place:
                place.copy_(leaf)
                streams[name] = [place]
        entry.call.launch(self.graph.replay)
        return Launched(self.arena, self.tensors, self.lent), streams[self.target]

    def agrees(self, launched: Replay, ordinary: Replay, drawn: bool) -> bool:
        """Whether it computed what a replay without a graph did, to the bit. Integers need not agree unless something
        was `drawn`, and a single one not even then: attention saves some that nobody sets."""
        saved, usual = [*launched[0].tensors, *launched[1]], [*ordinary[0].tensors, *ordinary[1]]
        return [*map(slot_of, self.tensors)] == self.slots and all(
            torch.equal(_bits(a), _bits(b))
            for a, b in zip(saved, usual, strict=True)
            if a.is_floating_point() or a.is_complex() or (drawn and a.numel() > 1)
        )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class Way:
    """One way in which a module is called."""

    __slots__ = ("arena", "kind", "seen", "refused", "launch")

    def __init__(self, arena: Arena, kind: Any) -> None:
        self.arena, self.kind = arena, kind
        self.seen = self.refused = False
        self.launch: Launch | None = None

    def refuse(self, entry: Entry, reason: str) -> None:
        """It will have no graph."""
        self.refused = True
        _warn(entry, reason)


def may_launch() -> bool:
    """Whether graphs may be launched in this pass. A second derivative keeps what was saved; a step that is captured
    itself cannot launch; hooks on all modules, and dispatch modes, for neither of which torch has a public name, would
    be missed."""
    return not (
        torch.is_grad_enabled()
        or current() is not None
        or nn.modules.module._has_any_global_hook()
        or torch._C._len_torch_dispatch_stack()  # pyright: ignore[reportAttributeAccessIssue]
    )


def replayed(entry: Entry, reversal: Reversal) -> Replay:
    """The replay of an update, by its graph if it has one.

    The first replay is as ever, since libraries may set themselves up in it. The second is too, and is captured.
    """
    way = _way(entry, reversal)
    if way is None or way.refused:
        return _ordinary(entry, reversal)
    if not way.seen:
        way.seen = True
        return _ordinary(entry, reversal)
    launch = way.launch
    if launch is None or launch.moved():
        return _capture(entry, reversal, way)
    if launch.slots != entry.slots:
        return _ordinary(entry, reversal)
    way.arena.take(reversal)
    reversal.placed.update(launch.names)
    return launch.run(entry, reversal.streams)


def _ordinary(entry: Entry, reversal: Reversal) -> Replay:
    """A replay without a graph, from streams of its own: custom functions may hold on to what it saves."""
    update = entry.step.update
    for name in reversal.placed.intersection((update.target, *update.sources)):
        reversal.move_out(name)
    return entry.replay(reversal.streams, reversal.stood)


def _capture(entry: Entry, reversal: Reversal, way: Way) -> Replay:
    """A replay without a graph, and a graph of it if that computes the same."""
    if entry.call.differs():  # this time: something was changed since the forward, and is put back for the replay
        return _ordinary(entry, reversal)
    with _waiting() as waits:
        ordinary = _ordinary(entry, reversal)
    if waits:
        way.refuse(entry, "it waits for the device (.item(), say)")
        return ordinary
    way.arena.take(reversal)
    streams = dict(reversal.streams)
    try:
        launch = Launch(entry, way.arena, streams, ordinary[0])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise RuntimeError(
            f"{entry}: its replay cannot be captured in a CUDA graph; give it policy=Reverse(), without graphed"
        ) from error
    if not launch.agrees(launch.run(entry, streams), ordinary, drawn := bool(entry.call.drawn)):
        way.refuse(entry, "its graph computes something else than it does")
    elif drawn and launch.constants:
        way.refuse(entry, "it draws random numbers and saves on the host which ones (memory-efficient attention does)")
    else:
        way.launch = launch
    return ordinary


def _way(entry: Entry, reversal: Reversal) -> Way | None:
    """The way in which this module was called, if a graph can replay that."""
    step, call, streams = entry.step, entry.call, reversal.streams
    target = streams[step.update.target]
    if not target or type(target[0]) is not Tensor or target[0].device.type != KIND:
        return None
    leaves = [leaf for name in (step.update.target, *step.update.sources) for leaf in streams[name]]
    single = step.tensors and step.structures[step.update.target] is None
    if not (single and all(leaf.layout is torch.strided and not leaf.is_nested for leaf in leaves)):
        return _warn(entry, "its streams are not single tensors, or not dense ones")
    if call.known is None or entry.ends is not entry.versions or entry.differentiates:
        return _warn(
            entry,
            "only that of a plain module can be one (parameters, numbers, other such modules; no buffers or hooks) "
            "that is called without keywords",
        )
    if (code := call.known.code) not in reversal.standing:
        reversal.standing[code] = stands(code)
    if not reversal.standing[code]:
        return _warn(entry, "its code reads what may change unseen (of modules, classes, closures), or has changed")
    kind = _kind(entry, reversal, leaves, arena := ARENAS.on(target[0].device))
    ways = call.known.ways
    for way in ways:
        if way.kind == kind:
            return way
    if len(ways) == MOST:
        return _warn(entry, f"it was called in {MOST} ways already (with other shapes, say); pad its inputs")
    tensors = [*leaves, *call.known.weights]
    if any(each.device != arena.device for each in tensors + [generator for generator, _, _ in call.drawn]):
        return _warn(entry, f"it uses or draws from something that is not on {arena.device}")
    if not all(map(is_dense, leaves)):
        return _warn(entry, "one of its streams has gaps or overlaps in memory")
    ways.append(way := Way(arena, kind))
    return way


def _kind(entry: Entry, reversal: Reversal, leaves: list[Tensor], arena: Arena) -> Any:
    """What a graph depends on besides what Known holds, and the values in its arena and in the weights."""
    step, call = entry.step, entry.call
    update = step.update
    return (
        arena,
        update.target,
        update.sources,
        update.join,
        step.fn is update.fn,
        entry.source_grads,
        entry.target_grads,
        call.needs,
        len(call.drawn),
        call.surroundings.modes,
        reversal.numerics,
        [(leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves],
    )


@contextmanager
def _waiting() -> Iterator[list[Any]]:
    """Whether something inside waits for the device. Other threads are seen too, so it may be found where it is not."""
    mode = torch.cuda.get_sync_debug_mode()
    found: list[Any] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            found += [each for each in seen if "called a synchronizing" in str(each.message)]


_warned: set[tuple[type, str]] = set()


def _warn(entry: Entry, reason: str) -> None:
    """Once for each kind of function and reason."""
    kind = type(entry.step.update.fn), reason
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(f"{entry} is replayed without a CUDA graph: {reason}", stacklevel=2)
