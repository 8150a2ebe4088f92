"""Which keyword arguments go to which network: by default, each network gets those that its signature names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import nn

Keywords = dict[str, Any]


def accepted(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that a network names in its signature; all of them, if it takes `**kwargs`.

    Compiled and wrapped modules are looked through.

    >>> accepted(nn.Linear(2, 2), {"mask": None})
    {}
    """
    if not kwargs:
        return {}
    names = _names(fn)
    return dict(kwargs) if names is None else {key: value for key, value in kwargs.items() if key in names}


def _names(fn: Any) -> frozenset[str] | None:
    """The keywords that a network names; None if it takes any."""
    if not isinstance(fn, nn.Module):
        return _named_by(fn)
    if isinstance(inner := getattr(fn, "_orig_mod", None), nn.Module):  # torch.compile
        return _names(inner)
    names = _named_by(fn.forward) if "forward" in vars(fn) else _named_by_class(type(fn))
    inner = _wrapped_by(fn) if names is None else None
    return names if inner is None else _names(inner)


def _wrapped_by(fn: nn.Module) -> nn.Module | None:
    """The network inside of a wrapper that takes any keyword."""
    of_peft: Any = getattr(fn, "get_base_model", None)  # PeftModel
    if of_peft is not None:
        return of_peft()
    for name in ("module", "base_layer"):  # DistributedDataParallel, AveragedModel, Residual; a layer with an adapter
        if isinstance(inner := getattr(fn, name, None), nn.Module):
            return inner
    return None


@lru_cache(maxsize=1024)
def _named_by_class(kind: type[nn.Module]) -> frozenset[str] | None:
    return _named_by(kind.forward, skipped=2)


def _named_by(function: Callable[..., Any], skipped: int = 1) -> frozenset[str] | None:
    """What a signature names after its first parameters: those are the stream's, and `self`."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except ValueError:  # some builtins have none
        return frozenset()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(p.name for p in parameters[skipped:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def refuse_unrouted(kwargs: Mapping[str, Any], taken: set[str], module: nn.Module) -> None:
    """A keyword that no network gets is a TypeError."""
    for key in kwargs:
        if key not in taken:
            raise TypeError(
                f"{type(module).__name__}: no network takes the keyword {key!r}; name it in a network's forward, or "
                "give route={...} to say which network gets it"
            )
