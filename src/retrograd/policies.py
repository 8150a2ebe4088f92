"""What becomes of the tensors that autograd saves while an update runs: a policy is a frozen dataclass, for a whole
program (`run(..., policy=...)`) or for one update (`Update(..., policy=...)`).
"""

from __future__ import annotations

from dataclasses import dataclass


class Policy:
    """The base of `Reverse` and `Keep`."""


@dataclass(frozen=True)
class Reverse(Policy):
    """Recompute what was saved by reversing the program. Memory does not grow with depth; `fn` runs once more.

    `anchor_every=k` also stores the streams after every k updates. Reconstruction starts afresh there, so rounding
    errors cannot add up over more than k updates, for the bytes of the streams every k updates.

    >>> Reverse(anchor_every=16)
    Reverse(anchor_every=16)
    """

    anchor_every: int | None = None

    def __post_init__(self) -> None:
        k = self.anchor_every
        if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
            raise ValueError(f"Reverse: anchor_every must be a positive number of updates or None, not {k!r}")


@dataclass(frozen=True)
class Keep(Policy):
    """Keep what was saved: plain autograd. Nothing is recomputed.

    A kept run of updates in the middle of a program stores the streams at its start, so that reversing goes on from
    there without replaying it.

    >>> Keep()
    Keep()
    """
