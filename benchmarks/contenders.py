"""Who competes: each contender makes one network out of the pairs (f, g). To add one, write a builder of a few lines.

A builder gets the blocks and an example input and returns what maps an input to an output. All compute the same
function: both streams begin as the input, `a += f(b)`, `b += g(a)` for each block, and the output is their mean. Those
that compute another one name the contender whose gradients are right for them.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from networks import Blocks

Network = Callable[[Tensor], Tensor]
Step = Callable[[], Tensor]


class Skip(Exception):
    """This contender cannot run here; the message says why."""


@dataclass(frozen=True)
class Contender:
    """How to build a network, what its gradients and its time are compared with, and what runs around a step."""

    build: Callable[[Blocks, Tensor], Network]
    title: str
    gradients_of: str = "kept"
    time_of: str = "kept"
    compiled: bool = False
    around: Callable[[Step, Tensor], Step] | None = None


CONTENDERS: dict[str, Contender] = {}


def contender(name: str, title: str, **options: Any) -> Callable[[Callable[..., Network]], Callable[..., Network]]:
    """Enter a builder under a name."""

    def enter(build: Callable[..., Network]) -> Callable[..., Network]:
        CONTENDERS[name] = Contender(build, title, **options)
        return build

    return enter


# Plain torch


@contender("kept", "kept (plain autograd)")
def kept(blocks: Blocks, x: Tensor) -> Network:
    def forward(x: Tensor) -> Tensor:
        a = b = x
        for f, g in blocks:
            a = a + f(b)
            b = b + g(a)
        return (a + b) / 2

    return forward


@contender("checkpoint", "checkpoint, each block")
def checkpointed(blocks: Blocks, x: Tensor) -> Network:
    def block(f: nn.Module, g: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a = a + f(b)
        return a, b + g(a)

    def forward(x: Tensor) -> Tensor:
        a = b = x
        for f, g in blocks:
            a, b = checkpoint(block, f, g, a, b, use_reentrant=False)
        return (a + b) / 2

    return forward


def compiled_whole(budget: float) -> Callable[[Blocks, Tensor], Network]:
    """The whole kept model compiled, under torch's activation memory budget (1: whatever is fastest)."""

    def build(blocks: Blocks, x: Tensor) -> Network:
        import_module("torch._functorch.config").activation_memory_budget = budget
        return torch.compile(kept(blocks, x))

    return build


for _budget, _name in ((1.0, "compile"), (0.3, "compile-0.3"), (0.0, "compile-0.0")):
    _title = "kept model compiled" + ("" if _budget == 1.0 else f", memory budget {_budget}")
    contender(_name, _title, compiled=True)(compiled_whole(_budget))


@contender("kept-compiled", "kept, f and g compiled", compiled=True)
def kept_compiled(blocks: Blocks, x: Tensor) -> Network:
    return kept(each_compiled(blocks), x)


def each_compiled(blocks: Blocks) -> Blocks:
    """Compile every f and g in place."""
    for pair in blocks:
        for network in pair:
            network.compile()
    return blocks


def needs_cuda(x: Tensor) -> None:
    if x.device.type != "cuda":
        raise Skip("a CUDA graph needs CUDA")


def captured(step: Step, x: Tensor) -> Step:
    """A step captured in a CUDA graph."""
    needs_cuda(x)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


contender("kept-graphed", "kept, whole step in a CUDA graph", around=captured)(kept)
contender("compile-graphed", "kept model compiled, in a CUDA graph", around=captured, compiled=True)(
    compiled_whole(1.0)
)


# retrograd


def made(name: str, **options: Any) -> Any:
    """`retrograd.name(**options)`, or Skip where this version of retrograd has no such thing."""
    if not hasattr(rg, name):
        raise Skip(f"retrograd has no {name}")
    thing = getattr(rg, name)
    if absent := set(options) - set(inspect.signature(thing).parameters):
        raise Skip(f"retrograd.{name} takes no {', '.join(sorted(absent))}")
    return thing(**options)


