"""`target + grid * round(out * gain / grid)`, in one pass over memory, with the gradient of `target + out * gain`.

The arithmetic behind `ExactAdd`, and the sum behind `Add`. On CUDA a Triton kernel does it at once; elsewhere,
or where the tensors are not contiguous, plain operators give the same bits: the product with a power of two is exact,
so only the rounding and the sum can differ, and both are correctly rounded everywhere.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .surroundings import transformed


def rounded_add(target: Tensor, out: Tensor, grid: float, gain: float, flag: Tensor | None, limit: float) -> Tensor:
    """The sum on the grid. Where a magnitude reaches `limit`, `flag` (one byte on the device) is set; no waiting."""
    if transformed():
        return RoundedAdd.apply(target, out, grid, gain, flag, limit)  # type: ignore[return-value]
    if torch.is_grad_enabled():
        return Direct.apply(target, out, grid, gain, flag, limit)  # type: ignore[return-value]
    return RoundedAdd.forward(target, out, grid, gain, flag, limit)


class RoundedAdd(torch.autograd.Function):
    """Straight-through: differentiated as if nothing were rounded. It saves nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(target: Tensor, out: Tensor, grid: float, gain: float, flag: Tensor | None, limit: float) -> Tensor:
        if _fused(target, out):
            return _kernels().rounded_add(target, out, grid, gain, flag, limit)
        steps = (out.to(target.dtype) * (gain / grid)).round_()
        new = torch.add(target, steps, alpha=grid)
        if flag is not None and new.numel():
            low, high = torch.aminmax(new)
            flag.logical_or_(~(torch.maximum(-low, high) < limit))  # so that NaN counts
        return new

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, out, _, ctx.gain, _, _ = inputs
        ctx.dtype = out.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return (None,) * 6
        for_out = grad if ctx.gain == 1 else grad * ctx.gain
        return grad, for_out.to(ctx.dtype), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, target: Tensor, out: Tensor, *_: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return target + out.to(target.dtype) * ctx.gain


class Direct(torch.autograd.Function):
    """The same where nothing is transformed. Torch inspects the signature of a function with `setup_context` at each
    call, which takes longer than the sum; of one without, as here, it does not."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.set_materialize_grads(False)  # no gradient stays none: an optimizer would take zeros for a reason to decay
        RoundedAdd.setup_context(ctx, inputs, inputs[0])
        return RoundedAdd.forward(*inputs)

    backward = staticmethod(RoundedAdd.backward)  # pyright: ignore[reportAssignmentType]


def added(target: Tensor, out: Tensor, *, negative: bool = False) -> Tensor:
    """`target + out` or `target - out`. Torch takes half as long again where the dtypes differ, as under autocast, so
    large tensors go through a kernel that does not; smaller ones would wait for its launch."""
    large = target.is_cuda and target.numel() >= 2**22 and not torch.compiler.is_compiling()
    if large and out.dtype in (torch.bfloat16, torch.float16) and _fused(target, out):
        if not torch.is_grad_enabled():
            return _kernels().added(target, out, negative=negative)
        if not negative:
            return Added.apply(target, out)  # type: ignore[return-value]
    return target - out if negative else target + out


class Added(torch.autograd.Function):
    """`target + out` by the kernel, for autograd. It saves nothing."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, out: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.dtype = out.dtype
        return _kernels().added(target, out, negative=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (grad, None if grad is None else grad.to(ctx.dtype))


def _fused(target: Tensor, out: Tensor) -> bool:
    """Whether the kernels can be used: plain float32 tensors on a CUDA device, with Triton installed."""
    return (
        target.is_cuda
        and target.dtype == torch.float32
        and out.device == target.device
        and target.is_contiguous()
        and out.is_contiguous()
        and type(target) is type(out) is Tensor  # not fake ones
        and not transformed()
        and _kernels() is not None
    )


@functools.cache
def _kernels() -> Any:
    """The module of the kernels; None where there is no Triton."""
    try:
        from . import kernels
    except ImportError:
        return None
    return kernels
