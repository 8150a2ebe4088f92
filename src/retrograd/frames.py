"""What a `fn` may ask while it runs (R10): `phase` says where it is, `remember` takes a discrete choice once.
Whoever runs a `fn` does so through `running`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .capture import Capture, Rehearsal, current
from .streams import copied, leaves_of, versions
from .surroundings import default_generators, restore, state
from .update import Update

T = TypeVar("T")


@dataclass(frozen=True)
class Phase:
    """Where a `fn` is being run: the index of its update, its target, and whether this is a replay."""

    update: int
    target: str
    replaying: bool


class Remembered:
    """A value of `remember`, and the generators that computing it moved, to where."""

    __slots__ = ("value", "drawn", "tensors", "versions")

    def __init__(self, value: Any, drawn: list[tuple[torch.Generator, Any]]) -> None:
        self.value, self.drawn = copied(value), drawn  # fn may empty the list it got
        self.tensors = leaves_of(value, Tensor)
        self.versions = versions(self.tensors)


class _Frame:
    """One running `fn`. `remembered` is None where there will be no replay."""

    __slots__ = ("phase", "remembered", "generators", "recalled")

    def __init__(
        self, phase: Phase, remembered: list[Remembered] | None, generators: Sequence[torch.Generator]
    ) -> None:
        self.phase, self.remembered, self.generators, self.recalled = phase, remembered, generators, 0

    def recall(self) -> Remembered:
        """What was remembered next in the forward."""
        assert self.remembered is not None
        if self.recalled == len(self.remembered):
            raise RuntimeError(
                f"update {self.phase.update} (target {self.phase.target!r}) calls remember() more often in its replay "
                f"than in its forward ({self.recalled} times): fn is not deterministic"
            )
        self.recalled += 1
        remembered = self.remembered[self.recalled - 1]
        if versions(remembered.tensors) != remembered.versions:
            raise RuntimeError(
                f"update {self.phase.update} (target {self.phase.target!r}): what remember() returned was changed in "
                "place since, so its replay would see something else; clone it in fn before changing it"
            )
        return remembered


class _Frames(threading.local):
    """The running `fn`s of this thread, outermost first: a reversible network may run inside a `fn` of another."""

    def __init__(self) -> None:
        self.stack: list[_Frame] = []


_frames = _Frames()


def running(
    index: int,
    update: Update,
    function: Callable[[], T],
    remembered: list[Remembered] | None,
    generators: Sequence[torch.Generator] = (),
    replaying: bool = False,
) -> T:
    """Call `function`, and say to `phase` and `remember` which `fn` it is; also in the traceback, if it fails."""
    frame = _Frame(Phase(index, update.target, replaying), remembered, generators)
    _frames.stack.append(frame)
    try:
        out = function()
        if replaying and remembered is not None and frame.recalled != len(remembered):
            raise RuntimeError(
                f"{update.label(index)} calls remember() {frame.recalled} times in its replay and "
                f"{len(remembered)} times in its forward: fn is not deterministic"
            )
        return out
    except Exception as error:
        error.add_note(f"retrograd: in {update.label(index)}, {'replayed in the backward' if replaying else 'forward'}")
        if "saved tensor hooks" in str(error):
            error.add_note("retrograd: torch.func cannot run inside a reversed update; give this one policy=Keep()")
        if "Trying to backward an extra time" in str(error):
            error.add_note('retrograd: Reverse(save=<operators>) allows one backward; save="output" allows any number')
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
        remembered = recalled[0]
        for generator, after in remembered.drawn:
            restore(generator, after)
        value = copied(remembered.value)
    else:
        value, drawn = _computed(compute, frames)
        remembered = Remembered(value, drawn)
    for frame in frames:
        if not frame.phase.replaying:
            frame.remembered.append(remembered)  # type: ignore[union-attr]
    return value


def _computed(compute: Callable[[], T], frames: list[_Frame]) -> tuple[T, list[tuple[torch.Generator, Any]]]:
    """What `compute` returns, and the generators it moved: what is drawn next, a replay must draw from there too."""
    recording = current()
    if isinstance(recording, Capture):
        return _alone(compute, frames), recording.twin()
    drawing = {*default_generators(), *(generator for frame in frames for generator in frame.generators)}
    before = [state(generator) for generator in drawing]
    value = _alone(compute, frames)
    drawn = [(g, state(g)) for g, seen in zip(drawing, before, strict=True) if state(g) != seen]
    if isinstance(recording, Rehearsal):
        recording.note("remember()", drawn)
    return value, drawn


def _alone(compute: Callable[[], T], frames: list[_Frame]) -> T:
    """What `compute` returns. A `remember` inside it only computes: no replay comes by there."""
    held = [frame.remembered for frame in frames]
    try:
        for frame in frames:
            frame.remembered = None
        with torch.no_grad():
            return compute()
    finally:
        for frame, remembered in zip(frames, held, strict=True):
            frame.remembered = remembered