@contender("keep", "retrograd Keep()")
def keep(blocks: Blocks, x: Tensor) -> Network:
    return rg.ReversibleSequence(blocks, policy=made("Keep"))


@contender("reverse", "retrograd Reverse()")
def reverse(blocks: Blocks, x: Tensor) -> Network:
    return rg.ReversibleSequence(blocks)


@contender("reverse-launched", "retrograd Reverse(graphed=True)")
def reverse_launched(blocks: Blocks, x: Tensor) -> Network:
    needs_cuda(x)
    return rg.ReversibleSequence(blocks, policy=made("Reverse", graphed=True))


@contender("reverse-anchors", "retrograd Reverse(anchor_every=8)")
def reverse_anchors(blocks: Blocks, x: Tensor) -> Network:
    return rg.ReversibleSequence(blocks, policy=made("Reverse", anchor_every=8))


@contender("reverse-half", "retrograd, second half Keep()")
def reverse_half(blocks: Blocks, x: Tensor) -> Network:
    class Half(rg.ReversibleSequence):
        def updates(self, **kwargs: Any):
            for index, update in enumerate(super().updates(**kwargs)):
                yield dataclasses.replace(update, policy=rg.Keep()) if index >= len(blocks) else update

    return Half(blocks)


@contender("reverse-compiled", "retrograd, f and g compiled", compiled=True)
def reverse_compiled(blocks: Blocks, x: Tensor) -> Network:
    return rg.ReversibleSequence(each_compiled(blocks))


@contender("reverse-launched-compiled", "retrograd Reverse(graphed=True), f and g compiled", compiled=True)
def reverse_launched_compiled(blocks: Blocks, x: Tensor) -> Network:
    return reverse_launched(each_compiled(blocks), x)


@contender("reverse-output", 'retrograd Reverse(save="output")')
def reverse_output(blocks: Blocks, x: Tensor) -> Network:
    return rg.ReversibleSequence(blocks, policy=made("Reverse", save="output"))


@contender("reverse-attention", 'retrograd Reverse(save="attention")')
def reverse_attention(blocks: Blocks, x: Tensor) -> Network:
    return rg.ReversibleSequence(blocks, policy=made("Reverse", save="attention"))


@contender("offload", "retrograd Offload()")
def offload(blocks: Blocks, x: Tensor) -> Network:
    return rg.ReversibleSequence(blocks, policy=made("Offload"))


@contender("auto", "retrograd Auto(what checkpointing takes)")
def auto(blocks: Blocks, x: Tensor) -> Network:
    of_checkpointing = max(2 * len(blocks) + 12, 28) * x.nbytes  # two streams a block, and what one needs
    return rg.ReversibleSequence(blocks, policy=made("Auto", budget=of_checkpointing))


@contender("auto-all", "retrograd Auto(more than it needs)")
def auto_all(blocks: Blocks, x: Tensor) -> Network:
    return rg.ReversibleSequence(blocks, policy=made("Auto", budget="1TiB"))


@contender("auto-least", "retrograd Auto(the least it accepts)")
def auto_least(blocks: Blocks, x: Tensor) -> Network:
    try:
        with torch.autocast(x.device.type, torch.bfloat16):
            rg.ReversibleSequence(blocks, policy=made("Auto", budget=1))(x)
    except RuntimeError as error:  # which says how much it needs
        (least,) = re.findall(r"\((\d+) bytes\)", str(error))
        return rg.ReversibleSequence(blocks, policy=made("Auto", budget=int(least)))
    raise AssertionError("a budget of one byte was accepted")


@contender("exact-keep", "retrograd ExactAdd(), Keep()", gradients_of="exact-keep")
def exact_keep(blocks: Blocks, x: Tensor) -> Network:
    return rg.ReversibleSequence(blocks, join=made("ExactAdd"), policy=made("Keep"))


@contender("exact", "retrograd ExactAdd(), Reverse()", gradients_of="exact-keep")
def exact(blocks: Blocks, x: Tensor) -> Network:
    return rg.ReversibleSequence(blocks, join=made("ExactAdd"))


