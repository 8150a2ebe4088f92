"""What the published classes have in common: blocks whose networks sit under `.net`, so that checkpoints fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from .. import ReversibleSequence


class Net(nn.Module):
    """A network under the name `net`, where the published checkpoints have it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


class Block(nn.Module):
    """Networks by name: `f.net`, `g.net`, and so on."""

    def __init__(self, **networks: nn.Module) -> None:
        super().__init__()
        for name, network in networks.items():
            self.add_module(name, Net(network))

    def networks(self) -> list[nn.Module]:
        return [cast(Net, child).net for child in self.children()]


class Pairs(ReversibleSequence):
    """A `ReversibleSequence` with blocks of the published form."""

    def __init__(self, blocks: Any, **options: Any) -> None:
        super().__init__([tuple(block) for block in blocks], **options)
        self.blocks = nn.ModuleList(Block(f=f, g=g) for f, g in super().pairs())

    def pairs(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        for block in self.blocks:
            f, g = cast(Block, block).networks()
            yield f, g


def warn_ignored(keys: list[str], why: str) -> None:
    """Say what the published class would silently ignore, and what we ignore with it."""
    if keys:
        warnings.warn(f"retrograd: {', '.join(map(repr, keys))}: {why}", stacklevel=4)
