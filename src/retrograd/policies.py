"""What becomes of the tensors that autograd saves while an update runs: a policy is a frozen dataclass, for a whole
program (`run(..., policy=...)`) or for one update (`Update(..., policy=...)`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch


class Policy:
    """The base of `Reverse`, `Keep`, `Offload` and `Auto`."""


@dataclass(frozen=True)
class Reverse(Policy):
    """Recompute what was saved by reversing the program. Memory does not grow with depth; `fn` runs once more.

    `anchor_every=k` also stores the streams after every k updates. Reconstruction starts afresh there, so rounding
    errors cannot add up over more than k updates, for the bytes of the streams every k updates.

    `save="attention"`, or a sequence of operators such as `torch.ops.aten.mm.default`, stores what these operators
    return, so that the replay does not run them again. It pays where they are expensive and their outputs small: long
    sequences. (Through torch's selective checkpointing; one backward per forward.)

    `save="output"` stores what `fn` returns. A replay then ends as soon as it has saved what the forward saved, as that
    of checkpointing does, and need not run the products at the end of `fn`. What `fn` does after that (forward hooks,
    say) does not happen in the replay, and whether it would draw the same random numbers there is not checked.

    `watch=1e-3` compares, in each backward, a few hundred values of the streams that entered with their
    reconstruction: constant memory, no waiting for the device. Where the relative error is larger, it warns once, or
    raises (`on_drift="raise"`, which does wait at the end of the backward). `last_drift()` tells the error.

    `graphed=True` captures each replay in a CUDA graph, once, and launches it whole from then on: for tensors so small
    that the GPU waits for the host. The training loop stays as it is (`rg.graphed` captures all of it, and is faster
    still). Only replays of plain modules are captured: parameters, numbers and such modules, called without keywords on
    single tensors, whose code reads nothing that may change unseen. Of others a warning tells once why, and they are
    replayed as ever. It takes the memory of one more update, and a few steps to begin; on a CPU it changes nothing.

    >>> import retrograd as rg
    >>> pairs = [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(64)]
    >>> net = rg.ReversibleSequence(pairs, policy=rg.Reverse(anchor_every=16, watch=1e-3))
    >>> net(torch.randn(2, 8)).sum().backward()
    """

    anchor_every: int | None = None
    save: str | Sequence[Any] | None = None
    watch: float | None = None
    on_drift: Literal["warn", "raise"] = "warn"
    graphed: bool = False

    def __post_init__(self) -> None:
        k = self.anchor_every
        if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
            raise ValueError(f"Reverse: anchor_every must be a positive number of updates or None, not {k!r}")
        if self.watch is not None and (
            isinstance(self.watch, bool) or not isinstance(self.watch, (int, float)) or not self.watch > 0
        ):
            raise ValueError(f"Reverse: watch must be a positive relative error or None, not {self.watch!r}")
        if self.on_drift not in ("warn", "raise"):
            raise ValueError(f"Reverse: on_drift must be 'warn' or 'raise', not {self.on_drift!r}")
        if self.save is not None:
            object.__setattr__(self, "save", _saved(self.save))
        if not isinstance(self.graphed, bool):
            raise ValueError(f"Reverse: graphed must be True or False, not {self.graphed!r}")
        if self.graphed and self.save is not None:
            raise ValueError("Reverse: graphed=True captures whole replays, save= shortens them; use one of the two")

    def __reduce__(self) -> Any:
        """Operators cannot be pickled; their names can."""
        save = [str(operator) for operator in self.save] if isinstance(self.save, tuple) else self.save
        return Reverse, (self.anchor_every, save, self.watch, self.on_drift, self.graphed)


_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


def _saved(save: str | Sequence[Any]) -> Literal["output"] | tuple[Any, ...]:
    """The word "output", or the operators to save; what does not exist is refused here."""
    if save == "output":
        return "output"
    if save == "attention":
        found = [getattr(torch.ops.aten, name, None) for name in _ATTENTION]
        return tuple(packet.default for packet in found if packet is not None)
    if not save:
        raise ValueError(f"Reverse: save={save!r} names no operator; leave it out to save none")
    operators = []
    for operator in save if isinstance(save, (list, tuple, set)) else [save]:
        if isinstance(operator, str):
            operator = _operator(operator.removeprefix("torch.ops.").replace("::", ".").split("."))
        if isinstance(operator, torch._ops.OpOverloadPacket):
            operators += [getattr(operator, overload) for overload in operator.overloads()]
        elif isinstance(operator, torch._ops.OpOverload):
            operators.append(operator)
        else:
            raise ValueError(
                "Reverse: save must be 'output', 'attention' or operators such as torch.ops.aten.mm.default, "
                f"not {save!r}"
            )
    return tuple(operators)


def _operator(names: list[str]) -> Any:
    """The operator called "mm", "aten.mm" or "aten.mm.default"; None if there is none."""
    namespace, name, *overload = names if len(names) > 1 else ["aten", *names]
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return getattr(packet, overload[0], None) if overload else packet


@dataclass(frozen=True)
class Keep(Policy):
    """Keep what was saved: plain autograd. Nothing is recomputed.

    A kept run of updates in the middle of a program stores the streams at its start, so that reversing goes on from
    there without replaying it.

    >>> Keep()
    Keep()
    """


@dataclass(frozen=True)
class Offload(Policy):
    """Move what was saved to pinned host memory, and back for the backward. Nothing is recomputed.

    The copies run beside the computation, and each update's tensors are fetched while the one after it is being
    differentiated. Tensors below `smallest` bytes stay. It pays where the host link is faster than recomputing; on a
    CPU there is nowhere to move to, and it is `Keep`.

    >>> Offload().smallest
    65536
    """

    smallest: int = 64 * 1024

    def __post_init__(self) -> None:
        if not isinstance(self.smallest, int) or isinstance(self.smallest, bool) or self.smallest < 0:
            raise ValueError(f"Offload: smallest must be a number of bytes, 0 or more, not {self.smallest!r}")
