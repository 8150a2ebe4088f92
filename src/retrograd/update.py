"""An update: one step of a program, `stream[target] = join(stream[target], fn(*stream[sources], **kwargs))`.

A program is a list of updates. This file says what an update is and refuses what cannot be one (R1); running it is the
engine's business.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from .joins import JOINS, Add, ExactAdd, Join
from .policies import Keep, Offload, Policy, Reverse
from .streams import Structure, Tensor, flatten_like, unflatten, versions

if TYPE_CHECKING:
    from .alarms import RangeAlarms


@dataclass(frozen=True)
class Update:
    """One step of a program: `fn` reads the sources and its output is joined to the target.

    `fn` is any callable, `sources` a name or several, `join` how the output enters the target, `kwargs` what else `fn`
    gets, `policy` what becomes of its saved tensors (None: as the whole program).

    >>> import torch
    >>> Update("a", torch.sin, "b").sources
    ('b',)
    >>> Update("a", torch.sin, ("a", "b"))
    Traceback (most recent call last):
    ValueError: Update of 'a' by sin: the target is among the sources ('a', 'b'), so the update could not be undone; ...
    """

    target: str
    fn: Callable[..., Any]
    sources: tuple[str, ...]
    join: Join = field(default_factory=Add)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    policy: Policy | None = None

    def __post_init__(self) -> None:
        if type(self.sources) is not tuple:
            if not isinstance(self.sources, Iterable):
                raise TypeError(f"{self}: sources are names of streams, not {self.sources!r}")
            object.__setattr__(
                self, "sources", (self.sources,) if isinstance(self.sources, str) else tuple(self.sources)
            )
        if type(self.kwargs) is not dict and not isinstance(self.kwargs, Mapping):
            raise TypeError(f"{self}: kwargs must be a dict of keyword arguments for fn, not {self.kwargs!r}")
        object.__setattr__(self, "kwargs", dict(self.kwargs))  # the caller's may change before the replay
        for name in (self.target, *self.sources):
            if not isinstance(name, str):
                raise TypeError(
                    f"{self}: target and sources are names of streams, not {self.target!r}, {self.sources!r}"
                )
        if self.target in self.sources:
            raise ValueError(
                f"{self}: the target is among the sources {self.sources}, so the update could not be undone; "
                "read another stream, or split this one in two"
            )
        if not callable(self.fn):
            raise TypeError(f"{self}: fn must be callable")
        if type(self.join) not in JOINS and not isinstance(self.join, Join):
            raise TypeError(f"{self}: join must be a Join such as Add(), not {self.join!r}")
        if self.policy is not None and not isinstance(self.policy, (Reverse, Keep, Offload)):
            raise TypeError(f"{self}: policy must be one that an update can have, such as Keep(), not {self.policy!r}")

    def __str__(self) -> str:
        return f"Update of {self.target!r} by {self.name}"

    @property
    def name(self) -> str:
        """What a person would call `fn`."""
        return getattr(self.fn, "__name__", None) or type(self.fn).__name__

    def label(self, index: int) -> str:
        """How errors name this update."""
        return f"update {index} (target {self.target!r}, fn {self.name})"

    def inverse(self) -> Update:
        """The update that undoes this one."""
        return replace(self, join=self.join.inverse())

    def parts(self, index: int, out: Any, target: list[Tensor], structure: Structure) -> list[list[Tensor]]:
        """`fn`'s output as one list of tensors per part, each fitting the target, or a ValueError (R1)."""
        parts = self.join.parts
        if parts == 1 and structure is None and isinstance(out, Tensor):  # as below, for what is common
            into = target[0]
            if out.shape == into.shape and (out.dtype is into.dtype or _can_cast(out.dtype, into.dtype)):
                return [[out]]
        if parts > 1 and not (isinstance(out, (tuple, list)) and len(out) == parts):
            raise ValueError(
                f"{self.label(index)}: {type(self.join).__name__} needs {parts} parts, fn returned {_shown(out)}"
            )
        flat = []
        for part in out if parts > 1 else (out,):
            try:
                leaves = flatten_like(part, structure)
            except ValueError as error:
                raise ValueError(
                    f"{self.label(index)}: fn must return the structure of its target, not {_shown(part)}: {error}"
                ) from None
            for leaf, into in zip(leaves, target, strict=True):
                if leaf.shape != into.shape:
                    raise ValueError(
                        f"{self.label(index)}: fn returned shape {tuple(leaf.shape)} for a target of shape "
                        f"{tuple(into.shape)}; they must be equal (expand the output if it is meant to broadcast)"
                    )
                if leaf.dtype != into.dtype and not _can_cast(leaf.dtype, into.dtype):
                    raise ValueError(
                        f"{self.label(index)}: fn returned {leaf.dtype} for a target of {into.dtype}, which cannot "
                        "hold it; cast the output in fn"
                    )
            flat.append(leaves)
        return flat


