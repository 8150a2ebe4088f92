"""What the engine costs the host: `python benchmarks/host.py`.

Networks so small that nothing but the host counts (width 8, 8 tokens, bfloat16 autocast, one thread of a CPU), in one
process and in turn: kept activations, `Keep()`, `Reverse()`, and between them a bare reversal: the same saved-tensor
hooks, replays and sums, and nothing else. It checks nothing, restores nothing and knows one program; it is what hooks
in Python cost at least. The floor is kept plus one more forward. Prints a table and writes
benchmarks/results/DATE-host-cpu.json, in half a minute.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import retrograd as rg
from bench import HERE, commit
from configurations import Configuration
from contenders import kept
from networks import Blocks, make_blocks, make_input

SIZE = Configuration("host", width=8, tokens=8, batch=1, blocks=24)
ROUNDS, STEPS = 12, 12
Network = Callable[[Tensor], Tensor]


class Bare:
    """A reversal without any check."""

    def __init__(self, blocks: Blocks) -> None:
        self.fns = [fn for pair in blocks for fn in pair]
        self.saved: list[list[Tensor | None]] = [[] for _ in self.fns]
        self.streams: list[Tensor] = []
        self.position = len(self.fns)

    def run(self, x: Tensor) -> Tensor:
        streams = [x, x]
        for index, fn in enumerate(self.fns):
            with saved_tensors_hooks(self.counter(), lambda slot, index=index: self.serve(index, slot)):
                streams[index % 2] = streams[index % 2] + fn(streams[1 - index % 2])
        a, b = BareExit.apply(self, *streams)  # type: ignore[misc]
        return (a + b) / 2

    @staticmethod
    def counter() -> Callable[[Tensor], int]:
        slots = 0

        def pack(tensor: Tensor) -> int:
            nonlocal slots
            slots += 1
            return slots - 1

        return pack

    def serve(self, index: int, slot: int) -> Tensor:
        while self.position > index:
            self.position -= 1
            at = self.position % 2
            packed: list[Tensor] = []  # nobody asks for these by the graph of the replay
            with (
                torch.enable_grad(),
                torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
                saved_tensors_hooks(packed.append, torch.empty_like),
            ):
                out = self.fns[self.position](self.streams[1 - at].detach().requires_grad_())
            with torch.no_grad():
                self.streams[at] = self.streams[at] - out
            self.saved[self.position] = [*packed]
            packed.clear()  # the hooks hold this list, and so the graph that holds them
        tensor, self.saved[index][slot] = self.saved[index][slot], None
        assert tensor is not None
        return tensor


class BareExit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bare: Bare, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.bare = bare
        ctx.save_for_backward(a, b)
        return a.detach(), b.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.bare.streams = [stream.detach() for stream in ctx.saved_tensors]
        return None, *grads


def step(network: Network, x: Tensor) -> tuple[float, float]:
    """Microseconds per update of a forward, and of its backward."""
    x.grad = None
    begin = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        loss = network(x).float().pow(2).mean()
    middle = time.perf_counter()
    loss.backward()
    return tuple(1e6 * t / (2 * SIZE.blocks) for t in (middle - begin, time.perf_counter() - middle))  # type: ignore[return-value]


def gradients(blocks: Blocks, network: Network, x: Tensor) -> Tensor:
    weights = [weight for pair in blocks for fn in pair for weight in fn.parameters()]
    for weight in weights:
        weight.grad = None
    step(network, x)
    return torch.cat([weight.grad.flatten() for weight in weights])  # type: ignore[union-attr]


def main() -> None:
    torch.set_num_threads(1)
    blocks, x = make_blocks(SIZE, torch.device("cpu"), 0, head=8), make_input(SIZE, torch.device("cpu"), 0)
    networks: dict[str, Network] = {
        "kept": kept(blocks, x),
        "Keep()": rg.ReversibleSequence(blocks, policy=rg.Keep()),
        "bare reversal": lambda x: Bare(blocks).run(x),
        "Reverse()": rg.ReversibleSequence(blocks),
    }
    expected = gradients(blocks, networks["kept"], x)
    for name, network in networks.items():
        error = (gradients(blocks, network, x) - expected).norm() / expected.norm()
        assert error < 0.01, f"{name}: gradients are {error:.1%} off"
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in networks}
    for _ in range(ROUNDS):
        for name, network in networks.items():
            step(network, x)  # the first after another's finds caches as the other left them
            times[name] += [step(network, x) for _ in range(STEPS)]
    rows = []
    for name, found in times.items():
        forward, backward = (statistics.median(column) for column in zip(*found, strict=True))
        rows.append({"name": name, "forward_us": forward, "backward_us": backward})
    floor = 2 * rows[0]["forward_us"] + rows[0]["backward_us"]
    print("microseconds per update  forward  backward    both  of the floor")
    for row in rows:
        both = row["forward_us"] + row["backward_us"]
        row["of_floor"] = both / floor
        print(f"{row['name']:<24} {row['forward_us']:7.1f} {row['backward_us']:9.1f} {both:7.1f} {both / floor:12.2f}x")
    now = datetime.now()
    path = HERE / "results" / f"{now:%Y-%m-%d}-host-cpu.json"
    result = {
        "date": f"{now:%Y-%m-%d %H:%M:%S}",
        "machine": {"device": platform.processor() or platform.machine(), "torch": torch.__version__},
        "python": platform.python_version(),
        "commit": commit(),
        "size": SIZE.as_dict(),
        "floor_us": floor,
        "rows": rows,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"results: {path}")


if __name__ == "__main__":
    main()
