"""How the output of `fn` enters its target stream, and how it is taken out again.

A join is two methods, `apply` and `invert`, and nothing about gradients: the engine lets autograd differentiate
`apply`, so a join of your own cannot have a wrong gradient. Additive coupling is from NICE (Dinh et al., 2014) and
RevNet (Gomez et al., 2017), affine coupling from RealNVP (Dinh et al., 2016), the weighted sum from momentum networks
(Sander et al., 2021).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


class Join(ABC):
    """The base of all joins. Both methods see one tensor of the target and, for each part, one tensor of `fn`'s output.

    `fn` returns `parts` trees of the target's structure: one for most joins, a (log-scale, shift) pair for `Affine`.
    Neither method may work in place. The engine casts the result to the stream's dtype.

    >>> import torch, retrograd as rg
    >>> class Subtract(rg.Join):
    ...     def apply(self, target, out):
    ...         return target - out
    ...     def invert(self, target, out):
    ...         return target + out
    >>> update = rg.Update("a", torch.sin, ("b",), join=Subtract())
    >>> rg.run([update], {"a": torch.ones(1), "b": torch.zeros(1)})["a"]
    tensor([1.])
    """

    parts: ClassVar[int] = 1

    @abstractmethod
    def apply(self, target: Tensor, *out: Tensor) -> Tensor:
        """The target after the update."""

    @abstractmethod
    def invert(self, target: Tensor, *out: Tensor) -> Tensor:
        """The target before the update, given the target after it."""

    def inverse(self) -> Join:
        """The join that undoes this one."""
        return Inverse(self)


@dataclass(frozen=True)
class Inverse(Join):
    """Another join with `apply` and `invert` exchanged: `invert` runs a program of these through the same engine."""

    join: Join

    @property
    def parts(self) -> int:  # type: ignore[override]
        return self.join.parts

    def apply(self, target: Tensor, *out: Tensor) -> Tensor:
        return self.join.invert(target, *out)

    def invert(self, target: Tensor, *out: Tensor) -> Tensor:
        return self.join.apply(target, *out)

    def inverse(self) -> Join:
        return self.join


@dataclass(frozen=True)
class Add(Join):
    """`target + out`: the coupling of RevNet and Reformer, and the default.

    >>> import torch
    >>> Add().apply(torch.tensor([1.0]), torch.tensor([2.0]))
    tensor([3.])
    """

    def apply(self, target: Tensor, *out: Tensor) -> Tensor:
        return target + out[0]

    def invert(self, target: Tensor, *out: Tensor) -> Tensor:
        return target - out[0]


@dataclass(frozen=True)
class Scale(Join):
    """`target * keep + out * gain`, with two numbers.

    Undoing it divides by `keep`: rounding errors grow by `1 / keep` at each update, so stay close to 1.

    >>> import torch
    >>> Scale(keep=0.5, gain=2.0).apply(torch.tensor([4.0]), torch.tensor([1.0]))
    tensor([4.])
    """

    keep: float = 1.0
    gain: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("keep", self.keep), ("gain", self.gain)):
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"Scale: {name} must be a finite number, not {value!r}")
        if self.keep == 0:
            raise ValueError(
                "Scale: keep=0 forgets the target, so the update cannot be undone; give keep another value"
            )

    def apply(self, target: Tensor, *out: Tensor) -> Tensor:
        kept = target if self.keep == 1 else target * self.keep
        return kept.add(out[0], alpha=self.gain)

    def invert(self, target: Tensor, *out: Tensor) -> Tensor:
        kept = target.sub(out[0], alpha=self.gain)
        return kept if self.keep == 1 else kept / self.keep


@dataclass(frozen=True)
class Affine(Join):
    """`target * exp(log_scale) + shift`, where `fn` returns the pair `(log_scale, shift)`.

    >>> import torch
    >>> Affine().apply(torch.tensor([3.0]), torch.zeros(1), torch.ones(1))
    tensor([4.])
    """

    parts: ClassVar[int] = 2

    def apply(self, target: Tensor, *out: Tensor) -> Tensor:
        log_scale, shift = out
        return target * log_scale.to(target.dtype).exp() + shift

    def invert(self, target: Tensor, *out: Tensor) -> Tensor:
        log_scale, shift = out
        return (target - shift) * log_scale.to(target.dtype).neg().exp()
