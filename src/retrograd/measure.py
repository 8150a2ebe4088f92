"""`measure`: what one training step holds in memory at its peak, what it costs, and which updates are to blame.

On a CPU the peak is that of the storages alive (ledger.py), to the byte; on CUDA it is the allocator's. plan.py
predicts the same without allocating.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .ledger import Ledger, LiveBytes, UpdateCost, observed
from .reach import reach
from .sizes import format_bytes, parse_bytes
from .streams import leaves_of

__all__ = ["LiveBytes", "Measurement", "UpdateCost", "format_bytes", "measure", "parse_bytes"]


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows as aligned text, the first one a heading; the first `left` columns are words, the others are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


@dataclass(frozen=True)
class Measurement:
    """One training step: bytes at the peak, `peak = weights + gradients + streams + saved + rest`, and its cost.

    `weights` are parameters and buffers; `gradients` what `.grad` holds; `streams` the current value of each stream of
    a reversible program; `saved` what autograd has saved for the backward; `rest` everything else: the temporaries of
    the moment, inputs that are no stream, gradients on their way. `updates` is the table of updates. `timeline` has
    the five figures after each operator and each new `.grad`; the backward begins at its index `backward_at`.
    """

    device: str
    peak: int
    weights: int
    gradients: int
    streams: int
    saved: int
    rest: int
    seconds: float
    replays: int
    updates: tuple[UpdateCost, ...] = field(repr=False)
    timeline: tuple[tuple[int, ...], ...] = field(repr=False)
    backward_at: int = field(repr=False)

    @property
    def activations(self) -> int:
        """What is neither weight nor gradient."""
        return self.peak - self.weights - self.gradients

    def as_dict(self) -> dict[str, Any]:
        """The figures and the table of updates, for JSON: all but the timeline."""
        shown = ("index", "target", "name", "sources", "calls", "replays", "saved", "peak")
        updates = [{name: getattr(update, name) for name in shown} for update in self.updates]
        figures = ("device", "peak", *Ledger.kinds, "seconds", "replays")
        return {name: getattr(self, name) for name in figures} | {"updates": updates}

    def __str__(self) -> str:
        split = [("at the peak", "bytes", "share")]
        for name in Ledger.kinds:
            size = getattr(self, name)
            split.append((_WORDS.get(name, name), format_bytes(size), f"{size / max(self.peak, 1):.0%}"))
        split.append(("total", format_bytes(self.peak), ""))
        cost = f"one step on {self.device}: {_format_seconds(self.seconds)}, {self.replays} replays"
        return "\n\n".join([cost, table(split), *([self._update_table()] if self.updates else [])])

    def _update_table(self, most: int = 16) -> str:
        width = len(str(max(update.index for update in self.updates)))
        shown = [
            (
                f"{u.index:>{width}}  {u.target} <- {_short(u.name)}({', '.join(u.sources)})"[:34],
                str(u.calls),
                str(u.replays),
                format_bytes(u.saved),
                format_bytes(u.peak),
            )
            for u in self.updates
        ]
        if len(shown) > most:
            left_out = (f"   ... {len(shown) - most + 1} more", "", "", "", "")
            shown = [*shown[: most // 2], left_out, *shown[len(shown) - most // 2 + 1 :]]
        return table([("update", "calls", "replays", "saves", "peak meanwhile"), *shown])

    def plot(self, path: str | Path) -> None:
        """Draw the timeline of live bytes, by what they are, into a file (PNG, PDF, SVG). Needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("plotting needs matplotlib: pip install 'retrograd[cli]'") from error
        top = max((sum(moment) for moment in self.timeline), default=0)
        unit, scale = next(((n, s) for n, s in _AXES if top >= s), ("B", 1))
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.add_subplot()
        layers = [[size / scale for size in layer] for layer in zip(*self.timeline, strict=True)]
        labels = [_WORDS.get(name, name) for name in Ledger.kinds]
        axes.stackplot(range(len(self.timeline)), *layers, labels=labels, colors=_COLOURS, step="post", linewidth=0)
        axes.axvline(self.backward_at, color="black", linewidth=0.8, linestyle=":")
        axes.annotate(" backward", (self.backward_at, 1), xycoords=("data", "axes fraction"), va="top", fontsize=9)
        axes.set_xlabel("operators of one step")
        axes.set_ylabel(f"{unit} alive")
        axes.set_title(f"peak {format_bytes(self.peak)}, {self.replays} replays", fontsize=11)
        axes.margins(x=0)
        axes.spines[["top", "right"]].set_visible(False)
        handles, names = axes.get_legend_handles_labels()
        axes.legend(
            handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1, 0.5)
        )  # in the order of the layers
        figure.savefig(path, dpi=144)


_WORDS = {"saved": "saved tensors"}
_AXES = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)]
_COLOURS = ["#4c566a", "#b48ead", "#5e81ac", "#d08770", "#c8ccd4"]


