"""Axial attention: images, video, anything on a grid, trained in the activation memory of one block.

Attention along one axis at a time, in turn from block to block, costs the sum of the axes' lengths for each position
where full attention costs their product (Ho et al., 2019: Axial Attention in Multidimensional Transformers). Each block
is a reversible pair of attention along one axis and a feed-forward. `AxialClassifier` reads a whole grid;
`AxialPixels` predicts each value from those before it, in the order of reading.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import retrograd as rg


class AxialClassifier(nn.Module):
    """The class of a grid of vectors: (batch, *shape, channels) -> (batch, classes). An image has two axes, video 3.

    Block i attends along axis `i % len(shape)`, so `depth` is at least the number of axes. `heads` is `width // 32`
    unless told.

    >>> model = AxialClassifier(shape=(8, 8), channels=3, classes=10, depth=2, width=32)
    >>> model(torch.randn(4, 8, 8, 3)).shape
    torch.Size([4, 10])
    """

    def __init__(
        self,
        shape: Sequence[int],
        channels: int,
        classes: int,
        depth: int,
        width: int,
        *,
        heads: int | None = None,
        dropout: float = 0.0,
        policy: rg.Policy = rg.Reverse(),
        join: rg.Join = rg.Add(),
    ) -> None:
        super().__init__()
        heads = checked(
            self, shape, {"channels": channels, "classes": classes, "depth": depth, "width": width}, heads, dropout
        )
        self.shape, self.channels = tuple(shape), channels
        self.embed, self.positions = nn.Linear(channels, width), AxialPositions(self.shape, width)
        attentions = [AxialAttention(width, heads, i % len(self.shape), dropout=dropout) for i in range(depth)]
        self.blocks = reversible(attentions, width, dropout, policy, join)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, *shape, channels)
        if tuple(x.shape[1:]) != (*self.shape, self.channels):
            raise ValueError(
                f"AxialClassifier expects (batch, {', '.join(map(str, self.shape))}, {self.channels}), that is shape "
                f"{self.shape} of {self.channels} channels, the channels last, not {tuple(x.shape)}"
            )
        x = self.blocks(self.embed(x) + self.positions())  # (B, *shape, C)
        return self.head(self.norm(x).flatten(1, -2).mean(1))  # (B, classes)


class AxialPixels(nn.Module):
    """The next value at each place of a grid, in the order of reading: (batch, *shape) -> (batch, *shape, levels).

    The logits at a place depend on the values before it, on all of them, and on no other. Values are whole numbers
    below `levels`. Colours are one more axis: `shape=(32, 32, 3)` predicts red, then green, then blue.

    There are `depth` blocks for each axis. Those of axis k see what lies before along it, and everything behind that
    along the later axes: for an image, first the rows above, then what is left of the pixel in its row. The blocks of
    each axis are a program of their own: an `Auto` budget is for one axis.

    >>> model = AxialPixels(shape=(8, 8), levels=17, depth=2, width=32)
    >>> images = torch.randint(17, (4, 8, 8))
    >>> model(images).shape
    torch.Size([4, 8, 8, 17])
    >>> model.loss(images).backward()  # in nats per value
    """

    def __init__(
        self,
        shape: Sequence[int],
        levels: int,
        depth: int,
        width: int,
        *,
        heads: int | None = None,
        dropout: float = 0.0,
        policy: rg.Policy = rg.Reverse(),
        join: rg.Join = rg.Add(),
    ) -> None:
        super().__init__()
        heads = checked(self, shape, {"levels": levels, "depth": depth, "width": width}, heads, dropout)
        self.shape, self.levels, self.dropout = tuple(shape), levels, dropout
        self.embed, self.positions = nn.Embedding(levels, width), AxialPositions(self.shape, width)
        self.stages = nn.ModuleList()
        for first in range(len(self.shape)):
            axes = range(first, len(self.shape))
            attentions = [
                AxialAttention(width, heads, axis, causal=axis == first, dropout=dropout)
                for axis in (axes[i % len(axes)] for i in range(depth))
            ]
            self.stages.append(reversible(attentions, width, dropout, policy, join))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, levels)

    def forward(self, values: Tensor) -> Tensor:  # (B, *shape)
        if tuple(values.shape[1:]) != self.shape or values.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"AxialPixels expects whole numbers (int64 or int32) of shape (batch, "
                f"{', '.join(map(str, self.shape))}), not {values.dtype} of shape {tuple(values.shape)}"
            )
        try:
            embedded = self.embed(values)  # (B, *shape, C)
        except IndexError:  # on CUDA it is the kernel that asserts: looking at values would wait for the device
            raise ValueError(
                f"AxialPixels: values must lie between 0 and {self.levels - 1}, not between {values.min()} and "
                f"{values.max()}"
            ) from None
        context = self.positions()
        for axis, blocks in enumerate(self.stages):
            # At a place, the context knows what comes before it along the axes so far. The blocks of this axis add
            # what comes before along this one: shifted by one, attention up to a place sees what is before it.
            context = blocks(context + shifted(embedded, axis))
        return self.head(self.norm(context))  # (B, *shape, levels)

    def loss(self, values: Tensor) -> Tensor:
        """The mean cross entropy in nats of each value, given those before it."""
        return functional.cross_entropy(self(values).flatten(0, -2), values.flatten().long())

    @torch.no_grad()
    def generate(self, batch: int, *, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """Draw grids value by value, each with a pass of the whole model: (batch, *shape)."""
        if not temperature > 0 or batch < 1:
            raise ValueError(
                f"generate: temperature must be above 0 and batch 1 or more, not {temperature!r} and {batch!r}"
            )
        if self.training and self.dropout:
            raise RuntimeError("generate: the model is in training mode and would drop channels; call eval() first")
        values = torch.zeros(batch, *self.shape, dtype=torch.long, device=self.head.weight.device)
        for place in range(math.prod(self.shape)):
            logits = self(values).flatten(1, -2)[:, place].float()  # (B, levels)
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            values.view(batch, -1)[:, place] = drawn[:, 0]
        return values


class AxialAttention(nn.Module):
    """Attention along one axis of (batch, *axes, width). Places that differ along the other axes do not meet.

    >>> attention = AxialAttention(width=8, heads=2, axis=1)
    >>> attention(torch.randn(4, 5, 6, 8)).shape  # within each of the five rows
    torch.Size([4, 5, 6, 8])
    """

    def __init__(self, width: int, heads: int, axis: int, *, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.axis, self.causal, self.dropout = heads, axis, causal, dropout
        self.norm = nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, *axes, C)
        moved = self.norm(x).movedim(1 + self.axis, -2)  # (B, *other axes, T, C)
        rows = moved.flatten(0, -3)  # (N, T, C)
        q, k, v = self.project(rows).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (N, H, T, C / H)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        mixed = self.out(mixed.transpose(1, 2).flatten(2))  # (N, T, C)
        mixed = mixed.view(moved.shape).movedim(-2, 1 + self.axis)  # (B, *axes, C)
        return functional.dropout(mixed, self.dropout, self.training)


class FeedForward(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, *axes, C)
        mixed = self.out(functional.gelu(self.project(self.norm(x))))
        return functional.dropout(mixed, self.dropout, self.training)


class AxialPositions(nn.Module):
    """A learned vector for each place along each axis; the position of a place is their sum."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        ones = [1] * len(shape)
        self.axes = nn.ParameterList(
            0.5 * torch.randn(1, *ones[:axis], length, *ones[axis + 1 :], width) for axis, length in enumerate(shape)
        )

    def forward(self) -> Tensor:
        return functools.reduce(torch.add, self.axes)  # (1, *shape, C)


