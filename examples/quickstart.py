"""A reversible model from the first line to the last: it learns the source code of Python's standard library, byte by
byte, in the activation memory of one block. (`retrograd demo` shows what that saves.)

    python examples/quickstart.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import retrograd as rg


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.project, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, width)
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class ByteModel(nn.Module):
    """Predicts the next byte. The blocks are a `ReversibleSequence`: nothing else here knows about reversibility."""

    def __init__(self, depth: int, width: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = rg.ReversibleSequence([(Attention(width), feed_forward(width)) for _ in range(depth)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
        for parameter in self.blocks.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss, in bits per byte."""
        x = self.embed(tokens[:, :-1]) + self.place[: tokens.shape[1] - 1]
        logits = self.head(self.blocks(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / 0.6931


def corpus() -> Tensor:
    """The standard library's own source, as bytes."""
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(data: Tensor, length: int, batch: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - length, (batch,), generator=generator)
        yield torch.stack([data[start : start + length] for start in starts.tolist()])


def main(depth: int = 24, width: int = 64, length: int = 128, steps: int = 100) -> float:
    torch.manual_seed(0)
    model = ByteModel(depth, width, length)
    stream = batches(corpus(), length, batch=4, seed=0)
    print(rg.check(model, next(stream)))  # are the gradients those of kept activations?
    print(rg.measure(model, next(stream)))  # what does a step hold?
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loss = torch.zeros(())
    for step in range(1, steps + 1):
        loss = model(next(stream))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: {loss.item():.2f} bits per byte (8 is guessing)", flush=True)
    return loss.item()


if __name__ == "__main__":
    main()
