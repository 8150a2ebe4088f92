"""The command `retrograd bench`: a step of one's own model kept, checkpointed, reversed and otherwise, side by side.

Memory is what `measure` says. Times are medians of rounds in which every policy has its turn, so that a machine that
slows down does so for all of them.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from .measure import belongings, device_of, exchanged, measure, train_step
from .plan import checkpointed
from .policies import Keep, Policy, Reverse
from .reversible import Reversible
from .screen import Screen, first_line, format_seconds
from .sizes import format_bytes


@dataclasses.dataclass
class BenchRow:
    """One policy: its peak and activations in bytes, the replays of a step, and the seconds of each round. `failed`
    says why there are none."""

    policy: str
    peak: int = 0
    activations: int = 0
    replays: int = 0
    rounds: list[float] = dataclasses.field(default_factory=list)
    failed: str | None = None

    @property
    def seconds(self) -> float | None:
        return statistics.median(self.rounds) if self.rounds else None


@dataclasses.dataclass
class Bench:
    """What `bench` has found so far."""

    device: str
    rows: list[BenchRow]
    stopped: bool = False

    def as_dict(self) -> dict[str, Any]:
        rows = [dataclasses.asdict(row) | {"seconds": row.seconds} for row in self.rows]
        return {"device": self.device, "stopped": self.stopped, "rows": rows}

    def table(self) -> list[tuple[str, ...]]:
        """Rows for a person, the first one a heading; ratios are to kept."""
        kept = self.rows[0]
        rows: list[tuple[str, ...]] = [("", "a step", "activations", "peak", "replays")]
        for row in self.rows:
            if row.failed is not None:
                rows.append((row.policy, "-", "-", "-", "-"))
                continue
            took = "" if row.seconds is None else format_seconds(row.seconds) + ratio(row.seconds, kept.seconds)
            held = format_bytes(row.activations) + ratio(row.activations, kept.activations)
            rows.append((row.policy, took, held, format_bytes(row.peak), str(row.replays)))
        return rows


def ratio(value: float, base: float | None) -> str:
    return f"{value / base:6.2f}x" if base else ""


def bench(
    model: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    policies: Mapping[str, Policy],
    *,
    rounds: int = 5,
    autocast: torch.dtype | None = None,
    screen: Screen,
) -> Bench:
    """Measure a step of `model` kept, checkpointed, reversed, and under each of `policies`, which have names.

    Ctrl-C ends it, with what was found until then. What does not fit into memory, or a budget that cannot be met, is a
    row that says so.
    """
    weights, others = belongings(model, inputs, kwargs)
    leaves = [tensor for tensor in (*weights, *others) if tensor.is_leaf and tensor.requires_grad]
    device = device_of([*weights, *others])
    ways = scenarios([module for module in model.modules() if isinstance(module, Reversible)], policies)
    found = Bench(str(device), [])

    def timed() -> float:
        context = nullcontext() if autocast is None else torch.autocast(device.type, autocast)
        began = time.perf_counter()
        train_step(model, inputs, dict(kwargs), context, leaves)
        if device.type != "cpu":
            torch.get_device_module(device.type).synchronize(device)
        return time.perf_counter() - began

    try:
        with exchanged(leaves, "grad", None), screen.bar("measuring", len(ways) * (rounds + 1)) as advance:
            for name, way in ways.items():
                row = BenchRow(name)
                with way():
                    try:
                        step = measure(model, *inputs, autocast=autocast, **kwargs)
                        row.peak, row.activations, row.replays = step.peak, step.activations, step.replays
                    except (RuntimeError, MemoryError) as error:
                        if out_of_memory(error):
                            row.failed = "does not fit into memory"
                        elif str(error).startswith("Auto: "):
                            row.failed = first_line(error).removeprefix("Auto: ")  # a budget that cannot be met
                        else:
                            raise
                found.rows.append(row)
                advance(name)
            for _ in range(rounds):
                for row in found.rows:
                    if row.failed is None:
                        try:
                            with ways[row.policy]():
                                row.rounds.append(timed())
                        except (RuntimeError, MemoryError) as error:
                            if not out_of_memory(error):
                                raise
                            row.failed = "does not fit into memory"
                    advance(row.policy)
    except KeyboardInterrupt:
        found.stopped = True
    return found


def out_of_memory(error: BaseException) -> bool:
    """Whether this is what torch raises where memory is spent: on an accelerator an error of its own, on a CPU not."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def scenarios(
    reversibles: Sequence[Reversible], policies: Mapping[str, Policy]
) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """For each row its name, and what makes a context in which the model behaves so."""
    if not reversibles:
        raise ValueError("there is no Reversible in the model, so there is no policy to compare")

    def under(policy: Policy) -> Callable[[], AbstractContextManager[None]]:
        return lambda: exchanged(reversibles, "policy", policy)

    plain = {"kept": under(Keep()), "checkpointed": lambda: checkpointed(reversibles), "reversed": under(Reverse())}
    return plain | {name: under(policy) for name, policy in policies.items()}
