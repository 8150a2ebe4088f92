"""What the commands say to a person, in whatever terminal: paragraphs and tables as wide as it is, bars while something
runs. In a pipe there are plain lines and no bars; so too without rich.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence

from .measure import table


class Screen:
    """Standard output, as a person reads it; nothing at all if `silent`.

    >>> Screen().say("Words.", below=["some code"])
    Words.
        some code
    <BLANKLINE>
    """

    def __init__(self, *, silent: bool = False) -> None:
        self.silent, self.console = silent, None
        self.width = min(shutil.get_terminal_size().columns, 80)
        if sys.stdout.isatty() and not silent:
            with contextlib.suppress(ImportError):
                from rich.console import Console

                self.console = Console(width=self.width)

    def say(self, words: str, below: Sequence[str] = ()) -> None:
        """A paragraph; below it lines that are indented, and cut rather than wrapped."""
        indented = (f"    {line}"[: self.width].rstrip() for line in below)
        self.lines([*textwrap.wrap(words, self.width), *indented])

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Rows, the first one a heading; as a list where the terminal is too narrow for them."""
        self.lines(fitted(rows, self.width))

    def lines(self, lines: Sequence[str]) -> None:
        """Lines as they are, and an empty one after them."""
        encoding = sys.stdout.encoding or "utf-8"
        if not self.silent:
            print("\n".join(lines).encode(encoding, "replace").decode(encoding) + "\n", flush=True)

    @contextlib.contextmanager
    def bar(self, what: str, steps: int) -> Iterator[Callable[..., None]]:
        """A bar while something runs. Its function goes one step on, or `to` a part of the whole, and shows a note."""
        if self.console is None:
            yield lambda note="", to=None: None
            return
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn(f"{what:<12}"), BarColumn(bar_width=None), TextColumn("{task.fields[note]:>14}"))
        with Progress(*columns, console=self.console, transient=True, expand=True) as progress:
            task = progress.add_task(what, total=steps, note="")

            def advance(note: str = "", to: float | None = None) -> None:
                done = progress.tasks[0].completed + 1 if to is None else to * steps
                progress.update(task, completed=done, note=note)

            yield advance


def fitted(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """A table, or if it is wider than that, a list of its rows.

    >>> fitted([("", "memory", "time"), ("kept", "9 MiB", "1 s")], width=16)
    ['kept', '  memory  9 MiB', '  time      1 s']
    """
    lines = table(rows).splitlines()
    if max(map(len, lines)) <= width:
        return lines
    heads = rows[0][1:]
    left, right = max(map(len, heads)), max(len(cell) for row in rows[1:] for cell in row[1:])
    lines = []
    for name, *cells in rows[1:]:
        lines.append(name)
        lines += [f"  {head:<{left}}  {cell:>{right}}" for head, cell in zip(heads, cells, strict=True) if cell]
    return lines


def format_seconds(seconds: float) -> str:
    """A time for people.

    >>> format_seconds(0.0214)
    '21 ms'
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
