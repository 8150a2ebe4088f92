"""What a device finds out while a program runs, read on the host without making it wait: a stream that left the range
of an exact join, a reconstruction that drifted.

Flags and samples stay on the device; a copy to pinned memory is queued behind the work that sets them, and read when it
has arrived.
"""

from __future__ import annotations

import itertools
import math
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .capture import Capture, current
from .joins import ExactAdd

if TYPE_CHECKING:
    from .policies import Reverse
    from .update import Step


class Arriving:
    """A small tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        self.host = tensor
        if tensor.is_cuda:
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def here(self, *, wait: bool) -> Tensor | None:
        """The value, if it has arrived; `wait` until it has."""
        if self.event is not None and not self.event.query():
            if not wait:
                return None
            self.event.synchronize()
        return self.host


class RangeAlarms:
    """One byte per update: whether its target left the range of its exact join."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.flags: dict[torch.device, Tensor] = {}
        self.arriving: list[Arriving] = []

    def flag(self, index: int, device: torch.device) -> Tensor:
        """The byte of one update on one device. Index -1: a stream that enters."""
        if device not in self.flags:
            self.flags[device] = torch.zeros(len(self.steps) + 1, dtype=torch.bool, device=device)
        return self.flags[device][index]

    def send(self) -> None:
        """The program has run: queue the flags for the host. A captured one will have run after each launch."""
        if isinstance(recording := current(), Capture):
            recording.alarms.append(self)
        else:
            self.arriving += [Arriving(flags) for flags in self.flags.values()]

    def check(self, *, wait: bool) -> None:
        """Raise where a flag is set; `wait` for flags still on their way."""
        pending, self.arriving = self.arriving, []
        for arriving in pending:
            flags = arriving.here(wait=wait)
            if flags is None:
                self.arriving.append(arriving)
                continue
            if not flags.any():
                continue
            entering = bool(flags[-1])
            index = int(flags.nonzero()[0])
            exact = (step for step in self.steps if isinstance(step.update.join, ExactAdd))
            step = next(exact) if entering else next(step for step in self.steps if step.index == index)
            where = "a stream that enters" if entering else f"{step.update.label(step.index)}: its target"
            raise RuntimeError(
                f"{where} left the range in which {step.update.join} is exact, or is not finite, so it cannot be "
                "reconstructed; give a larger range, ExactAdd(range=...), normalise what enters, or use float64 streams"
            )


class DriftWarning(UserWarning):
    """A reversible program reconstructed its inputs less precisely than it was asked to."""


class DriftWatch:
    """A sample of the streams that enter a tape, to compare with their reconstruction (`Reverse(watch=...)`)."""

    values = 256  # of each tensor

    def __init__(self, policy: Reverse, leaves: Sequence[Tensor]) -> None:
        self.policy = policy
        self.turn = next(_turns)  # other values at each call
        self.samples = [self._sample(leaf) for leaf in leaves]

    def _sample(self, leaf: Tensor) -> Tensor:
        flat = leaf.detach().reshape(-1)
        stride = max(1, flat.numel() // self.values)
        return flat[self.turn * 7919 % stride :: stride][: self.values].clone()

    def compare(self, leaves: Sequence[Tensor], current_pass: int) -> None:
        """Measure the reconstruction against the sample, for `last_drift` and `settle`."""
        pairs = [
            torch.stack([(_wide(self._sample(leaf)) - _wide(sample)).abs().max(), _wide(sample).abs().max()])
            for leaf, sample in zip(leaves, self.samples, strict=True)
            if sample.numel() and (sample.is_floating_point() or sample.is_complex())
        ]
        _drifts.note(current_pass, self.policy, [Arriving(pair) for pair in pairs])


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


@dataclass
class Found:
    """What one tape found in one backward pass: for each stream, its largest error and its largest value."""

    policy: Reverse
    arriving: list[Arriving]
    settled: bool = False

    def drift(self, *, wait: bool) -> float | None:
        """The largest error relative to the largest value, NaN if there is one; None before any has arrived."""
        pairs = [pair.tolist() for pair in (each.here(wait=wait) for each in self.arriving) if pair is not None]
        if not pairs:
            return None
        errors, sizes = zip(*pairs, strict=True)
        return math.nan if any(map(math.isnan, errors)) else max(errors) / (max(sizes) or 1.0)


class _Drifts:
    """The drifts of the last backward pass. Autograd runs it in threads of its own, so there is one for all."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.last_pass = -1
        self.found: list[Found] = []

    def note(self, current_pass: int, policy: Reverse, arriving: list[Arriving]) -> None:
        with self.lock:
            before = self.found
            if current_pass != self.last_pass:
                self.last_pass, self.found = current_pass, []
            self.found.append(Found(policy, arriving))
        if before is not self.found:
            self.settle(before, wait=False)  # what had not arrived when that pass ended

    def settle(self, found: list[Found], *, wait: bool) -> None:
        """Warn or raise, once, about what has arrived."""
        for each in found:
            policy, drift = each.policy, None if each.settled else each.drift(wait=wait)
            each.settled = each.settled or drift is not None
            if policy.watch is None or drift is None or drift <= policy.watch:
                continue
            message = (
                f"a reversible program reconstructed its inputs with a relative error of {drift:.2g}, more than "
                f"watch={policy.watch:g}: its gradients are off accordingly. Remedies: join=ExactAdd(), "
                "Reverse(anchor_every=...), streams in float32; or fn is not deterministic: run retrograd.check"
            )
            if policy.on_drift == "raise":
                raise RuntimeError(message)
            if policy not in _warned:
                _warned.add(policy)
                warnings.warn(message, DriftWarning, stacklevel=2)


_turns = itertools.count()
_drifts = _Drifts()
_warned: set[Reverse] = set()


def settle_drifts(policy: Reverse) -> None:
    """At the end of a backward pass: raise now, or warn when the figures are here anyway."""
    _drifts.settle([*_drifts.found], wait=policy.on_drift == "raise")


def last_drift() -> float | None:
    """The largest relative error that `Reverse(watch=...)` saw in the last backward pass; None before the first.

    Waits for the device, so ask when you log, not at each step.

    >>> import torch, retrograd as rg
    >>> net = rg.ReversibleSequence([(torch.nn.Tanh(), torch.nn.Tanh())], policy=rg.Reverse(watch=1e-3))
    >>> net(torch.randn(2, 4, requires_grad=True)).sum().backward()
    >>> rg.last_drift() < 1e-6
    True
    """
    drifts = [each.drift(wait=True) for each in [*_drifts.found]]
    found = [drift for drift in drifts if drift is not None]
    return math.nan if any(map(math.isnan, found)) else max(found, default=None)
