"""What the two processes of test_published_distributed.py run: every row, for each class, published and ours.

A row trains a model for one step across two gloo processes, on different data in each, and compares the gradients with
those of the plain loop in one process. It yields "right", "wrong by ...", or the error that was raised.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import CASES, WIDTH, Case, Net, data, error, loss_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

WORLD = 2
TIMEOUT = timedelta(seconds=20)


class Every(Net):
    """A network that uses each of its parameters."""

    def forward(self, x: Tensor, context: Tensor | None = None, **unused: Any) -> Tensor:
        return super().forward(x, x.cos() if context is None else context)


class Model(nn.Module):
    """One of the five classes. All of a row's variety is in here."""

    def __init__(
        self,
        case: Case,
        variant: str,
        network: type[Net] = Every,
        shared: bool = False,
        encoder: bool = False,
        times: int = 1,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case, self.times = case, times
        same = {role: network() for role in "fg"}
        self.sequence = case.build(variant, same.__getitem__ if shared else lambda role: network())
        torch.manual_seed(1)
        self.encoder = nn.Linear(WIDTH, WIDTH) if encoder else None

    def forward(self, x: Tensor) -> Tensor:
        context = None if self.encoder is None else self.encoder(x.flip(0)).tanh()
        for _ in range(self.times):
            x = self.case.run(self.sequence, x, context)
        return x


Wrap = Callable[[Any], nn.Module]


def ddp(**options: Any) -> Wrap:
    return lambda model: DistributedDataParallel(model, **options)


def fsdp_blocks(model: Model) -> nn.Module:
    """Each block as the published classes have it."""
    for block in model.sequence.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    return fully_shard(model)


def fsdp_pairs(model: Model) -> nn.Module:
    """The networks of each block as one group."""
    for block in model.sequence.blocks:  # type: ignore[union-attr]
        fully_shard([wrapped.net for wrapped in block.children()])
    return fully_shard(model)


ROWS: dict[str, tuple[Wrap, dict[str, Any]]] = {
    "ddp": (ddp(), {}),
    "ddp, unused parameters": (ddp(find_unused_parameters=True), {"network": Net}),
    "ddp, shared weights": (ddp(), {"shared": True}),
    "ddp, used twice": (ddp(), {"times": 2}),
    "ddp, context from an encoder": (ddp(), {"encoder": True}),
    "fsdp2, blocks": (fsdp_blocks, {}),
    "fsdp2, pairs of networks": (fsdp_pairs, {}),
}


def found_by(model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of the mean loss over some inputs."""
    for x in inputs:
        (loss_of(model(x)) / len(inputs)).backward()
    grads = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in grads.items()
        if grad is not None
    }


def outcome(rank: int, case: Case, variant: str, wrap: Wrap, options: dict[str, Any]) -> str:
    batches = [data(10 + rank) for rank in range(WORLD)]
    expected = found_by(Model(case, "plain", **options), batches)
    try:
        found = found_by(wrap(Model(case, variant, **options)), [batches[rank]])
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    found = {name: grad for name, grad in found.items() if name in expected or grad.any()}
    off = error(found, expected)
    return "right" if off < 1e-10 else f"wrong by {off:.0%}"


def run_rows(rank: int, directory: Path) -> None:
    """All rows, each in a process group of its own, since one that fails may leave half a collective behind."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")  # what DDP and FSDP2 say of the published classes
    outcomes: dict[str, str] = {}
    for row, (wrap, options) in ROWS.items():
        for case in CASES:
            for variant in ("published", "ours"):
                key = f"{row}: {variant} {case}"
                meeting = directory / key.replace(" ", "_").replace(":", "")
                dist.init_process_group("gloo", f"file://{meeting}", timeout=TIMEOUT, rank=rank, world_size=WORLD)
                outcomes[key] = outcome(rank, case, variant, wrap, options)
                with contextlib.suppress(RuntimeError):
                    dist.destroy_process_group()
    (directory / f"rank{rank}.json").write_text(json.dumps(outcomes))
