"""Train a byte-level language model of 48 blocks in bf16 autocast three times from one seed: reversed on the grid of
`ExactAdd`, kept on the same grid, and reversed with `Add`. The first two loss curves must be equal to the bit.

    python benchmarks/exact_training.py --steps 300
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path

import torch

import retrograd as rg

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))
from bench import commit  # noqa: E402
from quickstart import ByteModel, batches, corpus  # noqa: E402

RUNS = {
    "ExactAdd, Reverse": (rg.ExactAdd(), rg.Reverse()),
    "ExactAdd, Keep": (rg.ExactAdd(), rg.Keep()),
    "Add, Reverse": (rg.Add(), rg.Reverse()),
}


def curve(name: str, options: argparse.Namespace) -> list[float]:
    """The losses of one run, in bits per byte."""
    torch.manual_seed(options.seed)
    model = ByteModel(options.depth, options.width, options.length)
    model.blocks.join, model.blocks.policy = RUNS[name]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    stream = batches(corpus(), options.length, options.batch, options.seed)
    losses = []
    for step in range(options.steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(next(stream))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49:
            print(f"{name}: step {step + 1}, {sum(losses[-20:]) / 20:.3f} bits per byte", flush=True)
    return losses


def plot(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for name, losses in curves.items():
        left.plot(losses, label=name, linestyle="--" if "Keep" in name else "-", linewidth=1)
    left.set(xlabel="step", ylabel="bits per byte", title="48 blocks, bf16 autocast")
    left.legend()
    kept = curves["ExactAdd, Keep"]
    for name in ("ExactAdd, Reverse", "Add, Reverse"):
        right.plot([abs(a - b) for a, b in zip(curves[name], kept, strict=True)], label=name, linewidth=1)
    right.set(xlabel="step", title="difference from ExactAdd, Keep", yscale="symlog")
    right.set_yscale("symlog", linthresh=1e-4)
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"depth": 48, "width": 32, "length": 64, "batch": 4, "steps": 300, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    curves = {name: curve(name, options) for name in RUNS}
    last = {name: sum(losses[-20:]) / 20 for name, losses in curves.items()}
    result = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "hardware": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "commit": commit(),
        "sizes": {name: getattr(options, name) for name in sizes},
        "bit_identical": curves["ExactAdd, Reverse"] == curves["ExactAdd, Keep"],
        "mean_of_last_20": last,
        "losses": curves,
    }
    path = HERE / "results" / f"{datetime.date.today()}-exact-training-cpu.json"
    path.write_text(json.dumps(result, indent=1))
    plot(curves, path.with_suffix(".png"))
    print(f"ExactAdd, reversed and kept, equal to the bit: {result['bit_identical']}; last losses {last}; {path}")


if __name__ == "__main__":
    main()
