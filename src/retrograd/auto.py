"""`Auto`: keep what fits a budget of bytes, reverse the rest.

The engine sees the size of everything that an update saves. The first step is reversed and tells; from then on the
longest suffix of the program whose saved tensors fit is kept. A suffix, because the backward begins there: what is kept
is gone before the first replay needs room.
"""

from __future__ import annotations

import functools
import operator
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .policies import Keep, Policy, Reverse
from .ranks import distributed
from .reach import reach
from .sizes import format_bytes, parse_bytes
from .streams import leaves_of
from .surroundings import Surroundings
from .update import Step, Update


@dataclass(frozen=True, eq=False)
class Auto(Policy):
    """Keep as much as fits the budget, and reverse the rest: the fastest step in the memory that you have.

    `budget` is what the activations of the program may take: bytes, "8GiB", or a fraction of the memory that is free
    when the first step begins. That step is reversed and learns what each update saves; from then on the longest
    suffix of the program that fits is kept. Other shapes, of streams or of keywords, are learned anew. A budget below
    what reversing everything takes is an error that names the smallest that works. `explain()` says what was chosen and
    what replays cost. Not counted are updates with a policy of their own, and what a `fn` holds without saving it, as
    checkpointing inside it does in its backward. The budget is that of one program: of several, each needs its share.

    The choice depends on budget, shapes, and on which weights are trained, so ranks of a distributed run agree; a
    fraction is refused there. A copy of the policy learns anew.

    >>> Auto(budget="8GiB").budget
    8589934592
    """

    budget: int | float | str
    learned: dict[Any, Learned] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        budget = parse_bytes(self.budget) if isinstance(self.budget, str) else self.budget
        fraction = isinstance(budget, float) and 0 < budget < 1
        # 1.0 is not one byte but all there is, which nothing can have.
        whole = type(budget) is int or (isinstance(budget, float) and budget.is_integer() and budget != 1)
        if not fraction and not (whole and budget > 0):
            raise ValueError(
                "Auto: budget must be a number of bytes, a size such as '8GiB', or the number 0.5 for half of what is "
                f"free, not {self.budget!r}"
            )
        object.__setattr__(self, "budget", budget if fraction else int(budget))

    def __reduce__(self) -> Any:
        return Auto, (self.budget,)  # what was learned belongs to these modules, on this device

    def explain(self) -> str:
        """What was learned and chosen, for each shape of the streams that was seen."""
        return "\n".join(each.explain() for each in self.learned.values()) or "Auto has not seen a training step yet."


