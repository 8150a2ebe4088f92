"""How a reversible module runs under torch.compile(model).

Dynamo sees the forward but not the backward, where the replays are. So the engine steps out of its sight and calls each
`fn` through a torch.compile of its own, in both passes. A file of its own because `torch.compiler.disable` imports
Dynamo, which takes as long as torch itself: whoever does not compile need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .engine import execute
from .streams import Stream

if TYPE_CHECKING:
    from .reversible import Reversible


@torch.compiler.disable
def run(
    module: Reversible, streams: Mapping[str, Stream], kwargs: dict[str, Any], compiling: bool
) -> dict[str, Stream]:
    """`Reversible.run`, unseen by Dynamo."""
    if not compiling:
        return execute(module.described(kwargs), streams, module.policy_for(streams))
    used: dict[int, tuple[Any, Any]] = {}

    def through(fn: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.compile(fn)`, the same one at each call."""
        known = module.compiled.get(id(fn))
        if known is None or known[0] is not fn:
            known = fn, torch.compile(fn, **module.compile_options)
        used[id(fn)] = known
        return known[1]

    try:
        return execute(module.described(kwargs), streams, module.policy_for(streams), through)
    finally:
        # Functions may be made anew at each call: the tapes hold what their replays need. Modules stay.
        modules = {key: known for key, known in module.compiled.items() if isinstance(known[0], nn.Module)}
        module.compiled = modules | used
