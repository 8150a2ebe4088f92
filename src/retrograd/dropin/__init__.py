"""The classes of four published packages, on this engine: same constructor, same forward, same checkpoints.

`install()` puts them into whichever of the packages can be imported, so that the packages' own models use them:

    import retrograd.dropin
    retrograd.dropin.install()                      # for good, or
    with retrograd.dropin.install():                # inside a block
        model = ReformerLM(...)

One file for each package: axial_attention, nuwa, reformer, se3. `retrograd` itself imports none of them. A fifth,
`retrograd.dropin.transformers` (Reformer, and residual models made reversible), wraps what a model holds: there is
nothing to install.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from . import axial_attention, nuwa, reformer, se3

__all__ = ["Installed", "axial_attention", "install", "nuwa", "reformer", "se3", "uninstall"]

_HOMES: dict[str, ModuleType] = {
    "axial_attention.axial_attention": axial_attention,
    "nuwa_pytorch.nuwa_pytorch": nuwa,
    "reformer_pytorch.reformer_pytorch": reformer,
    "se3_transformer_pytorch.se3_transformer_pytorch": se3,
}

_originals: dict[tuple[str, str], type] = {}


class Installed:
    """What `install` has done; as a context manager, it is undone at the end of the block."""

    def __init__(self, packages: list[str], swapped: list[tuple[str, str]]) -> None:
        self.packages, self._swapped = packages, swapped

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *error: object) -> None:
        _put_back(self._swapped)

    def __repr__(self) -> str:
        return f"Installed(packages={self.packages})"


def install() -> Installed:
    """Swap the classes inside every one of the four packages that can be imported; the result names them."""
    packages, swapped = [], []
    for name, ours in _HOMES.items():
        try:
            home: Any = importlib.import_module(name)
        except ImportError:
            continue
        packages.append(name.split(".")[0])
        for replacement in ours.CLASSES:
            key = (name, replacement.__name__)
            if key not in _originals:
                _originals[key] = getattr(home, replacement.__name__)
                setattr(home, replacement.__name__, replacement)
                swapped.append(key)
    return Installed(packages, swapped)


def uninstall() -> None:
    """Put the published classes back. Without an `install` before, nothing happens."""
    _put_back(list(_originals))


def _put_back(keys: list[tuple[str, str]]) -> None:
    for name, attribute in keys:
        if (original := _originals.pop((name, attribute), None)) is not None:
            setattr(importlib.import_module(name), attribute, original)
