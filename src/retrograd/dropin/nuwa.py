"""`ReversibleSequence` and `DualModalityReversibleSequence` of nuwa-pytorch 0.7.8, on this engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from .. import DualModality, Keep, Update, run
from ..sequences import Kind
from ._blocks import Block, Pairs, own_masks, warn_ignored

Route = Mapping[str, Sequence[tuple[bool, bool]]]


class ReversibleSequence(Pairs):
    """The input becomes both streams; the output is their sum; `args_route[key][depth]` is `(for f, for g)`."""

    def __init__(self, blocks: Any, args_route: Route = {}) -> None:  # noqa: B006 - as published, and only read
        super().__init__(blocks, merge="sum")
        self.args_route = args_route
        for key, route in args_route.items():
            if len(route) < len(self.blocks):
                warn_ignored([key], f"its route has {len(route)} entries, so the blocks after that never get it")

    def updates(self, **kwargs: Any) -> Iterable[Update]:
        warn_ignored([key for key in kwargs if key not in self.args_route], "no route, so no network gets it")
        routed, kwargs = [], own_masks(kwargs)
        for depth, (f, g) in enumerate(self.pairs()):
            here = {key: route[depth] for key, route in self.args_route.items() if key in kwargs and depth < len(route)}
            for_f, for_g = ({key: kwargs[key] for key, route in here.items() if route[i]} for i in (0, 1))
            routed.append((f, g, for_f, for_g))
        return self.coupled(routed)


_KINDS: dict[str, Kind] = {
    "intra_modality_self_attn": "self",
    "intra_modality_cross_attn": "context",
    "inter_modality_cross_attn": "other",
}


class DualModalityReversibleSequence(DualModality):
    """Video and audio, each of two streams, with the three block types of the published class."""

    def __init__(self, input_blocks: Any, block_types: Iterable[str]) -> None:
        kinds = []
        for block_type in block_types:
            if block_type not in _KINDS:
                raise ValueError(f"unknown block type {block_type!r}; the types are {[*_KINDS]}")
            kinds.append(_KINDS[block_type])
        super().__init__([tuple(block) for block in input_blocks], kinds)
        self.blocks = nn.ModuleList(
            Block(**dict(zip("fgjk", networks, strict=True))) for networks in super().networks()
        )

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
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
        given = {"context": context, "context_mask": context_mask, "x_mask": video_mask, "m_mask": audio_mask}
        given = own_masks(given)
        streams = self.split((video, audio))
        out = self.run(streams, **given) if reverse else run(self.updates(**given), streams, policy=Keep())
        return [*self.merge(out)]

    def keywords(
        self, kind: Kind, fn: nn.Module, mask: Any, other_mask: Any, context: Any, context_mask: Any
    ) -> dict[str, Any]:
        if kind == "self":
            return {}
        if kind == "context":
            return {"context": context, "context_mask": context_mask, "mask": mask}
        return {"mask": mask, "context_mask": other_mask}

    def refuse(self, unused: dict[str, Any]) -> None:
        names = {"x_mask": "video_mask", "m_mask": "audio_mask"}
        warn_ignored([names.get(key, key) for key in unused if key != "context"], "no block of this network uses it")

    def networks(self) -> Iterator[Sequence[nn.Module]]:
        for kind, block in zip(self.kinds, self.blocks, strict=True):
            f, g, j, k = cast(Block, block).networks()
            # In blocks between the modalities the published class crosses g and k; checkpoints depend on it.
            yield (f, k, j, g) if kind == "other" else (f, g, j, k)


CLASSES = [ReversibleSequence, DualModalityReversibleSequence]
