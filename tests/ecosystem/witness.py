"""What ran inside the updates: how often linear layers did, in which phase and precision."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg


@contextlib.contextmanager
def linears() -> Iterator[Counter[tuple[str, torch.dtype]]]:
    """Calls of linear layers inside updates, by ("forward" or "replay", dtype of the output)."""
    seen: Counter[tuple[str, torch.dtype]] = Counter()

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if isinstance(module, nn.Linear) and (phase := rg.phase()) is not None:
            seen["replay" if phase.replaying else "forward", output.dtype] += 1

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


def assert_reversed(seen: Counter[tuple[str, torch.dtype]], dtype: torch.dtype = torch.bfloat16) -> None:
    """Every linear layer ran in the forward and once more in a replay, in the same precision."""
    assert set(seen) == {("forward", dtype), ("replay", dtype)}
    assert seen["forward", dtype] == seen["replay", dtype]
