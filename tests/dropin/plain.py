"""The five classes as plain loops: the reference for outputs and gradients, written without retrograd.

Same constructors, same forwards, same parameter names; autograd keeps every activation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class _Net(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


class _Block(nn.Module):
    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        for name, net in zip("fgjk", networks, strict=False):
            self.add_module(name, _Net(net))


class _Sequence(nn.Module):
    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(tuple(block)) for block in blocks)

    def __iter__(self) -> Any:
        """The networks of each block."""
        return iter([[wrapped.net for wrapped in block.children()] for block in self.blocks])


class Axial(_Sequence):
    def forward(self, x: Tensor, arg_route: tuple[bool, bool] = (True, True), **kwargs: Any) -> Tensor:
        a = b = x
        for f, g in self:
            a = a + f(b, **kwargs if arg_route[0] else {})
            b = b + g(a, **kwargs if arg_route[1] else {})
        return (a + b) / 2


class Reformer(_Sequence):
    def __init__(
        self, blocks: Any, layer_dropout: float = 0.0, reverse_thres: int = 0, send_signal: bool = False
    ) -> None:
        super().__init__(blocks)
        self.layer_dropout = layer_dropout

    def forward(self, x: Tensor, arg_route: tuple[bool, bool] = (True, False), **kwargs: Any) -> Tensor:
        a, b = x.chunk(2, dim=2)
        blocks = list(self)
        if self.training and self.layer_dropout > 0:
            dropped = torch.rand(len(blocks)) < self.layer_dropout
            blocks = [block for block, drop in zip(blocks, dropped, strict=True) if not drop] or blocks[:1]
        for f, g in blocks:
            a = a + f(b, **kwargs if arg_route[0] else {})
            b = b + g(a, **kwargs if arg_route[1] else {})
        return torch.cat((a, b), dim=2)


class Nuwa(_Sequence):
    def __init__(self, blocks: Any, args_route: Mapping[str, Sequence[tuple[bool, bool]]] = {}) -> None:
        super().__init__(blocks)
        self.args_route = args_route

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        a = b = x
        for depth, (f, g) in enumerate(self):
            for_f, for_g = {}, {}
            for key, value in kwargs.items():
                to_f, to_g = (*self.args_route.get(key, ()), *[(False, False)] * len(self.blocks))[depth]
                if to_f:
                    for_f[key] = value
                if to_g:
                    for_g[key] = value
            a = a + f(b, **for_f)
            b = b + g(a, **for_g)
        return a + b


class SE3(_Sequence):
    def forward(self, x: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        a = b = x
        for f, g in self:
            added = f(b, **kwargs)
            a = {key: a[key] + added[key] for key in a}
            added = g(a)
            b = {key: b[key] + added[key] for key in b}
        return {key: (a[key] + b[key]) / 2 for key in x}


class Dual(_Sequence):
    def __init__(self, input_blocks: Any, block_types: Sequence[str]) -> None:
        super().__init__(input_blocks)
        self.block_types = block_types

    def forward(
        self,
        video: Tensor,
        audio: Tensor,
        *,
        context: Tensor,
        context_mask: Tensor | None = None,
        video_mask: Tensor | None = None,
        audio_mask: Tensor | None = None,
        reverse: bool = True,
    ) -> list[Tensor]:
        x1 = x2 = video
        m1 = m2 = audio
        read = {"context": context, "context_mask": context_mask}
        for (f, g, j, k), kind in zip(self, self.block_types, strict=True):
            if kind == "inter_modality_cross_attn":
                x1 = x1 + f(x2, m2, mask=video_mask, context_mask=audio_mask)
                x2 = x2 + k(x1)
                m1 = m1 + j(m2, x2, mask=audio_mask, context_mask=video_mask)
                m2 = m2 + g(m1)
            else:
                reads = kind == "intra_modality_cross_attn"
                x1 = x1 + f(x2, **(read | {"mask": video_mask} if reads else {}))
                x2 = x2 + g(x1)
                m1 = m1 + j(m2, **(read | {"mask": audio_mask} if reads else {}))
                m2 = m2 + k(m1)
        return [(x1 + x2) / 2, (m1 + m2) / 2]


CLASSES: dict[str, type[nn.Module]] = {"axial": Axial, "reformer": Reformer, "nuwa": Nuwa, "se3": SE3, "dual": Dual}