def _short(name: str, most: int = 20) -> str:
    return name if len(name) <= most else name[: most - 3] + "..."


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def measure(fn: Callable[..., Any], *inputs: Any, autocast: torch.dtype | None = None, **kwargs: Any) -> Measurement:
    """Measure one training step, `fn(*inputs, **kwargs)` and its backward: peak bytes, their split, time, replays.

    `fn` is a module, or a callable whose modules can be seen in its closure. It returns a loss (a single number), or
    tensors, and then their mean squares are the loss. `autocast` is a dtype for the forward. The step begins without
    gradients, runs three times (to warm up, for the time, for the split), and leaves `.grad` as it was; buffers move
    as in any step. What an operator allocates and frees by itself is seen on CUDA only.

    On CUDA `peak` and the time are those of a step that nobody observes, and the peak is the allocator's, less what
    was there before and is neither weight nor input. Weights, gradients, streams and saved tensors are counted by
    their storages at the peak of the observed step, in which compiled functions run eagerly; so the split is not
    exact there: rounding, workspaces and temporaries inside operators are in `rest`.

    >>> import retrograd as rg
    >>> net = rg.ReversibleSequence([(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)])
    >>> step = measure(net, torch.randn(2, 3, 8))
    >>> step.weights, step.replays
    (2304, 8)
    """
    weights, others = belongings(fn, inputs, kwargs)
    device = device_of([*weights, *others])
    context = torch.autocast(device.type, autocast) if autocast is not None else nullcontext()
    leaves = [tensor for tensor in (*weights, *others) if tensor.is_leaf and tensor.requires_grad]
    with exchanged(leaves, "grad", None):
        train_step(fn, inputs, kwargs, context, leaves)
        seconds, allocated = _plain_step(fn, inputs, kwargs, context, leaves, device)
        ledger = Ledger(device)
        ledger.hold(weights, "weights")
        ledger.hold(others)
        before = ledger.live
        ledger_step(ledger, fn, inputs, kwargs, context, leaves)
    split = list(ledger.at_peak)
    peak = ledger.peak if allocated is None else before + allocated
    split[-1] += peak - ledger.peak
    replays = sum(update.replays for update in ledger.updates.values())
    updates = tuple(sorted(ledger.updates.values(), key=lambda update: update.index))
    bytes_of = dict(zip(ledger.kinds, split, strict=True))
    return Measurement(
        str(device),
        peak,
        **bytes_of,
        seconds=seconds,
        replays=replays,
        updates=updates,
        timeline=tuple(ledger.timeline),
        backward_at=ledger.backward_at,
    )


def belongings(fn: Callable[..., Any], inputs: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What is there before a step: parameters and buffers of `fn`, and the other tensors it will read."""
    reached = reach(fn, kwargs)
    roots = [fn] if isinstance(fn, nn.Module) else reached.modules
    held = {id(t): t for module in roots for t in (*module.parameters(), *module.buffers())}
    given = [*leaves_of([inputs, kwargs], Tensor), *reached.tensors]
    return list(held.values()), list({id(t): t for t in given if id(t) not in held}.values())


def device_of(tensors: Sequence[Tensor]) -> torch.device:
    """The accelerator among the devices of these tensors, if there is one."""
    return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))


def loss_of(out: Any) -> Tensor:
    """The loss itself, or the sum of the mean squares of whatever needs a gradient."""
    leaves = [leaf for leaf in leaves_of([out], Tensor) if leaf.requires_grad]
    if not leaves:
        raise ValueError("nothing in what fn returned needs a gradient: there is no training step to measure")
    if len(leaves) == 1 and leaves[0].numel() == 1:
        return leaves[0].sum() if leaves[0].dim() else leaves[0]
    losses = [leaf.abs().square().mean() if leaf.is_complex() else leaf.square().mean() for leaf in leaves]
    return losses[0] if len(losses) == 1 else torch.stack([loss.double() for loss in losses]).sum()


def train_step(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    context: Any,
    leaves: Sequence[Tensor],
    between: Callable[[], None] = lambda: None,
) -> None:
    """Forward, backward, gradients dropped. `between` the two is called."""
    try:
        with torch.enable_grad():
            with context:
                out = fn(*inputs, **kwargs)
            loss = loss_of(out)
        del out
        between()
        loss.backward()
    finally:
        for leaf in leaves:
            leaf.grad = None


def ledger_step(
    ledger: Ledger,
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    context: Any,
    leaves: Sequence[Tensor],
) -> None:
    """A step that the ledger keeps book of."""

    def between() -> None:
        ledger.backward_at = len(ledger.timeline)

    hooks = [leaf.register_post_accumulate_grad_hook(ledger.note_gradient) for leaf in leaves]
    try:
        with observed(ledger), ledger:
            train_step(fn, inputs, kwargs, context, leaves, between)
    finally:
        for hook in hooks:
            hook.remove()


def _plain_step(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    context: Any,
    leaves: Sequence[Tensor],
    device: torch.device,
) -> tuple[float, int | None]:
    """The seconds of a step, and on CUDA the bytes that the allocator gave out in it."""
    before = None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    train_step(fn, inputs, kwargs, context, leaves)
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)
    seconds = time.perf_counter() - start
    return seconds, None if before is None else torch.cuda.max_memory_allocated(device) - before


@contextmanager
def exchanged(objects: Sequence[Any], attribute: str, value: Any) -> Iterator[None]:
    """Give each object another value of an attribute, and put its own back."""
    before = [getattr(each, attribute) for each in objects]
    try:
        for each in objects:
            setattr(each, attribute, value)
        yield
    finally:
        for each, own in zip(objects, before, strict=True):
            setattr(each, attribute, own)
