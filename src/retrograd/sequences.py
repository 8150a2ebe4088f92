"""Modules over the engine: `Reversible`, the base, and the recipes `ReversibleSequence`, `Momentum` and `Midpoint`.

A module is its updates, described anew at each call by `updates()`: so replacing, compiling, sharding or freezing a
submodule just works, and dropping a layer is a plain `continue`. A recipe adds how an input becomes streams (`split`)
and how streams become an output (`merge`).

Pairs: RevNet (Gomez et al., 2017) and Reformer (Kitaev et al., 2020). Momentum: Sander et al., 2021. Midpoint: the
two-step scheme of ordinary differential equations, used for networks by Chang et al., 2018.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from . import streams as trees
from .engine import execute, invert
from .joins import Add, Join, Scale
from .policies import Keep, Policy, Reverse
from .streams import Stream
from .update import Update


class Reversible(nn.Module):
    """A module that is a program of updates. Subclass it, register your networks, and describe them in `updates`.

    Called with a dict of streams, it returns the dict of streams after its updates; `inverse` goes back. Keyword
    arguments go to `updates`. A subclass may define `split`, `merge`, `unmerge` and `unsplit` to take and return
    something else.

    >>> import retrograd as rg
    >>> class Mine(rg.Reversible):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.f, self.g = nn.Linear(4, 4), nn.Linear(4, 4)
    ...     def updates(self, **kwargs):
    ...         yield rg.Update("a", self.f, "b")
    ...         yield rg.Update("b", self.g, "a")
    >>> net, x = Mine(), torch.randn(2, 4)
    >>> out = net({"a": x, "b": x})
    >>> torch.allclose(net.inverse(out)["a"], x, atol=1e-6)
    True
    """

    policy: Policy

    def __init__(self, *, policy: Policy | None = None) -> None:
        super().__init__()
        if policy is not None and not isinstance(policy, Policy):
            raise TypeError(f"policy must be a Policy such as Reverse(), not {policy!r}")
        self.policy = Reverse() if policy is None else policy
        self._compiled: dict[int, tuple[Any, Any]] = {}  # see _through

    def updates(self, **kwargs: Any) -> Iterable[Update]:
        """The program, for these keyword arguments. Called once per forward or inverse."""
        raise NotImplementedError(f"{type(self).__name__} must define updates()")

    def split(self, x: Any) -> Mapping[str, Stream]:
        """The streams that an input becomes."""
        return x

    def merge(self, streams: Mapping[str, Stream]) -> Any:
        """The output that the streams become."""
        return streams

    def unmerge(self, y: Any) -> Mapping[str, Stream]:
        """The streams that `merge` made `y` from; where that cannot be known, a ValueError."""
        return y

    def unsplit(self, streams: Mapping[str, Stream]) -> Any:
        """The input that `split` made these streams from."""
        return streams

    def policy_for(self, streams: Mapping[str, Stream]) -> Policy:
        """The policy of a call on these streams."""
        return self.policy

    def forward(self, x: Any, **kwargs: Any) -> Any:
        return self.merge(self.run(self.split(x), **kwargs))

    def inverse(self, y: Any, **kwargs: Any) -> Any:
        """The input that gave this output, in eval mode or without anything random."""
        return self.unsplit(self.invert(self.unmerge(y), **kwargs))

    def run(self, streams: Mapping[str, Stream], **kwargs: Any) -> dict[str, Stream]:
        """The program on streams that the caller holds: no split, no merge."""
        return self._run(torch.compiler.is_compiling(), streams, kwargs)  # pyright: ignore[reportCallIssue]

    def invert(self, streams: Mapping[str, Stream], **kwargs: Any) -> dict[str, Stream]:
        """The program backwards on streams that the caller holds."""
        return invert(self.updates(**kwargs), streams, policy=self.policy_for(streams))

    # Under torch.compile(model) Dynamo sees the forward but not the backward. So the engine steps out of its sight and
    # calls each fn through a torch.compile of its own, in both passes.
    @torch.compiler.disable
    def _run(self, compiling: bool, streams: Mapping[str, Stream], kwargs: dict[str, Any]) -> dict[str, Stream]:
        through = self._through if compiling and not torch.compiler.is_exporting() else None
        return execute(self.updates(**kwargs), streams, self.policy_for(streams), through)

    def _through(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        known = self._compiled.get(id(fn))
        if known is None or known[0] is not fn:
            known = self._compiled[id(fn)] = (fn, torch.compile(fn))
        return known[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_compiled": {}}  # type: ignore[misc]


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
        self.blocks = nn.ModuleList(nn.ModuleList(_pair(index, block)) for index, block in enumerate(blocks))
        if split != "duplicate" and (not isinstance(split, int) or isinstance(split, bool)):
            raise ValueError(f"split must be 'duplicate' or the dimension to halve, not {split!r}")
        if merge not in ("mean", "sum", "concat"):
            raise ValueError(f"merge must be 'mean', 'sum' or 'concat', not {merge!r}")
        if merge == "concat" and split == "duplicate":
            raise ValueError("merge='concat' puts halves together; it needs split=<the dimension to halve>")
        if not 0.0 <= layer_dropout < 1.0:
            raise ValueError(f"layer_dropout must be a probability below 1, not {layer_dropout!r}")
        if not isinstance(reverse_above, int) or reverse_above < 0:
            raise ValueError(f"reverse_above must be a length, 0 or more, not {reverse_above!r}")
        if not isinstance(join, Join):
            raise TypeError(f"join must be a Join such as Add(), not {join!r}")
        self.split_as, self.merge_as, self.join = split, merge, join
        self.route = _checked_route(route, len(self.blocks))
        self.layer_dropout, self.reverse_above = layer_dropout, reverse_above

    def updates(self, **kwargs: Any) -> Iterator[Update]:
        taken: set[str] = set()
        routed = []
        for index, block in enumerate(self.blocks):
            f, g = cast(nn.ModuleList, block)
            for_f, for_g = (self._kwargs(name, fn, index, kwargs) for name, fn in (("f", f), ("g", g)))
            taken |= for_f.keys() | for_g.keys()
            routed.append((f, g, for_f, for_g))
        _refuse_unrouted(kwargs, taken, self)
        for f, g, for_f, for_g in self._chosen(routed):
            yield Update("a", f, ("b",), self.join, for_f)
            yield Update("b", g, ("a",), self.join, for_g)

    def _kwargs(self, name: str, fn: nn.Module, index: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords that f (or g) of one block gets."""
        if self.route is None:
            return accepted(fn, kwargs)
        routes = {key: where if isinstance(where, str) else where[index] for key, where in self.route.items()}
        return {key: value for key, value in kwargs.items() if name in routes.get(key, "")}

    def _chosen(self, blocks: list[Any]) -> list[Any]:
        """Layer dropout: each block is skipped with that probability, and if all would be, the first stays."""
        if not (self.training and self.layer_dropout):
            return blocks
        draws = torch.rand(len(blocks)).tolist()
        return [block for block, draw in zip(blocks, draws, strict=True) if draw >= self.layer_dropout] or blocks[:1]

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
        lengths = [leaf.shape[1] for leaf in trees.leaves_of(dict(streams), Tensor) if leaf.dim() > 1]
        return self.policy if max(lengths, default=0) > self.reverse_above else Keep()


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
        _refuse_unrouted(kwargs, {key for _, given in routed for key in given}, self)
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
        if not 0.0 < gamma < 1.0:
            raise ValueError(f"gamma must lie between 0 and 1, not {gamma!r}")
        self.gamma = gamma

    @classmethod
    def from_residual(cls, blocks: Iterable[nn.Module], gamma: float = 0.9, *, policy: Policy = Reverse()) -> Momentum:
        """Take the blocks of a plain residual stack, each of which computes `x + r(x)`."""
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

    Two streams hold the last two states and take turns. Nothing is divided, and doubling is exact.

    >>> import retrograd as rg
    >>> net = rg.Midpoint([nn.Linear(8, 8) for _ in range(4)])
    >>> net(torch.randn(2, 8)).shape
    torch.Size([2, 8])
    """

    @classmethod
    def from_residual(cls, blocks: Iterable[nn.Module], *, policy: Policy = Reverse()) -> Midpoint:
        """Make an existing residual stack reversible: each of its blocks computes `x + r(x)`.

        The function computed is another one than before (the first block excepted), close to it where `r` is small.
        """
        return cls((Residual(block) for block in blocks), policy=policy)

    def step(self, index: int, block: nn.Module, kwargs: dict[str, Any]) -> Iterator[Update]:
        target, source = ("b", "a") if index % 2 == 0 else ("a", "b")
        yield Update(target, block, (source,), Scale(1.0, 1.0 if index == 0 else 2.0), kwargs)

    def split(self, x: Stream) -> Mapping[str, Stream]:
        return {"a": x, "b": x}

    def merge(self, streams: Mapping[str, Stream]) -> Stream:
        return streams["b" if len(self.blocks) % 2 else "a"]


class Residual(nn.Module):
    """`block(x) - x`: what a residual block adds."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Stream, **kwargs: Any) -> Stream:
        return trees.map_tensors(torch.sub, self.block(x, **kwargs), x)


