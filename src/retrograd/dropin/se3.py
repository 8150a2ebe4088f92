"""`ReversibleSequence` and `SequentialSequence` of se3-transformer-pytorch 0.9.0, on this engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .. import Update
from ._blocks import Pairs

Fiber = dict[str, Tensor]
"""Features by degree: `{"0": (b, n, c, 1), "1": (b, n, c, 3), ...}`. Channel counts may differ between degrees."""


class ReversibleSequence(Pairs):
    """Streams are dictionaries; the input becomes both, the output is their mean. f gets all keywords, g none."""

    def __init__(self, blocks: Any) -> None:
        super().__init__(blocks)

    def updates(self, **kwargs: Any) -> Iterable[Update]:
        return self.coupled([(f, g, kwargs, {}) for f, g in self.pairs()])


class SequentialSequence(nn.Module):
    """The plain counterpart: `x = attention(x, **kwargs)`, then `x = feed_forward(x)`."""

    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Fiber, **kwargs: Any) -> Fiber:
        for attention, feed_forward in self.blocks:
            x = feed_forward(attention(x, **kwargs))
        return x


CLASSES = [ReversibleSequence, SequentialSequence]
