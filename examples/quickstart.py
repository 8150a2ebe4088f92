"""Train a reversible language model on the source code of Python's standard library, and see what it saves.

Three short runs over the same weights and the same bytes: kept activations (plain autograd), checkpointed, reversed.
Each prints what it held in memory besides weights and gradients; then the reversed one goes on and learns.

    python examples/quickstart.py --depth 24 --steps 60
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from retrograd.measure import LiveBytes
from retrograd.sizes import format_bytes


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.project, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, width)
        batch, length, width = x.shape
        q, k, v = self.project(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )  # (batch, heads, length, width / heads)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


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

    def forward(self, tokens: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The loss, in bits per byte; `run` is another way through the blocks."""
        x = self.embed(tokens[:, :-1]) + self.place[: tokens.shape[1] - 1]
        logits = self.head((run or self.blocks)(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / 0.6931


def checkpointed(blocks: rg.ReversibleSequence) -> Callable[[Tensor], Tensor]:
    """The same blocks under torch.utils.checkpoint, for comparison."""

    def block(f: nn.Module, g: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a = a + f(b)
        return a, b + g(a)

    def run(x: Tensor) -> Tensor:
        a = b = x
        for f, g in blocks.pairs():
            a, b = checkpoint(block, f, g, a, b, use_reentrant=False)
        return (a + b) / 2

    return run


def corpus() -> Tensor:
    """The standard library's own source, as bytes."""
    library = Path(argparse.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(data: Tensor, length: int, batch: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - length, (batch,), generator=generator)
        yield torch.stack([data[start : start + length] for start in starts.tolist()])


def progress(steps: int, what: str) -> Iterable[int]:
    """A bar in a terminal, one line in a pipe."""
    try:
        from rich.progress import track
    except ImportError:
        return range(steps)
    return track(range(steps), what, transient=True) if sys.stdout.isatty() else range(steps)


def train(
    model: ByteModel, run: Callable[[Tensor], Tensor] | None, data: Tensor, options: argparse.Namespace, what: str
):
    """A few steps from the same start; the peak bytes, seconds per step, losses and first gradients."""
    model.load_state_dict(options.start)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # there beforehand, so that they are not counted as activations
    stream = batches(data, options.length, options.batch, seed=0)
    with LiveBytes() as memory:
        model(next(stream), run).backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    losses, start = [], time.perf_counter()
    for _ in progress(options.steps, what):
        loss = model(next(stream), run)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return memory.peak, (time.perf_counter() - start) / options.steps, losses, grads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("depth", 24), ("width", 64), ("length", 128), ("batch", 4), ("steps", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--more", type=int, default=40, help="further steps of the reversed model")
    options = parser.parse_args()

    torch.manual_seed(0)
    data = corpus()
    model = ByteModel(options.depth, options.width, options.length)
    options.start = {key: value.clone() for key, value in model.state_dict().items()}
    print(
        f"{options.depth} blocks of width {options.width}, {options.batch} x {options.length} bytes a step, "
        f"on {len(data) / 1e6:.1f} MB of Python's standard library\n"
    )
    print(f"{'':14}{'activations':>14}{'step':>10}{'bits/byte':>12}{'gradients':>14}")
    reference: list[Tensor] = []
    for what in ("kept", "checkpointed", "reversed"):
        model.blocks.policy = rg.Reverse() if what == "reversed" else rg.Keep()
        run = checkpointed(model.blocks) if what == "checkpointed" else None
        peak, seconds, losses, grads = train(model, run, data, options, what)
        reference = reference or grads
        worst = max(((a - b).norm() / b.norm()).item() for a, b in zip(grads, reference, strict=True))
        agree = "" if what == "kept" else f"{worst:.0e} off"
        print(f"{what:14}{format_bytes(peak):>14}{seconds * 1e3:>7.0f} ms{losses[-1]:>12.2f}{agree:>14}")

    options.steps = options.more
    print(f"\nThe reversed model trains on for {options.more} steps:")
    _, _, losses, _ = train(model, None, data, options, "training")
    print(f"bits per byte {losses[0]:.2f} at the first step, {sum(losses[-5:]) / 5:.2f} at the last (8 is guessing)")


if __name__ == "__main__":
    main()
