"""How far gradients are from those of kept activations, by depth, dtype and join: `python benchmarks/drift.py`.

Pairs of attention and feed-forward (networks.py), and the momentum and midpoint networks over the latter, on the CPU.
Each row is one training step, reversed and kept, from the same weights, input and random numbers. Two figures: the
error of all gradients together, |reversed - kept| / |kept|, and the drift, the largest relative error of the streams
that entered as they were reconstructed (not for momentum networks: their v begins at zero, and no error is relative
to zero). The last row is a yardstick: what bfloat16 autocast does to the gradients of kept activations. Prints a table
and writes benchmarks/results/DATE-drift-cpu.json, in half a minute.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor, nn

import retrograd as rg
from bench import HERE, commit
from networks import Attention, FeedForward

WIDTH, TOKENS, BATCH = 64, 32, 2
DEPTHS = (8, 32, 96, 256)
WATCH = {"watch": 1e9}  # only measured

YARDSTICK = "kept, bf16 autocast against float32"

Build = Callable[[int], rg.Reversible]


def pairs(join: rg.Join = rg.Add(), anchor_every: int | None = None) -> Build:
    policy = rg.Reverse(anchor_every=anchor_every, **WATCH)
    return lambda depth: rg.ReversibleSequence(
        [(Attention(WIDTH), FeedForward(WIDTH)) for _ in range(depth)], join=join, policy=policy
    )


def momentum(gamma: float, anchor_every: int | None = None) -> Build:
    policy = rg.Reverse(anchor_every=anchor_every)
    return lambda depth: rg.Momentum([FeedForward(WIDTH) for _ in range(depth)], gamma, policy=policy)


def midpoint(join: rg.Join) -> Build:
    return lambda depth: rg.Midpoint([FeedForward(WIDTH) for _ in range(depth)], join=join, policy=rg.Reverse(**WATCH))


# name: how to build it, dtype of weights and streams, whether under bfloat16 autocast
ROWS: dict[str, tuple[Build, torch.dtype, bool]] = {
    "pairs, bf16 streams": (pairs(), torch.bfloat16, False),
    "pairs, bf16 streams, anchor_every=16": (pairs(anchor_every=16), torch.bfloat16, False),
    "pairs, float32 streams, bf16 autocast": (pairs(), torch.float32, True),
    "pairs, float32 streams, bf16 autocast, anchor_every=16": (pairs(anchor_every=16), torch.float32, True),
    "pairs, float32": (pairs(), torch.float32, False),
    "pairs, float64": (pairs(), torch.float64, False),
    "pairs, ExactAdd, bf16 autocast": (pairs(rg.ExactAdd()), torch.float32, True),
    "pairs, ExactAdd, float32": (pairs(rg.ExactAdd()), torch.float32, False),
    "momentum 0.9, float32": (momentum(0.9), torch.float32, False),
    "momentum 0.9, float32, anchor_every=32": (momentum(0.9, 32), torch.float32, False),
    "momentum 0.99, float32": (momentum(0.99), torch.float32, False),
    "midpoint, float32": (midpoint(rg.Add()), torch.float32, False),
    "midpoint, ExactAdd, float32": (midpoint(rg.ExactAdd(range=2**16)), torch.float32, False),
}


def gradients(net: nn.Module, x: Tensor, autocast: bool) -> list[Tensor]:
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        y = net(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
    return list(torch.autograd.grad((y * weights).sum(), [x, *net.parameters()]))


def measure(build: Build, depth: int, dtype: torch.dtype, autocast: bool) -> dict[str, float | int | None]:
    torch.manual_seed(0)
    net, x = build(depth).to(dtype), torch.randn(BATCH, TOKENS, WIDTH).to(dtype).requires_grad_()
    found = gradients(net, x, autocast)
    drift = rg.last_drift() if net.policy.watch else None
    net.policy = rg.Keep()
    kept = gradients(net, x, autocast)
    return {"depth": depth, "gradients": error(found, kept), "drift": drift}


def yardstick(depth: int) -> dict[str, float | int | None]:
    """Kept activations, with bfloat16 autocast against without."""
    torch.manual_seed(0)
    net, x = pairs()(depth), torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    net.policy = rg.Keep()
    return {"depth": depth, "gradients": error(gradients(net, x, True), gradients(net, x, False)), "drift": None}


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True))
    return (difference / sum(float(b.double().square().sum()) for b in expected)) ** 0.5


def shown(cell: dict[str, float | int | None]) -> str:
    drift = "" if cell["drift"] is None else f" ({cell['drift']:.1e})"
    return f"{cell['gradients']:.1e}{drift}"


def main() -> None:
    torch.set_num_threads(1)
    now = datetime.now()
    results = {
        "date": f"{now:%Y-%m-%d %H:%M:%S}",
        "commit": commit(),
        "machine": {"python": platform.python_version(), "torch": torch.__version__, "cpu": platform.processor()},
        "network": {"width": WIDTH, "tokens": TOKENS, "batch": BATCH},
        "rows": {},
    }
    print(f"{'error of all gradients (drift of the streams that entered)':56}", *(f"{d:>20}" for d in DEPTHS))
    for name, (build, dtype, autocast) in ROWS.items():
        results["rows"][name] = [measure(build, depth, dtype, autocast) for depth in DEPTHS]
        print(f"{name:56}", *(shown(cell).rjust(20) for cell in results["rows"][name]), flush=True)
    results["rows"][YARDSTICK] = [yardstick(depth) for depth in DEPTHS]
    print(f"{YARDSTICK:56}", *(shown(cell).rjust(20) for cell in results["rows"][YARDSTICK]))
    path = HERE / "results" / f"{now:%Y-%m-%d}-drift-cpu.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    plot(results, path.with_suffix(".png"))
    print(f"results: {path}")


def plot(results: dict, path: Path) -> None:
    """Gradient error against depth; what is exact lies on the axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5))
    colours = iter(pyplot.colormaps["tab20"].colors)
    for name, cells in results["rows"].items():
        points = [(cell["depth"], max(cell["gradients"], 1e-9)) for cell in cells]
        axes.plot(*zip(*points, strict=True), "o-", label=name, linewidth=1, markersize=3, color=next(colours))
    axes.set(xscale="log", yscale="log", xlabel="blocks", ylabel="relative error of all gradients (1e-9: none)")
    axes.set_xticks(DEPTHS, [str(depth) for depth in DEPTHS])
    axes.minorticks_off()
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