class Step:
    """An update at its place in a program, on streams as flat lists of tensors."""

    __slots__ = ("index", "update", "fn", "structures", "tensors")

    def __init__(self, index: int, update: Update, fn: Callable[..., Any], structures: dict[str, Structure]) -> None:
        self.index, self.update, self.fn, self.structures = index, update, fn, structures
        # Whether each source is a tensor: no trees among them.
        self.tensors = [*map(structures.get, update.sources)] == [None] * len(update.sources)

    def call(self, sources: list[list[Tensor]], target: list[Tensor]) -> list[list[Tensor]]:
        """`fn` on the sources; what it returns, part by part, fits the target (R1). The sources are unchanged (R8)."""
        leaves = [*chain.from_iterable(sources)]
        streams = leaves if self.tensors else self._streams(sources)
        # While torch.compile or torch.export traces, versions cannot be read.
        watched = [] if torch.compiler.is_compiling() else leaves
        before = versions(watched)
        out = self.fn(*streams, **self.update.kwargs)
        if versions(watched) != before:
            raise RuntimeError(
                f"{self.update.label(self.index)}: fn changes a source {self.update.sources} in place; streams must "
                "stay as they are: use the out-of-place operation (inplace=False), or clone the input in fn"
            )
        return self.update.parts(self.index, out, target, self.structures[self.update.target])

    def _streams(self, sources: list[list[Tensor]]) -> list[Any]:
        names = self.update.sources
        return [unflatten(leaves, self.structures[name]) for name, leaves in zip(names, sources, strict=True)]

    def join(self, target: list[Tensor], parts: list[list[Tensor]], alarms: RangeAlarms | None = None) -> list[Tensor]:
        join = self.update.join
        if alarms is None or not isinstance(join, ExactAdd):
            return self._joined(join.apply, target, parts)
        return self._joined(
            lambda leaf, *out: join.apply(leaf, *out, flag=alarms.flag(self.index, leaf.device)), target, parts
        )

    def unjoin(self, target: list[Tensor], parts: list[list[Tensor]]) -> list[Tensor]:
        return self._joined(self.update.join.invert, target, parts)

    def _joined(self, join: Callable[..., Tensor], target: list[Tensor], parts: list[list[Tensor]]) -> list[Tensor]:
        if len(target) == len(parts) == 1:
            leaf = target[0]
            new = join(leaf, parts[0][0])
            return [new if new.dtype is leaf.dtype else new.to(leaf.dtype)]
        joined = []
        for leaf, *out in zip(target, *parts, strict=True):
            new = join(leaf, *out)
            joined.append(new if new.dtype == leaf.dtype else new.to(leaf.dtype))
        return joined


def listed(updates: Iterable[Update]) -> list[Update]:
    """The updates as a list, if every one is an `Update`."""
    if not isinstance(updates, Iterable):
        raise TypeError(f"a program is a list of Updates, not {updates!r}; does updates() yield or return them?")
    found = list(updates)
    for index, update in enumerate(found):
        if not isinstance(update, Update):
            raise TypeError(f"update {index} must be an Update, not {update!r}")
    return found


def program(updates: Iterable[Update], names: Iterable[str]) -> list[Update]:
    """The updates as a list, once every name that they use is there (R1)."""
    found, known = listed(updates), set(names)
    for index, update in enumerate(found):
        for name in (update.target, *update.sources):
            if name not in known:
                raise ValueError(f"{update.label(index)}: there is no stream {name!r}; the streams are {sorted(known)}")
    return found


_known_casts = functools.cache(torch.can_cast)


def _can_cast(dtype: torch.dtype, into: torch.dtype) -> bool:
    return torch.compiler.is_compiling() or _known_casts(dtype, into)  # while tracing, torch cannot be asked


def _shown(out: Any) -> str:
    if isinstance(out, Tensor):
        return f"a tensor of shape {tuple(out.shape)}"
    if isinstance(out, dict):
        return f"a dict with keys {list(out)}"
    if isinstance(out, (tuple, list)):
        return f"a {type(out).__name__} of {len(out)}"
    return f"a {type(out).__name__}"