def reversible(
    attentions: Sequence[AxialAttention], width: int, dropout: float, policy: rg.Policy, join: rg.Join
) -> rg.ReversibleSequence:
    """The blocks, each an attention and a feed-forward. What they add sums up to about one at any depth."""
    pairs = [(attention, FeedForward(width, dropout)) for attention in attentions]
    with torch.no_grad():
        for network in (network for pair in pairs for network in pair):
            for linear in (network.project, network.out):
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
                nn.init.zeros_(linear.bias)
            network.out.weight /= math.sqrt(2 * len(pairs))
    return rg.ReversibleSequence(pairs, policy=policy, join=join)


def shifted(x: Tensor, axis: int) -> Tensor:
    """Each place gets what was before it along an axis, the first one zero: (B, *axes, C)."""
    before = x.narrow(1 + axis, 0, x.shape[1 + axis] - 1)
    return torch.cat((torch.zeros_like(x.narrow(1 + axis, 0, 1)), before), dim=1 + axis)


def checked(model: nn.Module, shape: Sequence[int], sizes: dict[str, int], heads: int | None, dropout: float) -> int:
    """The number of heads, once everything else is something that the model can have."""
    name = type(model).__name__
    if not isinstance(shape, Sequence) or not shape or any(not isinstance(n, int) or n < 1 for n in shape):
        raise ValueError(f"{name}: shape is the length of each axis, such as (8, 8), not {shape!r}")
    for what, size in (sizes | ({} if heads is None else {"heads": heads})).items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: {what} must be a positive whole number, not {size!r}")
    depth, width = sizes["depth"], sizes["width"]
    if depth < len(shape):
        raise ValueError(
            f"{name}: depth {depth} for {len(shape)} axes; each block attends along one axis, so at least {len(shape)}"
        )
    heads = max(width // 32, 1) if heads is None else heads
    if width % heads:
        raise ValueError(f"{name}: width {width} must be a multiple of the number of heads, not of {heads}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"{name}: dropout must be a probability below 1, not {dropout!r}")
    return heads
