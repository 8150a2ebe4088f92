"""What the engine does differently while a training step is captured in a CUDA graph (graphed.py): how a replay inside
the graph draws the random numbers of its forward.

While a graph is captured no generator can be read. So the step is rehearsed: a `Rehearsal` notes at which offset each
call of a `fn` begins to draw. A `Capture` then gives the replay of each call that draws a generator of its own, a twin,
and before each launch puts it where the forward of that call will begin to draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .surroundings import restore, state

if TYPE_CHECKING:
    from .alarms import RangeAlarms


class Rehearsal:
    """An ordinary step before the capture: for each call of a `fn`, in order, the offset at which it begins to draw.

    A `remember` that draws counts as a call too: its replay goes on where it ended.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.start = generator, generator.get_offset()
        self.offsets: list[int | None] = []
        self.total = 0

    def note(self, label: str, drawn: Sequence[tuple[torch.Generator, Any]]) -> None:
        """A call has drawn from these generators, and its replay must draw from these states on."""
        for generator, _ in drawn:
            if generator is not self.generator:
                raise RuntimeError(
                    f"{label} draws random numbers from a generator on {generator.device} that is not the default one "
                    "of the CUDA device: in a graph they would be the same at every step"
                )
        self.offsets.append(drawn[0][1][1] - self.start if drawn else None)

    def end(self) -> None:
        self.total = self.generator.get_offset() - self.start


class Capture:
    """The same step while it is captured."""

    def __init__(self, rehearsal: Rehearsal, graph: torch.cuda.CUDAGraph) -> None:
        self.rehearsal, self.calls = rehearsal, 0
        self.alarms: list[RangeAlarms] = []
        self.twins: dict[int, tuple[torch.Generator, int]] = {}  # of the calls that draw, and the offset of each
        for call, offset in enumerate(rehearsal.offsets):
            if offset is not None:
                twin = rehearsal.generator.clone_state()
                self.twins[call] = twin, offset
                graph.register_generator_state(twin)

    def twin(self) -> list[tuple[torch.Generator, torch.Generator]]:
        """For the next call, if it draws: the generator it draws from, and the one that its replay shall draw from."""
        self.calls += 1
        if (twin := self.twins.get(self.calls - 1)) is None:
            return []
        return [(self.rehearsal.generator, twin[0])]

    def place(self) -> None:
        """Before a launch: put each twin where the forward of its call will begin to draw."""
        seed, start = state(self.rehearsal.generator)
        for twin, offset in self.twins.values():
            restore(twin, (seed, start + offset))


_current: Rehearsal | Capture | None = None  # for all threads: a backward runs in one of its own


def current() -> Rehearsal | Capture | None:
    """The rehearsal or the capture that is under way."""
    return _current


@contextmanager
def under_way(what: Rehearsal | Capture) -> Iterator[None]:
    """While the step runs inside."""
    global _current
    if _current is not None:
        raise RuntimeError("graphed: another step is being captured at this moment; capture one after the other")
    _current = what
    try:
        yield
    finally:
        _current = None
