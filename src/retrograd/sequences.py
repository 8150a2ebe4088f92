"""The recipes: `ReversibleSequence`, `DualModality`, `Momentum` and `Midpoint`. Each is a `Reversible` that says how an
input becomes streams (`split`), which updates follow, and how streams become an output (`merge`).

Pairs: RevNet (Gomez et al., 2017) and Reformer (Kitaev et al., 2020). Momentum: Sander et al., 2021. Midpoint: the
two-step scheme of ordinary differential equations, used for networks by Chang et al., 2018.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from . import streams as trees
from .joins import Add, Join, Scale
from .keywords import Keywords, accepted, refuse_unrouted
from .policies import Keep, Policy, Reverse
from .ranks import agreed
from .reversible import Reversible
from .streams import Stream
from .update import Update

Split = Literal["duplicate"] | int
Merge = Literal["mean", "sum", "concat"]
Route = Mapping[str, str | Sequence[str]]


class ReversibleSequence(Reversible):
    """Blocks of two networks, `a += f(b)` then `b += g(a)`, trained in the activation memory of one block.

    `blocks` are pairs `(f, g)`. `split` makes two streams of the input: "duplicate", or the dimension to halve. `merge`
    makes one output of them: "mean", "sum", or "concat" along the halved dimension. `route` says which of f and g gets
    a keyword: `{"mask": "f", "context": "fg"}`, or for each block one such string; by default each network gets the
    keywords its signature names. `layer_dropout` skips each block with that probability in training, never all of
    them. Inputs no longer than `reverse_above` (in dimension 1) keep their activations, since there memory is cheap.

    >>> import retrograd as rg
    >>> net = rg.ReversibleSequence([(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)])
    >>> net(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        blocks: Iterable[Sequence[nn.Module]],
        *,
        split: Split = "duplicate",
        merge: Merge = "mean",
        route: Route | None = None,
        layer_dropout: float = 0.0,
        reverse_above: int = 0,
        join: Join = Add(),
        policy: Policy = Reverse(),
    ) -> None:
        super().__init__(policy=policy)
        self.blocks = nn.ModuleList(
            nn.ModuleList(_networks(index, block, "a pair (f, g)", 2)) for index, block in enumerate(blocks)
        )
        if split != "duplicate" and (not isinstance(split, int) or isinstance(split, bool)):
            raise ValueError(f"split must be 'duplicate' or the dimension to halve, not {split!r}")
        if merge not in ("mean", "sum", "concat"):
            raise ValueError(f"merge must be 'mean', 'sum' or 'concat', not {merge!r}")
        if merge == "concat" and split == "duplicate":
            raise ValueError("merge='concat' puts halves together; it needs split=<the dimension to halve>")
        if not isinstance(layer_dropout, (int, float)) or not 0.0 <= layer_dropout < 1.0:
            raise ValueError(f"layer_dropout must be a probability below 1, not {layer_dropout!r}")
        if not isinstance(reverse_above, int) or isinstance(reverse_above, bool) or reverse_above < 0:
            raise ValueError(f"reverse_above must be a length, 0 or more, not {reverse_above!r}")
        self.split_as, self.merge_as, self.join = split, merge, _checked_join(join)
        self.route = _checked_route(route, len(self.blocks))
        self.layer_dropout, self.reverse_above = layer_dropout, reverse_above

    def updates(self, **kwargs: Any) -> Iterable[Update]:
        routed = [(f, g, *self._keywords(index, f, g, kwargs)) for index, (f, g) in enumerate(self.pairs())]
        refuse_unrouted(kwargs, {key for _, _, *given in routed for keywords in given for key in keywords}, self)
        return self.coupled(routed)

    def pairs(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """The networks f and g of each block."""
        for block in self.blocks:
            f, g = cast(nn.ModuleList, block)
            yield f, g

    def coupled(self, routed: list[tuple[nn.Module, nn.Module, Keywords, Keywords]]) -> Iterator[Update]:
        """The updates of blocks with the keywords of f and of g, less those that layer dropout skips."""
        if self.training and self.layer_dropout:
            draws = agreed(torch.rand(len(routed)), [network for f, g, _, _ in routed for network in (f, g)]).tolist()
            routed = [r for r, draw in zip(routed, draws, strict=True) if draw >= self.layer_dropout] or routed[:1]
        for f, g, for_f, for_g in routed:
            yield Update("a", f, ("b",), self.join, for_f)
            yield Update("b", g, ("a",), self.join, for_g)

    def _keywords(self, index: int, f: nn.Module, g: nn.Module, kwargs: Keywords) -> tuple[Keywords, Keywords]:
        """The keywords that f and g of one block get."""
        if self.route is None:
            return accepted(f, kwargs), accepted(g, kwargs)
        where = {key: route if isinstance(route, str) else route[index] for key, route in self.route.items()}
        for_f, for_g = ({k: v for k, v in kwargs.items() if name in where.get(k, "")} for name in "fg")
        return for_f, for_g

    def split(self, x: Stream) -> Mapping[str, Stream]:
        a, b = trees.halve(x, self.split_as) if isinstance(self.split_as, int) else (x, x)
        return {"a": a, "b": b}

    def merge(self, streams: Mapping[str, Stream]) -> Stream:
        a, b = streams["a"], streams["b"]
        if self.merge_as == "concat":
            return trees.concat(a, b, self.split_as)  # type: ignore[arg-type]
        return trees.mean(a, b) if self.merge_as == "mean" else trees.total(a, b)

    def unmerge(self, y: Stream) -> Mapping[str, Stream]:
        if self.merge_as != "concat":
            raise ValueError(
                f"merge={self.merge_as!r} does not keep both streams, so the output alone cannot be inverted; "
                "use run() and invert(), which hold both, or split=<dim> with merge='concat'"
            )
        return self.split(y)

    def unsplit(self, streams: Mapping[str, Stream]) -> Stream:
        return trees.concat(streams["a"], streams["b"], self.split_as)  # type: ignore[arg-type]

    def invert(self, streams: Mapping[str, Stream], **kwargs: Any) -> dict[str, Stream]:
        if self.training and self.layer_dropout:
            raise RuntimeError(
                "invert: layer_dropout drops other blocks at each call; use eval mode in both directions"
            )
        return super().invert(streams, **kwargs)

    def policy_for(self, streams: Mapping[str, Stream]) -> Policy:
        if not self.reverse_above:
            return self.policy
        lengths = [
            leaf.shape[1] * (2 if self.split_as in (1, 1 - leaf.dim()) else 1)  # of the input, before it was halved
            for leaf in trees.leaves_of(dict(streams), Tensor)
            if leaf.dim() > 1
        ]
        return self.policy if max(lengths, default=0) > self.reverse_above else Keep()


Kind = Literal["self", "context", "other"]


class DualModality(Reversible):
    """Two modalities, each of two streams, that attend to themselves, to a context, and to each other.

    Each block is four networks: f and g for the first modality (streams x1, x2), j and k for the second (m1, m2).
    `kinds` says what a block does:

    - "self": `x1 += f(x2)`, `x2 += g(x1)`, `m1 += j(m2)`, `m2 += k(m1)`;
    - "context": the same, with `context` and `context_mask` for f and j;
    - "other": `x1 += f(x2, m2)`, `x2 += g(x1)`, `m1 += j(m2, x2)`, `m2 += k(m1)`, where f and j get the mask of the
      other modality as `context_mask`.

    f and j also get the mask of their own modality as `mask`, and of all these keywords those that their signatures
    name; g and k get none. The modalities may differ in length, width and dtype. For three modalities write `updates`
    in a `Reversible`.

    >>> import retrograd as rg
    >>> class Attend(nn.Module):
    ...     def __init__(self, width, width_of_other):
    ...         super().__init__()
    ...         self.attention = nn.MultiheadAttention(width, 1, kdim=width_of_other, vdim=width_of_other)
    ...     def forward(self, x, other):
    ...         return self.attention(x, other, other)[0]
    >>> net = rg.DualModality([(Attend(8, 4), nn.Linear(8, 8), Attend(4, 8), nn.Linear(4, 4))], ["other"])
    >>> video, audio = net(torch.randn(5, 8), torch.randn(9, 4))
    >>> video.shape, audio.shape
    (torch.Size([5, 8]), torch.Size([9, 4]))
    """

    def __init__(
        self,
        blocks: Iterable[Sequence[nn.Module]],
        kinds: Iterable[Kind],
        *,
        join: Join = Add(),
        policy: Policy = Reverse(),
    ) -> None:
        super().__init__(policy=policy)
        self.blocks = nn.ModuleList(
            nn.ModuleList(_networks(index, block, "four networks (f, g, j, k)", 4))
            for index, block in enumerate(blocks)
        )
        self.kinds = list(kinds)
        if len(self.kinds) != len(self.blocks):
            raise ValueError(f"DualModality: {len(self.kinds)} kinds for {len(self.blocks)} blocks")
        for kind in self.kinds:
            if kind not in ("self", "context", "other"):
                raise ValueError(f"DualModality: a kind is 'self', 'context' or 'other', not {kind!r}")
        self.join = _checked_join(join)

    def forward(self, x: Stream, m: Stream, **kwargs: Any) -> tuple[Stream, Stream]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Keywords: `context`, `context_mask`, `x_mask` (of the first modality), `m_mask` (of the second)."""
        return super().forward((x, m), **kwargs)

    def updates(
        self, *, context: Any = None, context_mask: Any = None, x_mask: Any = None, m_mask: Any = None
    ) -> Iterable[Update]:
        updates, used = [], set()
        for kind, (f, g, j, k) in zip(self.kinds, self.networks(), strict=True):
            for_f = self.keywords(kind, f, x_mask, m_mask, context, context_mask)
            for_j = self.keywords(kind, j, m_mask, x_mask, context, context_mask)
            for taken, mask, other_mask in ((for_f, "x_mask", "m_mask"), (for_j, "m_mask", "x_mask")):
                names = {"mask": mask, "context_mask": other_mask if kind == "other" else "context_mask"}
                used |= {names.get(key, key) for key in taken}
            of_other = kind == "other"
            updates += [
                Update("x1", f, ("x2", "m2") if of_other else ("x2",), self.join, for_f),
                Update("x2", g, ("x1",), self.join),
                Update("m1", j, ("m2", "x2") if of_other else ("m2",), self.join, for_j),
                Update("m2", k, ("m1",), self.join),
            ]
        given = {"context": context, "context_mask": context_mask, "x_mask": x_mask, "m_mask": m_mask}
        self.refuse({key: value for key, value in given.items() if value is not None and key not in used})
        return updates

    def keywords(
        self, kind: Kind, fn: nn.Module, mask: Any, other_mask: Any, context: Any, context_mask: Any
    ) -> Keywords:
        """What f (or j) gets in a block of this kind, with the masks of its own and of the other modality."""
        given = {"mask": mask}
        if kind == "context":
            if context is None:
                raise ValueError("DualModality: there are blocks of kind 'context', so context must be given")
            given |= {"context": context, "context_mask": context_mask}
        elif kind == "other":
            given["context_mask"] = other_mask
        return accepted(fn, {key: value for key, value in given.items() if value is not None})

    def refuse(self, unused: Keywords) -> None:
        """What to do with keywords that no network takes."""
        refuse_unrouted(unused, set(), self)

    def networks(self) -> Iterator[Sequence[nn.Module]]:
        """The networks f, g, j, k of each block."""
        for block in self.blocks:
            yield [*cast(nn.ModuleList, block)]

    def split(self, x: tuple[Stream, Stream]) -> Mapping[str, Stream]:
        return {"x1": x[0], "x2": x[0], "m1": x[1], "m2": x[1]}

    def merge(self, streams: Mapping[str, Stream]) -> tuple[Stream, Stream]:
        return trees.mean(streams["x1"], streams["x2"]), trees.mean(streams["m1"], streams["m2"])

    def unmerge(self, y: Any) -> Mapping[str, Stream]:
        raise ValueError(
            "DualModality returns the mean of two streams, which cannot be undone; use run() and invert() with both"
        )


class _Stack(Reversible):
    """What `Momentum` and `Midpoint` share: single functions in a row, keywords by signature."""

    def __init__(self, blocks: Iterable[nn.Module], *, policy: Policy = Reverse()) -> None:
        super().__init__(policy=policy)
        self.blocks = nn.ModuleList()
        for index, block in enumerate(blocks):
            if not isinstance(block, nn.Module):
                raise TypeError(f"block {index} must be a module, not {block!r}")
            self.blocks.append(block)

    def updates(self, **kwargs: Any) -> Iterator[Update]:
        routed = [(block, accepted(block, kwargs)) for block in self.blocks]
        refuse_unrouted(kwargs, {key for _, given in routed for key in given}, self)
        for index, (block, given) in enumerate(routed):
            yield from self.step(index, block, given)

    def step(self, index: int, block: nn.Module, kwargs: dict[str, Any]) -> Iterator[Update]:
        """The updates of one block."""
        raise NotImplementedError

    def unmerge(self, y: Stream) -> Mapping[str, Stream]:
        raise ValueError(
            f"{type(self).__name__} returns one of its two streams, so the output alone cannot be inverted; "
            "use run() and invert(), which hold both"
        )


class Momentum(_Stack):
    """A momentum network: `v = gamma * v + (1 - gamma) * f(x)`, then `x = x + v`, for each block; v begins at zero.

    Undoing an update divides by `gamma`, so rounding errors grow by `1 / gamma` per block: with 0.9 and float32,
    check gradients beyond some 50 blocks, or use `policy=Reverse(anchor_every=...)`.

    >>> import retrograd as rg
    >>> net = rg.Momentum([nn.Linear(8, 8) for _ in range(4)], gamma=0.9)
    >>> net(torch.randn(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, blocks: Iterable[nn.Module], gamma: float = 0.9, *, policy: Policy = Reverse()) -> None:
        super().__init__(blocks, policy=policy)
        if not isinstance(gamma, (int, float)) or not 0.0 < gamma < 1.0:
            raise ValueError(f"gamma must lie between 0 and 1, not {gamma!r}")
        self.gamma = gamma

    @classmethod
    def from_residual(cls, blocks: Iterable[nn.Module], gamma: float = 0.9, *, policy: Policy = Reverse()) -> Momentum:
        """Take the blocks of a plain residual stack, each of which computes `x + r(x)`.

        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.inner = nn.Linear(4, 4)
        ...     def forward(self, x):
        ...         return x + self.inner(x).tanh()
        >>> Momentum.from_residual([Block() for _ in range(3)], gamma=0.5)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
        """
        return cls((Residual(block) for block in blocks), gamma, policy=policy)

    def step(self, index: int, block: nn.Module, kwargs: dict[str, Any]) -> Iterator[Update]:
        yield Update("v", block, ("x",), Scale(self.gamma, 1.0 - self.gamma), kwargs)
        yield Update("x", _identity, ("v",))

    def split(self, x: Stream) -> Mapping[str, Stream]:
        return {"x": x, "v": trees.map_tensors(torch.zeros_like, x)}

    def merge(self, streams: Mapping[str, Stream]) -> Stream:
        return streams["x"]


class Midpoint(_Stack):
    """The midpoint scheme over single functions: `x[n+1] = x[n-1] + 2 * f[n](x[n])`, after one plain residual step.

    Two streams hold the last two states and take turns. Nothing is divided; with `join=ExactAdd()` it is exact.

    >>> import retrograd as rg
    >>> net = rg.Midpoint([nn.Linear(8, 8) for _ in range(4)])
    >>> net(torch.randn(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, blocks: Iterable[nn.Module], *, join: Join = Add(), policy: Policy = Reverse()) -> None:
        super().__init__(blocks, policy=policy)
        self.joins = _checked_join(join).scaled(1.0), join.scaled(2.0)

    @classmethod
    def from_residual(cls, blocks: Iterable[nn.Module], *, join: Join = Add(), policy: Policy = Reverse()) -> Midpoint:
        """Make an existing residual stack reversible: each of its blocks computes `x + r(x)`.

        The function computed is another one than before (the first block excepted), close to it where `r` is small.

        >>> net = Midpoint.from_residual([nn.TransformerEncoderLayer(8, 2, norm_first=True) for _ in range(4)])
        >>> net(torch.randn(5, 2, 8)).sum().backward()
        """
        return cls((Residual(block) for block in blocks), join=join, policy=policy)

    def step(self, index: int, block: nn.Module, kwargs: dict[str, Any]) -> Iterator[Update]:
        target, source = ("b", "a") if index % 2 == 0 else ("a", "b")
        yield Update(target, block, (source,), self.joins[min(index, 1)], kwargs)

    def split(self, x: Stream) -> Mapping[str, Stream]:
        return {"a": x, "b": x}

    def merge(self, streams: Mapping[str, Stream]) -> Stream:
        return streams["b" if len(self.blocks) % 2 else "a"]


class Residual(nn.Module):
    """`block(x) - x`: what a residual block adds."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.module = block  # the name under which `accepted` looks through a wrapper

    def forward(self, x: Stream, **kwargs: Any) -> Stream:
        return trees.map_tensors(torch.sub, self.module(x, **kwargs), x)


def _networks(index: int, block: Any, expected: str, number: int) -> list[nn.Module]:
    networks = list(block) if isinstance(block, (tuple, list, nn.ModuleList, nn.Sequential)) else None
    if networks is None or len(networks) != number or not all(isinstance(fn, nn.Module) for fn in networks):
        seen = [type(fn).__name__ for fn in networks] if networks is not None else type(block).__name__
        raise ValueError(f"block {index} must be {expected} of modules, not {seen}")
    return networks


def _checked_join(join: Join) -> Join:
    if not isinstance(join, Join):
        raise TypeError(f"join must be a Join such as Add(), not {join!r}")
    return join


def _checked_route(route: Route | None, depth: int) -> Route | None:
    if route is not None and not isinstance(route, Mapping):
        raise ValueError(f"route must be a dict from keywords to 'f', 'g' or 'fg', not {route!r}")
    for key, where in (route or {}).items():
        if not isinstance(where, (str, list, tuple)):
            raise ValueError(
                f"route[{key!r}] must be '', 'f', 'g' or 'fg' (or one such string per block), not {where!r}"
            )
        strings = [where] if isinstance(where, str) else list(where)
        if not isinstance(where, str) and len(strings) != depth:
            raise ValueError(f"route[{key!r}] has {len(strings)} entries for {depth} blocks")
        for string in strings:
            if not isinstance(string, str) or set(string) - {"f", "g"}:
                raise ValueError(
                    f"route[{key!r}] must be '', 'f', 'g' or 'fg' (or one such string per block), not {string!r}"
                )
    return route


def _identity(x: Stream) -> Stream:
    return x
