"""Small networks for the tests, and the plain loop that every reversible one must agree with.

`Plain` is written without retrograd: same blocks, same parameter names, activations kept by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import retrograd as rg

WIDTH = 6


class Attention(nn.Module):
    """One head; keys and values from `context` if there is one."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.dropout = dropout

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        key, value = self.key_value(normed if context is None else context).chunk(2, -1)
        dropout = self.dropout if self.training else 0.0
        return functional.scaled_dot_product_attention(self.query(normed), key, value, dropout_p=dropout)


def feed_forward(width: int, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
    )


def pair(width: int = WIDTH, dropout: float = 0.0) -> tuple[nn.Module, nn.Module]:
    return Attention(width, dropout), feed_forward(width, dropout)


def sequence(depth: int = 3, dropout: float = 0.0, **options: Any) -> rg.ReversibleSequence:
    """A float64 ReversibleSequence of attention and feed-forward pairs."""
    return rg.ReversibleSequence([pair(WIDTH, dropout) for _ in range(depth)], **options).double()


class Plain(nn.Module):
    """The same blocks, in a loop that keeps its activations."""

    def __init__(self, blocks: Iterable[Sequence[nn.Module]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(block) for block in blocks)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        a = b = x
        for f, g in self.blocks:
            a = a + f(b, **kwargs)
            b = b + g(a)
        return (a + b) / 2


def tokens(*, requires_grad: bool = True) -> Tensor:
    """Two sequences of five tokens."""
    return torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=requires_grad)


def loss_of(y: Tensor) -> Tensor:
    """Its gradient depends on y, and no two elements have the same weight."""
    weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view_as(y)
    return (weights * y.sin()).sum()


def gradients(forward: Callable[..., Tensor], wanted: Iterable[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """The output of `forward`, and the gradients of `loss_of` it: always from the same seed."""
    torch.manual_seed(7)
    y = forward(*args, **kwargs)
    return [y.detach(), *torch.autograd.grad(loss_of(y), list(wanted))]


def assert_same(actual: Any, expected: Any) -> None:
    """Equal up to the rounding that reconstruction costs in float64."""
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def differs(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return any(not torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(actual, expected, strict=True))
