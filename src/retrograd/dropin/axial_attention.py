"""`axial_attention.reversible.ReversibleSequence` (axial-attention 0.6.1), on this engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .. import Update
from ._blocks import Pairs, warn_ignored


class ReversibleSequence(Pairs):
    """The input becomes both streams; the output is their mean; `arg_route` says whether f and g get the keywords."""

    def __init__(self, blocks: Any) -> None:
        super().__init__(blocks)

    def forward(self, x: Tensor, arg_route: tuple[bool, bool] = (True, True), **kwargs: Any) -> Tensor:
        return super().forward(x, arg_route=arg_route, **kwargs)

    def updates(self, arg_route: tuple[bool, bool] = (True, True), **kwargs: Any) -> Iterable[Update]:
        if not any(arg_route):
            warn_ignored([*kwargs], f"arg_route={arg_route} gives it to no network")
        for_f, for_g = (kwargs if routed else {} for routed in arg_route)
        return self.coupled([(f, g, for_f, for_g) for f, g in self.pairs()])


CLASSES = [ReversibleSequence]