class Stopwatch:
    """The time between its making and `stop`, on the device and without making it wait."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        self.start, self.end = self._now(), None

    def _now(self) -> Any:
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        self.end = self._now()

    def seconds(self) -> float:
        """Waits for the device."""
        assert self.end is not None
        if not self.on_device:
            return self.end - self.start
        self.end.synchronize()
        return 1e-3 * self.start.elapsed_time(self.end)


class Learned:
    """What `Auto` knows about programs on streams of certain shapes."""

    def __init__(self, streams: int, budget: int, device: torch.device) -> None:
        self.streams, self.budget, self.device = streams, budget, device  # bytes, bytes
        self.saved: dict[Any, int] = {}  # what each update saves
        self.took: dict[Any, Stopwatch] = {}  # how long its second call took: what a replay costs
        self.keys: dict[int, Any] = {}  # of the updates of the last program, by index
        self.reversed: list[Any] = []  # those that it replays
        self.learning = 0  # how many are not known yet
        self.length = self.kept = self.kept_bytes = 0

    def choose(self, steps: Sequence[Step]) -> Sequence[Policy]:
        """A policy for each step of a program: a suffix is kept. Those with a policy of their own are not counted."""
        keys = [key_of(step.update) for step in steps]
        self.keys = {step.index: key for step, key in zip(steps, keys, strict=True)}
        counted = [step.update.policy is None for step in steps]
        self.length, self.kept, self.kept_bytes = sum(counted), 0, 0
        self.learning = sum(counts and key not in self.saved for key, counts in zip(keys, counted, strict=True))
        first = len(steps)  # of those that are kept
        for key, counts in zip(reversed(keys), reversed(counted), strict=True):
            size = self.saved.get(key) if counts else 0
            if size is None or self.need(self.kept_bytes + size) > self.budget:
                break
            first -= 1
            self.kept, self.kept_bytes = self.kept + counts, self.kept_bytes + size
        self.reversed = [key for key, counts in zip(keys[:first], counted, strict=False) if counts]
        return [Reverse()] * first + [Keep()] * (len(steps) - first)

    def learn(self, key: Any, saved: Sequence[Tensor], outside: Sequence[Tensor]) -> None:
        """Note the most that an update saves, less what is there anyway (weights, keywords)."""
        there, storages = _storages(outside), _storages(saved)
        size = sum(size for storage, size in storages.items() if storage not in there)
        self.saved[key] = max(size, self.saved.get(key, 0))

    def need(self, kept: int) -> int:
        """The most bytes that a step holds if so many are kept.

        Streams and their gradients are always there, and an update in its backward holds up to twice what it saves;
        when the first update is replayed, nothing kept is left.
        """
        largest = max(self.saved.values(), default=0)
        return 2 * self.streams + max(kept + largest, 2 * largest)

    def check(self) -> None:
        """Refuse a budget that even reversing everything exceeds."""
        if self.need(0) > self.budget:
            raise RuntimeError(
                f"Auto: the budget of {format_bytes(self.budget)} cannot be met: reversing every update may take "
                f"up to {format_bytes(self.need(0))} ({self.need(0)} bytes). Give at least that, or a smaller batch"
            )

    def explain(self) -> str:
        return (
            f"streams of {format_bytes(self.streams)}, budget {format_bytes(self.budget)}: the last {self.kept} of "
            f"{self.length} updates are kept ({format_bytes(self.kept_bytes)}), {self.length - self.kept} reversed; "
            f"expected peak {format_bytes(self.need(self.kept_bytes))}, {format_bytes(self.need(0))} with none kept"
            + (f"; {self.learning} were seen for the first time" if self.learning else "")
            + self._cost()
        )

    def _cost(self) -> str:
        seconds = [self.took[key].seconds() for key in self.reversed if key in self.took]
        return f"; replays take about {1e3 * sum(seconds):.3g} ms a step" if seconds else ""


def learned_for(
    policy: Auto, flat: dict[str, list[Tensor]], updates: Sequence[Update], surroundings: Surroundings
) -> Learned:
    """What a policy knows about programs on such streams, with such keywords."""
    streams = tuple((name, *map(_kind, leaves)) for name, leaves in flat.items())
    given = {id(t): t for update in updates for value in update.kwargs.values() for t in leaves_of(value, Tensor)}
    key = (streams, frozenset(map(_kind, given.values())), surroundings.modes)
    if key not in policy.learned:
        leaves = [leaf for leaves in flat.values() for leaf in leaves]
        size, device = sum(leaf.nbytes for leaf in leaves), leaves[0].device if leaves else torch.device("cpu")
        policy.learned[key] = Learned(size, _budget(policy, device), device)
    return policy.learned[key]


def _budget(policy: Auto, device: torch.device) -> int:
    if isinstance(policy.budget, int):
        return policy.budget
    assert isinstance(policy.budget, float)
    if distributed():
        raise ValueError("Auto: in a distributed run give the budget in bytes; ranks may have other amounts free")
    if device.type == "cuda":
        pooled = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + pooled
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(policy.budget * free)


def _storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    """The bytes of each storage. (Sparse tensors have none.)"""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return {storage._cdata: storage.nbytes() for storage in storages}


_kind = operator.attrgetter("shape", "dtype", "device", "requires_grad")


def key_of(update: Update) -> Any:
    """What stands for an update in the next call: its streams, the modules that it can be seen to use and what they
    train, the code of a function (which may be made anew at each call), keywords that are whole numbers or words.
    (Other numbers may change at each step, as a temperature does.)"""
    fn, reached = update.fn, reach(update.fn, {})
    while isinstance(fn, functools.partial):
        fn = fn.func
    return (
        update.target,
        update.sources,
        getattr(fn, "__code__", None) or type(fn),
        tuple(map(weakref.ref, reached.modules)),
        tuple(module.training for module in reached.modules),
        tuple(weight.requires_grad for weight in reached.weights + reached.shown),
        tuple(item for item in update.kwargs.items() if isinstance(item[1], (bool, int, str, type(None)))),
    )