def graphed(step: Step, x: Tensor) -> Step:
    """A step captured by `retrograd.graphed`."""
    if not hasattr(rg, "graphed"):
        raise Skip("retrograd has no graphed")
    needs_cuda(x)
    return rg.graphed(step)


contender("keep-graphed", "retrograd Keep(), whole step in a CUDA graph", around=graphed)(keep)
contender("reverse-graphed", "retrograd, whole step in a CUDA graph", around=graphed)(reverse)
contender("reverse-compiled-graphed", "retrograd, f and g compiled, in a CUDA graph", around=graphed, compiled=True)(
    reverse_compiled
)


# Peers, from benchmarks/.peers


def peer(module: str) -> Any:
    """A published package, or Skip where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise Skip(f"{error}; see benchmarks/README.md on how to install the peers") from None


def doubled(network: Network) -> Network:
    """For a class that takes both streams side by side in dimension 2 and returns them so."""

    def forward(x: Tensor) -> Tensor:
        a, b = network(torch.cat([x, x], dim=2)).chunk(2, dim=2)
        return (a + b) / 2

    return forward


@contender("reformer-pytorch", "reformer-pytorch 1.4.4")
def reformer(blocks: Blocks, x: Tensor) -> Network:
    return doubled(peer("reformer_pytorch.reversible").ReversibleSequence(nn.ModuleList(map(nn.ModuleList, blocks))))


@contender("axial-attention", "axial-attention 0.6.1")
def axial(blocks: Blocks, x: Tensor) -> Network:
    return peer("axial_attention.reversible").ReversibleSequence(blocks)  # doubles and takes the mean itself


@contender("revtorch", "RevTorch 0.2.4")
def revtorch(blocks: Blocks, x: Tensor) -> Network:
    package = peer("revtorch")
    pairs = nn.ModuleList(package.ReversibleBlock(f, g, split_along_dim=2) for f, g in blocks)
    return doubled(package.ReversibleSequence(pairs))


@contender("revlib", "revlib 1.7.2")
def revlib(blocks: Blocks, x: Tensor) -> Network:
    return doubled(peer("revlib").ReversibleSequential(*(network for pair in blocks for network in pair), split_dim=2))


@contender("memcnn", "memcnn 1.5.2")
def memcnn(blocks: Blocks, x: Tensor) -> Network:
    package = peer("memcnn")
    couplings = (package.AdditiveCoupling(f, g, split_dim=2) for f, g in blocks)
    return doubled(nn.Sequential(*(package.InvertibleModuleWrapper(coupling) for coupling in couplings)))


# Momentum networks compute another function, so they are compared with their own kept form


def momentumnet(use_backprop: bool) -> Callable[[Blocks, Tensor], Network]:
    """The published momentum network over f and g in a row, kept (`use_backprop`) or reversed."""

    def build(blocks: Blocks, x: Tensor) -> Network:
        functions = [network for pair in blocks for network in pair]
        return peer("momentumnet").MomentumNet(functions, gamma=0.9, use_backprop=use_backprop)

    return build


_OWN = {"gradients_of": "momentumnet-kept", "time_of": "momentumnet-kept"}
contender("momentumnet-kept", "momentumnet 0.10, kept", **_OWN)(momentumnet(True))
contender("momentumnet", "momentumnet 0.10", **_OWN)(momentumnet(False))


@contender("keep-momentum", "retrograd Momentum, Keep()", **_OWN)
def keep_momentum(blocks: Blocks, x: Tensor) -> Network:
    return rg.Momentum([network for pair in blocks for network in pair], gamma=0.9, policy=made("Keep"))


@contender("reverse-momentum", "retrograd Momentum", gradients_of="keep-momentum", time_of="momentumnet-kept")
def reverse_momentum(blocks: Blocks, x: Tensor) -> Network:
    return rg.Momentum([network for pair in blocks for network in pair], gamma=0.9)
