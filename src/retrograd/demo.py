"""The command `retrograd demo`: one language model trained three ways on the source code of Python's standard library.

Kept (plain autograd), checkpointed and reversed begin with the same weights and see the same bytes, so their losses and
gradients must agree; what differs is memory and time. Then memory is measured at several depths, and the reversed model
goes on to learn. Everything found so far is in a `Findings`, also after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import retrograd as rg

from .bench import out_of_memory
from .ledger import LiveBytes
from .measure import exchanged
from .models import LanguageModel
from .plan import checkpointed
from .screen import Screen, first_line, format_seconds
from .sizes import format_bytes

WAYS = ("kept", "checkpointed", "reversed")
TOLERANCE = 1e-3  # of gradients, relative: float32 leaves room for a thousand blocks
MOST_DATA = 1 << 26


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the demo runs. Sizes that cannot be are refused here, in one sentence."""

    depth: int = 32
    width: int = 64
    length: int = 128
    batch: int = 4
    steps: int = 5
    seconds: float = 90.0
    data: Path | None = None
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    plot: Path = Path("memory-against-depth.png")

    def __post_init__(self) -> None:
        for name in ("depth", "width", "length", "batch", "steps"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name} must be 1 or more, not {value}")
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"--seconds must be 0 or more, not {self.seconds:g}")
        try:
            torch.zeros(1, device=self.device).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ValueError(f"--device {self.device} cannot be used here: {first_line(error)}") from error
        if self.plot.suffix not in (".png", ".pdf", ".svg"):
            raise ValueError(f"--plot {self.plot}: the name must end in .png, .pdf or .svg")
        if not self.plot.parent.is_dir():
            raise ValueError(f"--plot {self.plot}: there is no directory {self.plot.parent}")

    def depths(self) -> list[int]:
        """An eighth, a quarter, half and all of the blocks."""
        return sorted({max(self.depth // part, 1) for part in (8, 4, 2, 1)})

    def model(self, depth: int) -> LanguageModel:
        try:
            return LanguageModel(depth, self.width, length=max(self.length, SAMPLE)).to(self.device)
        except (ValueError, RuntimeError, MemoryError) as error:
            raise ValueError(f"{depth} blocks of --width {self.width}: {first_line(error)}") from error


@dataclasses.dataclass
class Row:
    """One way to train: the peak of its activations in bytes, its time, its loss in bits per byte, and how far its
    gradients are from the kept ones. Without `bytes` it did not fit into memory."""

    way: str
    bytes: int | None = None
    seconds: float | None = None
    loss: float | None = None
    gradient_difference: float | None = None


@dataclasses.dataclass
class Findings:
    """What the demo has found so far."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    depths: dict[int, dict[str, int]] = dataclasses.field(default_factory=dict)
    plot: str | None = None
    losses: list[float] = dataclasses.field(default_factory=list)
    sample: str | None = None
    stopped: bool = False

    def __getitem__(self, way: str) -> Row:
        return next(row for row in self.rows if row.way == way)

    @property
    def agree(self) -> bool | None:
        """Whether all gradients are those of kept activations; None where these did not fit."""
        found = [row.gradient_difference for row in self.rows if row.gradient_difference is not None]
        return all(difference <= TOLERANCE for difference in found) if found else None

    @property
    def status(self) -> int:
        """What the shell is told: 130 after Ctrl-C, 1 if gradients differ or not even the reversed model fits."""
        return 130 if self.stopped else 0 if self.agree is not False and self["reversed"].bytes is not None else 1

    def as_dict(self) -> dict[str, Any]:
        return {"agree": self.agree, **dataclasses.asdict(self)}


def demo(settings: Settings, screen: Screen) -> Findings:
    """Run all of it. A ValueError says what cannot be run; Ctrl-C ends it, with what was found until then."""
    data, source = corpus(settings)
    torch.manual_seed(0)
    model = settings.model(settings.depth)
    weights = sum(parameter.numel() for parameter in model.parameters())
    screen.say(
        f"A language model of {settings.depth} blocks ({weights:,} weights) reads {source}, "
        f"{len(data) / 1e6:.1f} MB, byte by byte, on {named(settings.device)}. It is trained three ways, each for "
        f"{settings.steps} steps of {settings.batch} x {settings.length} bytes from the same weights:"
    )
    found = Findings()
    try:
        compare(model, batches(data, settings), settings, found, screen)
        screen.say(verdict(found))
        if found["reversed"].bytes is None:
            return found
        measure_depths(settings, data, found, screen)
        screen.lines(depth_lines(found))
        try:
            found.plot = plot(found, settings.plot)
            screen.say(f"Plot: {found.plot}")
        except (ImportError, OSError) as error:
            screen.say(f"No plot: {first_line(error)}")
        if settings.seconds:
            train(model, batches(data, settings, seed=1), settings, found, screen)
            screen.say(learned(found))
            found.sample = sample(model, settings.device)
            screen.say("A sample of what it writes now:", below=found.sample.splitlines())
    except KeyboardInterrupt:
        found.stopped = True
        if 0 < len(found.rows) < len(WAYS):
            screen.table(results(found))
        screen.say(f"Stopped. {learned(found)}".rstrip())
    return found


# The data


def corpus(settings: Settings) -> tuple[Tensor, str]:
    """The bytes to learn, and what they are."""
    if settings.data is None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text, source = b"".join(path.read_bytes() for path in files), "the source code of Python's standard library"
    else:
        try:
            with settings.data.open("rb") as file:
                text, source = file.read(MOST_DATA), settings.data.name
        except OSError as error:
            raise ValueError(f"--data {settings.data}: {error.strerror or first_line(error)}") from error
    if len(text) <= settings.length:
        where = "the standard library here" if settings.data is None else f"--data {settings.data}"
        size = f"{len(text)} bytes" if text else "no bytes"
        raise ValueError(f"{where} has {size}; a sequence of --length {settings.length} needs {settings.length + 1}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8), source


def batches(data: Tensor, settings: Settings, seed: int = 0) -> Iterator[Tensor]:
    """Pieces of the data at random places: (batch, length + 1)."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(settings.length + 1)
    while True:
        starts = torch.randint(len(data) - settings.length, (settings.batch, 1), generator=generator)
        yield data[starts + places].long().to(settings.device)


# The comparison


def compare(
    model: LanguageModel, stream: Iterator[Tensor], settings: Settings, found: Findings, screen: Screen
) -> None:
    """A few steps each way. The model ends as the reversed one left it."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    pieces = list(itertools.islice(stream, settings.steps + 1))
    reference: list[Tensor] | None = None
    for way in WAYS:
        model.load_state_dict(start)
        row = Row(way)
        try:
            with trained(model, way), screen.bar(way, settings.steps + 1) as advance:
                row.bytes = peak(model, pieces[0])
                gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
                advance()
                if reference is None and way == "kept":
                    reference = gradients
                elif reference is not None:
                    row.gradient_difference = difference(gradients, reference)
                optimizer, seconds = optimizer_of(model), []
                for tokens in pieces[1:]:
                    began = time.perf_counter()
                    row.loss = step(model, optimizer, tokens)
                    seconds.append(time.perf_counter() - began)
                    advance(f"{row.loss:.2f} bits/byte")
                row.seconds = min(seconds)  # the least disturbed one
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            row = Row(way)  # another way may fit
        found.rows.append(row)
    screen.table(results(found))


@contextlib.contextmanager
def trained(model: LanguageModel, way: str) -> Iterator[None]:
    """The model with its activations kept, checkpointed (each block) or reversed."""
    if way == "checkpointed":
        with checkpointed([model.blocks]):
            yield
    else:
        with exchanged([model.blocks], "policy", rg.Keep() if way == "kept" else rg.Reverse()):
            yield


def peak(model: LanguageModel, tokens: Tensor) -> int:
    """The most bytes that a step holds besides weights and gradients; the gradients are left in the model."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # there before, so that they are not counted
    if tokens.device.type != "cuda":
        with LiveBytes() as memory:
            model.loss(tokens).backward()
        return memory.peak
    model.loss(tokens).backward()  # libraries take memory at their first use, and keep it
    model.zero_grad(set_to_none=False)
    before = torch.cuda.memory_allocated(tokens.device)
    torch.cuda.reset_peak_memory_stats(tokens.device)
    model.loss(tokens).backward()
    return torch.cuda.max_memory_allocated(tokens.device) - before


def optimizer_of(model: LanguageModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95))


RATE = 3e-3


def step(model: LanguageModel, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """One step of training; the loss in bits per byte."""
    loss = model.loss(tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item() / math.log(2)  # waits for the device, so that a step is timed to its end


def difference(gradients: list[Tensor], reference: list[Tensor]) -> float:
    """The largest relative difference of any parameter's gradient."""
    errors = [(a - b).norm() / b.norm().clamp_min(1e-30) for a, b in zip(gradients, reference, strict=True)]
    return torch.stack(errors).max().item()  # NaN if there is one


def measure_depths(settings: Settings, data: Tensor, found: Findings, screen: Screen) -> None:
    """The peak of each way at several depths."""
    tokens = next(batches(data, settings))
    depths = settings.depths()
    with screen.bar("depths", len(depths)) as advance:
        measured: dict[int, dict[str, int]] = {}
        for depth in depths[:-1]:
            model = settings.model(depth)
            measured[depth] = {}
            for way in WAYS:
                try:
                    with trained(model, way):
                        measured[depth][way] = peak(model, tokens)
                except (RuntimeError, MemoryError) as error:
                    if not out_of_memory(error):
                        raise
            advance(f"{depth} blocks")
        measured[depths[-1]] = {row.way: row.bytes for row in found.rows if row.bytes is not None}
    found.depths = measured


# Training on


def train(model: LanguageModel, stream: Iterator[Tensor], settings: Settings, found: Findings, screen: Screen) -> None:
    """The reversed model learns for some seconds; its rate of learning falls to nothing meanwhile."""
    optimizer, began = optimizer_of(model), time.monotonic()
    with trained(model, "reversed"), screen.bar("training", 1000) as advance:
        while (part := (time.monotonic() - began) / settings.seconds) < 1:
            for group in optimizer.param_groups:
                group["lr"] = RATE * min((len(found.losses) + 1) / 20, 1 - part)
            found.losses.append(step(model, optimizer, next(stream)))
            advance(f"{smooth(found.losses[-20:]):.2f} bits/byte", to=part)


def smooth(losses: list[float]) -> float:
    return sum(losses) / len(losses)


SAMPLE = 400  # bytes


def sample(model: LanguageModel, device: torch.device) -> str:
    """What the model writes after the beginning of a function."""
    prompt = b"\n    def __init__(self, "
    tokens = torch.tensor([list(prompt)], device=device)
    torch.manual_seed(0)
    written = model.generate(tokens, SAMPLE - len(prompt), temperature=0.8, top_k=40)[0].tolist()
    text = bytes(written).decode("utf-8", "replace").strip("\n")
    return "".join(sign if sign.isprintable() or sign == "\n" else "\N{REPLACEMENT CHARACTER}" for sign in text)


# What is said


def results(found: Findings) -> list[tuple[str, ...]]:
    """The rows of the table, the first one its heading."""
    rows: list[tuple[str, ...]] = [("", "activations", "a step", "bits/byte", "gradients off")]
    for row in found.rows:
        if row.bytes is None or row.seconds is None or row.loss is None:
            rows.append((row.way, "do not fit", "", "", ""))
            continue
        off = row.gradient_difference
        shown = "" if off is None else f"{off:.0e}" if off else "0"
        rows.append((row.way, format_bytes(row.bytes), format_seconds(row.seconds), f"{row.loss:.3f}", shown))
    return rows


def verdict(found: Findings) -> str:
    """The table in words."""
    kept, reverse = found["kept"], found["reversed"]
    if reverse.bytes is None or reverse.seconds is None:
        return "Not even the reversed model fits: fewer --batch x --length bytes would."
    if kept.bytes is None or kept.seconds is None:
        return "Kept activations do not fit into memory here; reversed they do."
    worst = max(row.gradient_difference or 0.0 for row in found.rows)
    if found.agree is False:
        return f"The gradients DIFFER, by up to {worst:.0e} of their norm: that is a bug, please report it."
    return (
        f"The gradients agree: they differ by {worst:.0e} of their norm at most. Reversing took "
        f"{kept.bytes / reverse.bytes:.1f} times less memory for activations than keeping them, and "
        f"{reverse.seconds / kept.seconds:.2f} times the time."
    )


def depth_lines(found: Findings) -> list[str]:
    """The memory at the least and at the greatest depth."""
    first, last = min(found.depths), max(found.depths)
    lines = [f"Activations, from {first} to {last} blocks:"]
    for way in WAYS:
        sizes = [found.depths[depth].get(way) for depth in (first, last)]
        shown = ["too many" if size is None else format_bytes(size) for size in sizes]
        lines.append(f"  {way:<12}  {shown[0]:>8}  to {shown[1]:>8}")
    return lines


def learned(found: Findings) -> str:
    if not found.losses:
        return ""
    first, last = found.losses[0], smooth(found.losses[-20:])
    steps = f"{len(found.losses)} steps" if len(found.losses) > 1 else "one step"
    return f"The reversed model trained on for {steps}: from {first:.2f} to {last:.2f} bits per byte (8 is guessing)."


def plot(found: Findings, path: Path) -> str:
    """Draw memory against depth into a file, and return its name."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("it needs matplotlib; pip install 'retrograd[cli]'") from error
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for way, colour in zip(WAYS, ("#d08770", "#b48ead", "#2e7d4f"), strict=True):
        points = [(depth, sizes[way] / 2**20) for depth, sizes in found.depths.items() if way in sizes]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=colour)
            axes.annotate(way, points[-1], xytext=(8, 0), textcoords="offset points", va="center", color=colour)
    axes.set_xlabel("blocks")
    axes.set_ylabel("activations, MiB")
    axes.set_xticks(list(found.depths))
    axes.set_ylim(bottom=0)
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=144)
    return str(path)


def named(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    return "one CPU thread" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} CPU threads"
