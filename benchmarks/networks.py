"""The networks that every contender runs: pre-norm causal attention (f) and a feed-forward network (g), in pairs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configurations import Configuration

HEAD = 64
Blocks = list[tuple[nn.Module, nn.Module]]


class Attention(nn.Module):
    """Pre-norm causal self-attention."""

    def __init__(self, width: int, dropout: float = 0.0, head: int = HEAD) -> None:
        super().__init__()
        self.dropout, self.head = dropout, head
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, -1, self.head).permute(2, 0, 3, 1, 4)  # (B, H, N, head) each
        out = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, d))
        return F.dropout(out, self.dropout) if self.dropout else out


class FeedForward(nn.Module):
    """Pre-norm feed-forward network, four times as wide inside."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(F.gelu(self.up(self.norm(x))))
        return F.dropout(out, self.dropout) if self.dropout else out


def make_blocks(configuration: Configuration, device: torch.device, seed: int, head: int = HEAD) -> Blocks:
    """The pairs (f, g), with gradients allocated: the same weights for the same seed and device."""
    torch.manual_seed(seed)
    size = configuration.width, configuration.dropout
    with device:
        blocks = [(Attention(*size, head), FeedForward(*size)) for _ in range(configuration.blocks)]
    for parameter in parameters(blocks):
        parameter.grad = torch.zeros_like(parameter)
    return blocks


def make_input(configuration: Configuration, device: torch.device, seed: int) -> Tensor:
    """The input: the same for the same seed and device. It needs a gradient, as the output of an embedding does."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (configuration.batch, configuration.tokens, configuration.width)
    return torch.randn(shape, generator=generator, device=device).requires_grad_()


def parameters(blocks: Blocks) -> list[nn.Parameter]:
    """All weights, in order."""
    return [parameter for pair in blocks for network in pair for parameter in network.parameters()]
