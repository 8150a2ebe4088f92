"""What becomes of the tensors that autograd saves while an update runs: a policy is a frozen dataclass, for a whole
program (`run(..., policy=...)`) or for one update (`Update(..., policy=...)`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class Policy:
    """The base of `Reverse` and `Keep`."""


@dataclass(frozen=True)
class Reverse(Policy):
    """Recompute what was saved by reversing the program. Memory does not grow with depth; `fn` runs once more.

    `anchor_every=k` also stores the streams after every k updates. Reconstruction starts afresh there, so rounding
    errors cannot add up over more than k updates, for the bytes of the streams every k updates.

    `watch=1e-3` compares, in each backward, a few hundred values of the streams that entered with their
    reconstruction: constant memory, no waiting for the device. Where the relative error is larger, it warns once, or
    raises (`on_drift="raise"`, which does wait at the end of the backward). `last_drift()` tells the error.

    >>> Reverse(anchor_every=16).anchor_every
    16
    """

    anchor_every: int | None = None
    watch: float | None = None
    on_drift: Literal["warn", "raise"] = "warn"

    def __post_init__(self) -> None:
        k = self.anchor_every
        if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
            raise ValueError(f"Reverse: anchor_every must be a positive number of updates or None, not {k!r}")
        if self.watch is not None and (not isinstance(self.watch, (int, float)) or not self.watch > 0):
            raise ValueError(f"Reverse: watch must be a positive relative error or None, not {self.watch!r}")
        if self.on_drift not in ("warn", "raise"):
            raise ValueError(f"Reverse: on_drift must be 'warn' or 'raise', not {self.on_drift!r}")


@dataclass(frozen=True)
class Keep(Policy):
    """Keep what was saved: plain autograd. Nothing is recomputed.

    A kept run of updates in the middle of a program stores the streams at its start, so that reversing goes on from
    there without replaying it.

    >>> Keep()
    Keep()
    """
