"""How the output of `fn` enters its target stream, and how it is taken out again.

A join is two methods, `apply` and `invert`, and nothing about gradients: the engine lets autograd differentiate
`apply`, so a join of your own cannot have a wrong gradient. Additive coupling is from NICE (Dinh et al., 2014) and
RevNet (Gomez et al., 2017), affine coupling from RealNVP (Dinh et al., 2016), the weighted sum from momentum networks
(Sander et al., 2021).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import InitVar, dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from .rounding import added, rounded_add


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

    def scaled(self, gain: float) -> Join:
        """The join with `gain` times the output. Not every join can."""
        raise TypeError(f"{type(self).__name__} cannot weigh its output")


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
        return added(target, out[0])

    def invert(self, target: Tensor, *out: Tensor) -> Tensor:
        return added(target, out[0], negative=True)

    def scaled(self, gain: float) -> Join:
        return Scale(1.0, gain)


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

    def scaled(self, gain: float) -> Join:
        return replace(self, gain=self.gain * gain)


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


@dataclass(frozen=True)
class ExactAdd(Join):
    """`target + out` on a grid, so that undoing gives back every bit, at any depth and under bf16 or fp16 autocast.

    Entering streams and every output are rounded to multiples of `grid`, a power of two (the gradient passes straight
    through). Sums of such multiples are exact in float32 while they stay below `2**24 * grid`: leaving that range is an
    error, in the backward at the latest. Give `grid`, or the `range` that your streams need. Streams must be float32 or
    float64; under autocast that costs two more bytes a value, once and not per layer.

    >>> import torch
    >>> ExactAdd(range=2048).grid == 2**-13
    True
    >>> join, out = ExactAdd(), torch.randn(3)
    >>> x = join.enter(torch.randn(3))
    >>> torch.equal(join.invert(join.apply(x, out), out), x)
    True
    """

    grid: float = 2.0**-13
    range: InitVar[float | None] = None
    gain: float = field(default=1.0, kw_only=True)

    def __post_init__(self, range: float | None) -> None:
        if range is not None:
            if self.grid != 2.0**-13:
                raise ValueError("ExactAdd: give grid or range, not both")
            if not isinstance(range, (int, float)) or not 0 < range < math.inf:
                raise ValueError(f"ExactAdd: range must be a positive number, not {range!r}")
            object.__setattr__(self, "grid", 2.0 ** (math.ceil(math.log2(range)) - 24))
        if isinstance(self.gain, bool) or not isinstance(self.gain, (int, float)) or not math.isfinite(self.gain):
            raise ValueError(f"ExactAdd: gain must be a finite number, not {self.gain!r}")
        if not isinstance(self.grid, (int, float)) or self.grid <= 0 or math.frexp(self.grid)[0] != 0.5:
            raise ValueError(f"ExactAdd: grid must be a power of two such as 2**-13, not {self.grid!r}")

    def limit(self, dtype: torch.dtype) -> float:
        """The magnitude that streams of this dtype must stay below."""
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"ExactAdd needs float32 or float64 streams, not {dtype}; use .float() on what enters: under autocast "
                "the networks still compute in low precision"
            )
        return self.grid * 2.0 ** (24 if dtype == torch.float32 else 53)

    def enter(self, stream: Tensor, flag: Tensor | None = None) -> Tensor:
        """An entering stream, rounded to the grid."""
        return rounded_add(torch.zeros_like(stream), stream, self.grid, 1.0, flag, self.limit(stream.dtype))

    def apply(self, target: Tensor, *out: Tensor, flag: Tensor | None = None) -> Tensor:
        return rounded_add(target, out[0], self.grid, self.gain, flag, self.limit(target.dtype))

    def invert(self, target: Tensor, *out: Tensor) -> Tensor:
        return rounded_add(target, out[0], self.grid, -self.gain, None, self.limit(target.dtype))

    def inverse(self) -> Join:
        return replace(self, gain=-self.gain)

    def scaled(self, gain: float) -> Join:
        return replace(self, gain=self.gain * gain)


JOINS = frozenset({Add, Scale, Affine, ExactAdd})
"""These draw no random numbers, read no tensors of their own, and lay out their result as the target is laid out."""
