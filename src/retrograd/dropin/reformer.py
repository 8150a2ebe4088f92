"""`reformer_pytorch.reversible.ReversibleSequence` (reformer-pytorch 1.4.4), on this engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .. import Keep, Update, phase, remember
from ._blocks import Pairs, warn_ignored


class ReversibleSequence(Pairs):
    """The caller has doubled the input: its halves along dimension 2 are the streams, and again in the output.

    Checkpoints of the published class carry every weight a second time, under `irrev_blocks`. They are loaded; set
    `write_irrev_blocks = True` to write the copies too, for the published class to load.
    """

    write_irrev_blocks = False

    def __init__(
        self, blocks: Any, layer_dropout: float = 0.0, reverse_thres: int = 0, send_signal: bool = False
    ) -> None:
        super().__init__(blocks, split=2, merge="concat", layer_dropout=layer_dropout, reverse_above=reverse_thres)
        self.send_signal = send_signal
        self._signalled: dict[tuple[int, int], Signalled] = {}
        self.register_load_state_dict_pre_hook(_drop_copies)
        self.register_state_dict_post_hook(_write_copies)

    def forward(self, x: Tensor, arg_route: tuple[bool, bool] = (True, False), **kwargs: Any) -> Tensor:
        streams = self.split(x)
        signal = self.send_signal and not isinstance(self.policy_for(streams), Keep)
        return self.merge(self.run(streams, arg_route=arg_route, signal=signal, **kwargs))

    def updates(
        self, arg_route: tuple[bool, bool] = (True, False), signal: bool = False, **kwargs: Any
    ) -> Iterable[Update]:
        if not any(arg_route):
            warn_ignored([*kwargs], f"arg_route={arg_route} gives it to no network")
        for_f, for_g = (kwargs if routed else {} for routed in arg_route)
        pairs = [(f, g) for f, g in self.pairs()]
        if signal:
            pairs = [(self._told(f, depth), self._told(g, depth)) for depth, (f, g) in enumerate(pairs)]
        return self.coupled([(f, g, for_f, for_g) for f, g in pairs])

    def _told(self, net: nn.Module, depth: int) -> Signalled:
        """The same wrapper at each call, so that under torch.compile(model) it is compiled once."""
        known = self._signalled.get((depth, id(net)))
        if known is None or known.net is not net:
            known = self._signalled[depth, id(net)] = Signalled(net, depth)
        return known

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_signalled": {}}


class Signalled(nn.Module):
    """A network that is told, as `_reverse` and `_depth`, whether this is its replay and where it stands.

    The LSH attention of the package keeps its buckets in a `_cache` on the module, in training only. Here each call has
    a cache of its own, remembered for its replay; where it stays empty (eval mode), the replay hashes again.
    """

    def __init__(self, net: nn.Module, depth: int) -> None:
        super().__init__()
        self.net, self.depth = net, depth

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        current = phase()
        hashing: list[Any] = [m for m in self.net.modules() if isinstance(getattr(m, "_cache", None), dict)]
        # Shared by both passes, and filled in the first. (Of a list or a dict, each would get a copy.)
        caches: deque[dict[str, Any]] = remember(deque)
        reverse = any(caches) if hashing else current is not None and current.replaying
        outside = [module._cache for module in hashing]
        try:
            for module, cache in zip(hashing, caches or [{} for _ in hashing], strict=True):
                module._cache = cache
            out = self.net(x, _reverse=reverse, _depth=self.depth, **kwargs)
            if not caches:
                caches.extend(module._cache for module in hashing)
            return out
        finally:
            for module, cache in zip(hashing, outside, strict=True):
                module._cache = cache


def _drop_copies(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}irrev_blocks.")]:
        del state[key]


def _write_copies(module: ReversibleSequence, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if module.write_irrev_blocks:
        start = f"{prefix}blocks."
        for key in [key for key in state if key.startswith(start)]:
            index, network, _net, rest = key.removeprefix(start).split(".", 3)
            state[f"{prefix}irrev_blocks.{index}.{network}.{rest}"] = state[key]


CLASSES = [ReversibleSequence]
