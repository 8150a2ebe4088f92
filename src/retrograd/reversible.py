"""`Reversible`: the base of every module over the engine.

A module is its updates, described anew at each call by `updates()`: so replacing, compiling, sharding or freezing a
submodule just works, and dropping a layer is a plain `continue`. The recipes are in sequences.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .engine import checked, execute, invert
from .policies import Policy, Reverse
from .ranks import Drawn, distributed
from .streams import Stream
from .update import Update, listed


def _undescribed(self: nn.Module, **kwargs: Any) -> Iterable[Update]:
    """The program, for these keyword arguments. Called once per forward or inverse."""
    raise NotImplementedError(f"{type(self).__name__} must define updates()")


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

    # For torch.compile of each fn, when torch.compile(model) compiles the module.
    compile_options: Mapping[str, Any] = {}

    def __init__(self, *, policy: Policy = Reverse()) -> None:
        super().__init__()
        self.policy = policy
        self.compiled: dict[int, tuple[Any, Any]] = {}  # see compiled.py

    @property
    def policy(self) -> Policy:
        """What becomes of the tensors that the program saves. It may be changed at any time."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = checked(policy)

    updates: Callable[..., Iterable[Update]] = _undescribed  # like forward: a subclass chooses its keywords

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

    def forward(self, x: Any, *others: Any, **kwargs: Any) -> Any:
        if others:
            raise TypeError(
                f"{type(self).__name__} takes one input, and what its networks need besides as keywords, such as "
                f"mask=mask; {len(others)} more came without a keyword"
            )
        return self.merge(self.run(self.split(x), **kwargs))

    def inverse(self, y: Any, **kwargs: Any) -> Any:
        """The input that gave this output, in eval mode or without anything random."""
        return self.unsplit(self.invert(self.unmerge(y), **kwargs))

    def run(self, streams: Mapping[str, Stream], **kwargs: Any) -> dict[str, Stream]:
        """The program on streams that the caller holds: no split, no merge."""
        compiling = torch.compiler.is_compiling()
        if compiling and (torch.compiler.is_exporting() or not torch.is_grad_enabled()):
            return execute(self.updates(**kwargs), streams, self.policy_for(streams))  # the plain loop: traced whole
        if compiling or "torch._dynamo" in sys.modules:
            from . import compiled

            return compiled.run(self, streams, kwargs, compiling)  # pyright: ignore[reportCallIssue]
        return execute(self.described(kwargs), streams, self.policy_for(streams))

    def described(self, kwargs: Mapping[str, Any]) -> Iterable[Update]:
        """The program of a call; if it is drawn at random, the same one on all ranks that share its weights."""
        if not distributed():
            return self.updates(**kwargs)
        drawn = Drawn()
        updates = listed(self.updates(**kwargs))
        drawn.compare(updates, self)
        return updates

    def invert(self, streams: Mapping[str, Stream], **kwargs: Any) -> dict[str, Stream]:
        """The program backwards on streams that the caller holds."""

        def described() -> Iterator[Update]:  # run by invert, which then sees random numbers that updates() draws
            yield from listed(self.updates(**kwargs))

        return invert(described(), streams, policy=self.policy_for(streams))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "compiled": {}}  # type: ignore[misc]
