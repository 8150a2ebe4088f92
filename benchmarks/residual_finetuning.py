"""What becomes of a residual network that was trained plainly, when its blocks are run as a reversible stack?

A byte-level language model is trained on Python's own source, plainly. Then its blocks are converted with
`Midpoint.from_residual` and `Momentum.from_residual` and trained on, beside two controls: the plain model, trained on
for as many steps, and the reversible stacks from scratch. The loss on held-out text is noted on the way.

    python benchmarks/residual_finetuning.py
"""

from __future__ import annotations

import argparse
import copy
import datetime
import itertools
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import retrograd as rg

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))
from bench import commit  # noqa: E402
from quickstart import Attention, ByteModel, batches, corpus, feed_forward  # noqa: E402

CONVERSIONS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "plain": lambda blocks: blocks,
    "Midpoint": rg.Midpoint.from_residual,
    "Momentum 0.9": lambda blocks: rg.Momentum.from_residual(blocks, gamma=0.9),
    "Momentum 0.5": lambda blocks: rg.Momentum.from_residual(blocks, gamma=0.5),
}
EVERY = 20  # steps from one look at the held-out text to the next


class Block(nn.Module):
    """A plain pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(width), feed_forward(width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, width)
        x = x + self.attention(x)
        return x + self.feed_forward(x)


def plain_model(options: argparse.Namespace) -> ByteModel:
    torch.manual_seed(options.seed)
    model = ByteModel(0, options.width, options.length)
    model.blocks = nn.Sequential(*(Block(options.width) for _ in range(options.depth)))
    for parameter in model.blocks.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def train(model: nn.Module, steps: int, name: str, texts: tuple[Tensor, Tensor], options: argparse.Namespace):
    """Train with a warm-up and then at a constant rate; the losses on the held-out text, from before the first step."""
    seen, held_out = texts
    optimizer = torch.optim.AdamW(model.parameters(), options.rate)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=50)
    stream = batches(seen, options.length, options.batch, options.seed)
    losses = {0: loss_on(model, held_out, options)}
    for step in range(1, steps + 1):
        loss = model(next(stream))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % EVERY == 0 or step == steps:
            losses[step] = loss_on(model, held_out, options)
        if step % 200 == 0:
            print(f"{name}: step {step}, {losses[step]:.3f} bits per byte", flush=True)
    return losses


@torch.no_grad()
def loss_on(model: nn.Module, text: Tensor, options: argparse.Namespace) -> float:
    """Bits per byte on the same windows each time."""
    windows = itertools.islice(batches(text, options.length, 16, seed=1), options.windows // 16)
    return sum(model(window).item() for window in windows) / (options.windows // 16)


def plot(curves: dict[str, dict[int, float]], target: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    colours = dict(zip(CONVERSIONS, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for name, losses in curves.items():
        kind, _, scratch = name.partition(", ")
        axes.plot(*zip(*losses.items(), strict=True), "--" if scratch else "-", color=colours[kind], lw=1, label=name)
    axes.axhline(target, color="grey", lw=0.5)
    axes.set(xlabel="steps after the conversion", ylabel="bits per byte, held-out text", ylim=(target - 0.4, 4.5))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"depth": 12, "width": 64, "length": 64, "batch": 8, "steps": 3000, "more": 1000, "windows": 64, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=1e-3)
    options = parser.parse_args()

    data = corpus()
    cut = len(data) * 19 // 20
    texts = data[:cut], data[cut:]
    trained = plain_model(options)
    before = train(trained, options.steps, "plain", texts, options)
    target = before[options.steps]

    curves = {}
    for name, convert in CONVERSIONS.items():
        model = copy.deepcopy(trained)
        model.blocks = convert(model.blocks)
        curves[name] = train(model, options.more, name, texts, options)
        if name != "plain":
            model = plain_model(options)
            model.blocks = convert(model.blocks)
            scratch = f"{name}, from scratch"
            curves[scratch] = train(model, options.more, scratch, texts, options)

    back = {name: next((step for step, loss in c.items() if loss <= target), None) for name, c in curves.items()}
    result = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "hardware": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "commit": commit(),
        "sizes": {name: getattr(options, name) for name in [*sizes, "rate"]},
        "plain_loss_at_conversion": target,
        "loss_right_after": {name: losses[0] for name, losses in curves.items()},
        "steps_to_get_back": back,
        "last_loss": {name: losses[options.more] for name, losses in curves.items()},
        "plain_before": before,
        "after": curves,
    }
    path = HERE / "results" / f"{datetime.date.today()}-residual-finetuning-cpu.json"
    path.write_text(json.dumps(result, indent=1))
    plot(curves, target, path.with_suffix(".png"))
    print(f"plain loss at conversion {target:.3f} bits per byte; {path}")
    for name, losses in curves.items():
        print(
            f"{name:26} right after {losses[0]:6.3f}   back after {back[name]} steps   last {losses[options.more]:.3f}"
        )


if __name__ == "__main__":
    main()
