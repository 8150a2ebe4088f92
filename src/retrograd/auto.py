"""`Auto`: keep what fits a budget of bytes, reverse the rest.

The engine sees the size of everything that an update saves. The first step is reversed and tells; from then on the
longest suffix of the program whose saved tensors fit is kept. A suffix, because the backward begins there: what is kept
is gone before the first replay needs room.
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .policies import Keep, Policy, Reverse
from .ranks import distributed
from .sizes import format_bytes, parse_bytes
from .surroundings import Surroundings
from .update import Update


@dataclass(frozen=True, eq=False)
class Auto(Policy):
    """Keep as much as fits the budget, and reverse the rest: the fastest step in the memory that you have.

    `budget` is what the activations of the program may take: bytes, "8GiB", or a fraction of the memory that is free
    when the first step begins. That step is reversed and learns what each update saves; from then on the longest
    suffix of the program that fits is kept. Other shapes are learned anew. A budget below what reversing everything
    takes is an error that names the smallest that works. `explain()` says what was chosen and what replays cost.
    Updates with a policy of their own are not counted.

    The choice depends on budget, shapes, and on which weights are trained, so ranks of a distributed run agree; a
    fraction is refused there. A copy of the policy learns anew.

    >>> Auto(budget="8GiB").budget
    8589934592
    """

    budget: int | float | str
    learned: dict[Any, Learned] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        budget = parse_bytes(self.budget) if isinstance(self.budget, str) else self.budget
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget < float("inf"):
            raise ValueError(
                f"Auto: budget must be bytes, a size such as '8GiB', or a fraction below 1, not {self.budget!r}"
            )
        object.__setattr__(self, "budget", budget if isinstance(budget, float) and budget < 1 else int(budget))

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
        self.saved: dict[Any, int] = {}  # what each fn saves
        self.took: dict[Any, Stopwatch] = {}  # how long its second call took: what a replay costs
        self.reversed: list[Any] = []  # the fns that the last program replays
        self.length = self.kept = self.kept_bytes = 0

    def choose(self, updates: Sequence[Update]) -> Sequence[Policy]:
        """A policy for each update of a program: a suffix is kept. Those with a policy of their own are not counted."""
        self.length = sum(update.policy is None for update in updates)
        self.kept = self.kept_bytes = 0
        policies: list[Policy] = []
        keys = [None if update.policy is not None else key_of(update.fn) for update in updates]
        for update, key in zip(reversed(updates), reversed(keys), strict=True):
            size = 0 if update.policy is not None else self.saved.get(key)
            if size is None or self.need(self.kept_bytes + size) > self.budget:
                break
            policies.append(Keep())
            self.kept, self.kept_bytes = self.kept + (update.policy is None), self.kept_bytes + size
        self.reversed = [key for key in keys[: len(updates) - len(policies)] if key is not None]
        return [Reverse()] * (len(updates) - len(policies)) + policies

    def learn(self, key: Any, saved: Sequence[Tensor], outside: Sequence[Tensor]) -> None:
        """Note what a fn saves, less what is there anyway (weights, keywords)."""
        there = {tensor.untyped_storage()._cdata for tensor in outside}
        storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in saved)}
        self.saved[key] = sum(size for storage, size in storages.items() if storage not in there)

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
            + self._cost()
        )

    def _cost(self) -> str:
        seconds = [self.took[key].seconds() for key in self.reversed if key in self.took]
        return f"; replays take about {1e3 * sum(seconds):.3g} ms a step" if seconds else ""


def learned_for(policy: Auto, flat: dict[str, list[Tensor]], surroundings: Surroundings) -> Learned:
    """What a policy knows about programs on such streams."""
    shapes = tuple(
        (name, tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in leaves)) for name, leaves in flat.items()
    )
    key = (shapes, tuple(surroundings.autocast))
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


def key_of(fn: Any) -> Any:
    """What stands for a fn in the next call: the module and what it trains, or for functions made anew at each call,
    their code."""
    if isinstance(fn, nn.Module):
        return weakref.ref(fn), fn.training, tuple(parameter.requires_grad for parameter in fn.parameters())
    if isinstance(fn, functools.partial):
        return key_of(fn.func)
    return getattr(fn, "__code__", None) or type(fn)
