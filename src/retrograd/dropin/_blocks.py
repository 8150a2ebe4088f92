"""What the published classes have in common: blocks whose networks sit under `.net`, so that checkpoints fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

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
        if hasattr(self, "unshard"):  # fully_shard(block): the hooks that gather the weights run where it is called
            return [Through(self, name) for name, _ in self.named_children()]
        return [cast(Net, child).net for child in self.children()]

    def forward(self, network: str, *args: Any, **kwargs: Any) -> Any:
        return cast(Net, getattr(self, network)).net(*args, **kwargs)


class Through(nn.Module):
    """A network of a block, called through the block."""

    def __init__(self, block: Block, name: str) -> None:
        super().__init__()
        self.block, self.name = block, name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block(self.name, *args, **kwargs)


class Pairs(ReversibleSequence):
    """A `ReversibleSequence` with blocks of the published form."""

    def __init__(self, blocks: Any, **options: Any) -> None:
        super().__init__([tuple(block) for block in blocks], **options)
        self.blocks = nn.ModuleList(Block(f=f, g=g) for f, g in super().pairs())

    def pairs(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        for block in self.blocks:
            f, g = cast(Block, block).networks()
            yield f, g


def own_masks(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords, with copies of the boolean tensors: nuwa changes a mask in place after the encoder has read it."""
    return {
        key: value.clone() if isinstance(value, Tensor) and value.dtype == torch.bool else value
        for key, value in kwargs.items()
    }


def warn_ignored(keys: list[str], why: str) -> None:
    """Say what the published class would silently ignore, and what we ignore with it."""
    if keys:
        warnings.warn(f"retrograd: {', '.join(map(repr, keys))}: {why}", stacklevel=4)
