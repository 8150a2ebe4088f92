"""What the examples share: a progress bar, and a dated result file with its plot.

A result says what was run, where and on which commit, so that a figure in the documentation can be traced to it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


class Progress:
    """Counts steps: a bar in a terminal, a line every tenth in a pipe. `note` shows a word or a number beside it.

    for step in (progress := Progress(100, "training")):
        progress.note(f"loss {loss:.2f}")
    """

    def __init__(self, steps: int, what: str) -> None:
        self.steps, self.what, self.noted = steps, what, ""

    def note(self, text: str) -> None:
        self.noted = text

    def __iter__(self) -> Iterator[int]:
        try:
            from rich.progress import Progress as Bar
        except ImportError:
            bar = None
        else:
            bar = Bar(transient=True) if sys.stderr.isatty() else None
        if bar is None:
            yield from self.lines()
            return
        with bar:
            task = bar.add_task(self.what, total=self.steps)
            for step in range(self.steps):
                yield step
                bar.update(task, advance=1, description=f"{self.what} {self.noted}")

    def lines(self) -> Iterator[int]:
        start = time.monotonic()
        for step in range(self.steps):
            yield step
            if (step + 1) * 10 // self.steps > step * 10 // self.steps:
                print(
                    f"{self.what}: {step + 1}/{self.steps}, {time.monotonic() - start:.0f} s {self.noted}", flush=True
                )


def device_name(device: torch.device | str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else platform.processor() or "CPU"


def commit() -> str | None:
    """The commit that runs, with + where the tree has changes; RETROGRAD_COMMIT where there is no git."""
    if given := os.environ.get("RETROGRAD_COMMIT"):
        return given
    here = Path(__file__).parent
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=here, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.decode().strip()


def record(name: str, device: torch.device | str, settings: dict[str, Any], result: dict[str, Any], into: Path) -> Path:
    """Write `<date>-<name>-<device>.json` and return its path. `result["history"]`, if any, is what `plot` draws:
    {"x": "step", "y": "bits per byte", "series": {"train": [[1, 8.0], [2, 7.1]]}, "levels": {"xz -9": 1.6}}."""
    kind = torch.device(device).type
    into.mkdir(parents=True, exist_ok=True)
    path = into / f"{datetime.date.today()}-{name}-{kind}.json"
    where = {"date": str(datetime.date.today()), "commit": commit(), "torch": torch.__version__}
    content = {"example": name, **where, "device": device_name(device), "settings": settings, "result": result}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """Where results go; or only a plot of one: see `drawn`."""
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--plot", type=Path, metavar="FILE.json", help="only draw a result that is there already")


def drawn(path: Path | None) -> bool:
    """Whether nothing but a plot was asked for; then it is drawn here."""
    if path is not None:
        print(plot(path) or "drawing needs matplotlib: pip install 'retrograd[cli]'")
    return path is not None


def plot(path: Path) -> Path | None:
    """Draw the history in a result file into a PNG beside it; None where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    content = json.loads(path.read_text())
    history = content["result"]["history"]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for label, points in history["series"].items():
        axes.plot(*zip(*points, strict=True), label=label)
    for label, level in history.get("levels", {}).items():
        axes.axhline(level, linestyle="--", color="0.5")
        axes.annotate(f" {label}", (1.0, level), xycoords=("axes fraction", "data"), va="center", color="0.4")
    axes.set_xlabel(history["x"])
    axes.set_ylabel(history["y"])
    axes.set_title(f"{content['example']} ({content['device']}, {content['date']})", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path.with_suffix(".png"), dpi=150)
    return path.with_suffix(".png")
