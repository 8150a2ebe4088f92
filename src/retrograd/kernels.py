"""The Triton kernel behind rounding.py. Imported only where there is a CUDA device and Triton."""

# ruff: noqa: SIM102 - a condition on a constexpr stands alone, so that it is decided at compile time

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]

BLOCK = 2048


@triton.jit
def _rounded_add(target, out, new, flag, size, steps, grid, limit, noting: tl.constexpr, block: tl.constexpr):
    where = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = where < size
    old = tl.load(target + where, mask=inside, other=0.0)
    given = tl.load(out + where, mask=inside, other=0.0).to(old.dtype)
    value = old + libdevice.rint(given * steps.to(old.dtype)) * grid.to(old.dtype)
    tl.store(new + where, value, mask=inside)
    if noting:
        if tl.max((tl.abs(value) >= limit.to(old.dtype)).to(tl.int32), axis=0) > 0:
            tl.store(flag, 1)


def rounded_add(target: Tensor, out: Tensor, grid: float, gain: float, flag: Tensor | None, limit: float) -> Tensor:
    """`target + grid * rint(out * gain / grid)` for contiguous tensors on one device."""
    new, size = torch.empty_like(target), target.numel()
    if size:
        noted = target if flag is None else flag.view(torch.uint8)
        with torch.cuda.device(target.device):
            _rounded_add[(triton.cdiv(size, BLOCK),)](  # pyright: ignore[reportIndexIssue]
                target, out, new, noted, size, gain / grid, grid, limit, flag is not None, BLOCK
            )
    return new
