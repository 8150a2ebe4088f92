"""How a reversible module runs under torch.compile(model).

Dynamo sees the forward but not the backward, where the replays are. So the engine steps out of its sight and calls each
`fn` through a torch.compile of its own, in both passes. A file of its own because `torch.compiler.disable` imports
Dynamo, which takes as long as torch itself: whoever does not compile need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .engine import execute
from .streams import Stream

if TYPE_CHECKING:
    from .reversible import Reversible


@torch.compiler.disable
def run(
    module: Reversible, streams: Mapping[str, Stream], kwargs: dict[str, Any], compiling: bool
) -> dict[str, Stream]:
    """`Reversible.run`, unseen by Dynamo."""
    through = (lambda fn: _compiled(module, fn)) if compiling else None
    return execute(module.described(kwargs), streams, module.policy_for(streams), through)


def _compiled(module: Reversible, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile(fn)`, the same one at each call."""
    known = module.compiled.get(id(fn))
    if known is None or known[0] is not fn:
        known = (fn, torch.compile(fn, **module.compile_options))
    while len(module.compiled) > 4096:  # functions made anew at each call would gather here
        module.compiled.pop(next(iter(module.compiled)))
    module.compiled[id(fn)] = known
    return known[1]