def accepted(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that a network names in its signature; all of them, if it takes `**kwargs`.

    Compiled and wrapped modules are looked through.

    >>> accepted(nn.Linear(2, 2), {"mask": None})
    {}
    """
    if not kwargs:
        return {}
    names = _keywords(_signed(fn))
    return dict(kwargs) if names is None else {key: value for key, value in kwargs.items() if key in names}


def _signed(fn: Any) -> Callable[..., Any]:
    """The function whose signature counts."""
    while isinstance(fn, nn.Module):
        if isinstance(fn, Residual):
            fn = fn.block
        elif isinstance(inner := getattr(fn, "_orig_mod", None), nn.Module):  # torch.compile
            fn = inner
        elif isinstance(inner := getattr(fn, "module", None), nn.Module) and _takes_anything(fn):  # DDP, AveragedModel
            fn = inner
        else:
            return type(fn).forward if "forward" not in vars(fn) else fn.forward
    return fn


def _takes_anything(module: nn.Module) -> bool:
    return _keywords(type(module).forward) is None


@lru_cache(maxsize=1024)
def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """The keywords a function names; None if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _refuse_unrouted(kwargs: Mapping[str, Any], taken: set[str], module: nn.Module) -> None:
    for key in kwargs:
        if key not in taken:
            raise TypeError(
                f"{type(module).__name__}: no network takes the keyword {key!r}; name it in a network's forward, or "
                "give route={...} to say which network gets it"
            )


def _pair(index: int, block: Any) -> list[nn.Module]:
    pair = list(block) if isinstance(block, (tuple, list, nn.ModuleList, nn.Sequential)) else None
    if pair is None or len(pair) != 2 or not all(isinstance(fn, nn.Module) for fn in pair):
        seen = type(block).__name__ if pair is None else f"{len(pair)} of {[type(fn).__name__ for fn in pair]}"
        raise ValueError(f"block {index} must be a pair (f, g) of modules, not {seen}")
    return pair


def _checked_route(route: Route | None, depth: int) -> Route | None:
    for key, where in (route or {}).items():
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
