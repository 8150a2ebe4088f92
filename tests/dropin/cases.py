"""The five classes behind one interface, so that a test is written once: `build` any of them in any variant (published,
ours, plain), `run` it on a tensor.

Streams are (batch, length, width). For the class of two modalities, video and audio are the same tensor, all blocks
read a context, and the output is the sum of both modalities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import plain
import published
import torch
from torch import Tensor, nn

from retrograd import dropin

WIDTH, LENGTH, BATCH, DEPTH = 8, 6, 2, 3

OURS: dict[str, type[nn.Module]] = {
    "axial": dropin.axial_attention.ReversibleSequence,
    "reformer": dropin.reformer.ReversibleSequence,
    "nuwa": dropin.nuwa.ReversibleSequence,
    "se3": dropin.se3.ReversibleSequence,
    "dual": dropin.nuwa.DualModalityReversibleSequence,
}
VARIANTS = {"published": published.CLASSES, "ours": OURS, "plain": plain.CLASSES}
TYPES = ("intra_modality_self_attn", "intra_modality_cross_attn", "inter_modality_cross_attn")
"""The block types of the class of two modalities."""


class Net(nn.Module):
    """Norm, linear, tanh, dropout; adds a projection of `context` where one arrives."""

    def __init__(self, dropout: float = 0.0, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.linear, self.read = norm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, context: Tensor | None = None, **unused: Any) -> Tensor:
        hidden = torch.tanh(self.linear(self.norm(x)))
        return self.dropout(hidden if context is None else hidden + self.read(context))


class BatchNormLast(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class OverDict(nn.Module):
    """The same network on the dictionaries of se3."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        return {key: self.net(value, **kwargs) for key, value in x.items()}


Make = Callable[[str], nn.Module]
"""Makes the network of a role: "f" (also for j) or "g" (also for k)."""


def networks(**options: Any) -> Make:
    return lambda role: Net(**options)


class Case:
    """One of the five classes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.routes_to_g = name not in ("se3", "dual")

    def __repr__(self) -> str:
        return self.name

    def build(self, variant: str, make: Make = networks(), depth: int = DEPTH, **options: Any) -> nn.Module:
        """An instance whose weights are the same in each variant."""
        torch.manual_seed(0)
        kind = VARIANTS[variant][self.name]
        if self.name == "dual":
            return kind([[make(role) for role in "fgfg"] for _ in range(depth)], [TYPES[1]] * depth)
        pairs = [(make("f"), make("g")) for _ in range(depth)]
        if self.name == "nuwa":
            return kind(pairs, args_route={"context": ((True, options.pop("to_g", False)),) * depth}, **options)
        if self.name == "se3":
            pairs = [(OverDict(f), OverDict(g)) for f, g in pairs]
        options.pop("to_g", None)
        return kind(pairs, **options)

    def run(self, sequence: nn.Module, x: Tensor, context: Tensor | None = None, to_g: bool = False) -> Tensor:
        kwargs = {} if context is None else {"context": context}
        if self.name == "axial":
            return sequence(x, arg_route=(True, to_g), **kwargs)
        if self.name == "reformer":
            a, b = sequence(torch.cat((x, x), dim=2), arg_route=(True, to_g), **kwargs).chunk(2, dim=2)
            return (a + b) / 2
        if self.name == "nuwa":
            return sequence(x, **kwargs)
        if self.name == "se3":
            return sequence({"0": x}, **kwargs)["0"]
        video, audio = sequence(x, x, context=context)
        return video + audio


CASES = [Case(name) for name in OURS]


def data(seed: int = 1, *, requires_grad: bool = True, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, LENGTH, WIDTH, generator=generator, **options).requires_grad_(requires_grad)


def loss_of(out: Tensor) -> Tensor:
    """Its gradient depends on the output, and no two elements have the same weight."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return (out * weights).sum() + out.square().mean()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """What has arrived in `.grad`."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The relative error over all gradients together; a missing one counts as zero."""
    assert expected
    assert found.keys() <= expected.keys()
    off = sum((found.get(name, torch.zeros_like(g)) - g).double().square().sum() for name, g in expected.items())
    return (off / sum(g.double().square().sum() for g in expected.values())).sqrt().item()


def networks_of(sequence: nn.Module) -> Iterable[nn.Module]:
    """The networks f, g, ... of every block, in any variant."""
    for block in sequence.blocks:  # type: ignore[union-attr]
        for wrapped in block.children():
            yield wrapped.net
