"""The Triton kernels behind rounding.py. Imported only where there is a CUDA device and Triton."""

# ruff: noqa: SIM102 - a condition on a constexpr stands alone, so that it is decided at compile time

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]

BLOCK = 2048


@triton.jit(do_not_specialize_on_alignment=["flag"])
def _rounded_add(target, out, new, flag, size, steps, grid, limit, noting: tl.constexpr, block: tl.constexpr):
    where = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = where < size
    old = tl.load(target + where, mask=inside, other=0.0)
    given = tl.load(out + where, mask=inside, other=0.0).to(old.dtype)
    value = old + libdevice.rint(given * steps.to(old.dtype)) * grid.to(old.dtype)
    tl.store(new + where, value, mask=inside)
    if noting:
        if tl.min((tl.abs(value) < limit.to(old.dtype)).to(tl.int32), axis=0) == 0:  # so that NaN counts
            tl.store(flag, 1)


@triton.jit
def _added(target, out, new, size, negative: tl.constexpr, block: tl.constexpr):
    where = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = where < size
    old = tl.load(target + where, mask=inside, other=0.0)
    given = tl.load(out + where, mask=inside, other=0.0).to(old.dtype)
    tl.store(new + where, old - given if negative else old + given, mask=inside)


def rounded_add(target: Tensor, out: Tensor, grid: float, gain: float, flag: Tensor | None, limit: float) -> Tensor:
    """`target + grid * rint(out * gain / grid)` for contiguous float32 targets, with `out` on the same device."""
    noting = flag is not None
    noted = target if flag is None else flag.view(torch.uint8)
    return _launch(_rounded_add, target, out, (noted,), (gain / grid, grid, limit, noting), noting)


def added(target: Tensor, out: Tensor, *, negative: bool) -> Tensor:
    """`target + out` or `target - out`, for the same tensors."""
    return _launch(_added, target, out, (), (negative,), negative)


# Triton looks at every argument at each launch, which takes the host longer than the kernel takes the device. What it
# would find depends on these few things, so the compiled kernel is launched directly.
_compiled: dict[tuple[Any, ...], Any] = {}


def _launch(
    kernel: Any, target: Tensor, out: Tensor, more: tuple[Any, ...], rest: tuple[Any, ...], *kind: Any
) -> Tensor:
    """A new tensor of the target's size, made by a kernel. `kind`: what else its compilation depends on."""
    new, size = torch.empty_like(target), target.numel()
    if not size:
        return new
    blocks = (triton.cdiv(size, BLOCK), 1, 1)
    arguments = (target, out, new, *more, size, *rest, BLOCK)
    aligned = (target.data_ptr() | out.data_ptr() | new.data_ptr()) % 16 == 0 and size % 16 == 0 and size < 2**31
    key = (kernel, target.device, out.dtype, *kind) if aligned and size > 1 else None
    with torch.cuda.device(target.device):
        if key is None:
            kernel[blocks](*arguments)
        elif (known := _compiled.get(key)) is not None:
            known[blocks](*arguments)
        else:
            _compiled[key] = kernel[blocks](*arguments)
    return new
