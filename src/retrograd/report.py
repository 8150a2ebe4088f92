"""What `check` found: gradients, drift and problems, and how they are shown to a person."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "gradient",  # off by more than the tolerance
    "not deterministic",  # a second run of fn on the same inputs gave something else
    "changes its inputs",  # fn works in place on a source, a keyword or a weight
    "holds memory",  # fn holds tensors that are not saved tensors of autograd
    "discrete choice",  # fn chose otherwise on the reconstructed inputs
    "buffer",  # changed by a replay, or not as with kept activations
    "join",  # its invert does not undo its apply
    "error",  # raised by the engine in the checked step
]

WIDTH = 98
SHOWN = 10


@dataclass(frozen=True)
class GradientError:
    """How far the gradient of one parameter or input is from that with kept activations, relative to the latter."""

    name: str
    error: float
    norm: float


@dataclass(frozen=True)
class Drift:
    """How far the target of one update was from what it had been, relative to it, when `undone` updates were undone
    since the last stored streams (this one included)."""

    update: str
    error: float
    undone: int


@dataclass(frozen=True)
class Problem:
    """Something to be mended: which kind, at which update, parameter or buffer, what was seen, and what to do."""

    kind: Kind
    where: str
    seen: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.seen}. {self.remedy}"


@dataclass(frozen=True)
class Report:
    """What `check` found. Printed, it is a table; `ok` and `raise_for_problems` are for tests.

    >>> Report([GradientError("weight", 2e-9, 1.0)], [], [], tolerance=1e-3).ok
    True
    """

    gradients: list[GradientError]  # worst first
    drift: list[Drift]  # in the order of the program
    problems: list[Problem] = field(default_factory=list)
    tolerance: float = 1e-3

    @property
    def ok(self) -> bool:
        """Whether there is nothing to be mended."""
        return not self.problems

    def raise_for_problems(self) -> None:
        """A RuntimeError with every problem, if there is one."""
        if self.problems:
            raise RuntimeError("\n".join([f"check found {self._count()}:", *(f"- {each}" for each in self.problems)]))

    def growth(self) -> list[Drift]:
        """The worst drift after 1, 2, 4, 8, ... updates undone, and after the most: how the error grows with depth."""
        by_depth: dict[int, Drift] = {}
        for row in self.drift:
            if row.undone not in by_depth or row.error > by_depth[row.undone].error:
                by_depth[row.undone] = row
        deepest = max(by_depth, default=0)
        return [row for undone, row in sorted(by_depth.items()) if undone == deepest or undone & (undone - 1) == 0]

    def __str__(self) -> str:
        lines = [f"check: {self._count()} (gradients may be {self.tolerance:g} off)", ""]
        lines += _table(
            "gradients against kept activations",
            ("error", "norm", "of"),
            [(f"{row.error:.1e}", f"{row.norm:.1e}", row.name) for row in self.gradients],
        )
        worst = sorted(self.drift, key=lambda row: -row.error)
        lines += _table(
            "drift of the reconstruction",
            ("error", "undone", "update"),
            [(f"{row.error:.1e}", str(row.undone), row.update) for row in worst],
        )
        growth = self.growth()
        if any(row.error for row in growth):
            steps = ", ".join(f"{row.error:.0e} after {row.undone}" for row in growth)
            lines += [*_wrapped(f"with updates undone: {steps}"), ""]
        elif growth:
            lines += [f"with depth: exact to the bit after {growth[-1].undone} updates undone", ""]
        for number, problem in enumerate(self.problems, 1):
            lines += _wrapped(f"{number}. {problem.kind}: {problem.where}")
            lines += _wrapped(f"seen: {problem.seen}", "   ")
            lines += _wrapped(f"remedy: {problem.remedy}", "   ")
        return "\n".join(lines).rstrip()

    def _count(self) -> str:
        number = len(self.problems)
        return {0: "no problems", 1: "1 problem"}.get(number, f"{number} problems")


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Aligned columns, the last one as long as it may be; the first rows of many."""
    if not rows:
        return [f"{title}: none", ""]
    shown = [head, *rows[:SHOWN]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(head) - 1)]
    left = WIDTH - sum(widths) - 2 * len(head)
    lines = [f"{title}, the worst {SHOWN} of {len(rows)}" if len(rows) > SHOWN else title]
    for row in shown:
        last = row[-1] if len(row[-1]) <= left else "..." + row[-1][3 - left :]
        lines.append("  " + "  ".join([*(cell.rjust(n) for cell, n in zip(row[:-1], widths, strict=True)), last]))
    return [*lines, ""]


def _wrapped(text: str, indent: str = "") -> Iterable[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "   ")
