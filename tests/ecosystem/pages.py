"""The pages of docs/ as code: a page's Python blocks, run in order in one namespace."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_page(name: str, until: str | None = None) -> dict[str, Any]:
    """What a page defines, or a page until a heading; the line numbers in errors are the page's."""
    page = ROOT / "docs" / name
    text = page.read_text()
    text = text[: text.index(f"\n## {until}\n")] if until else text
    namespace = {"__name__": f"page {page.stem}"}
    blocks = [*re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
    assert blocks, f"{name} has no code"
    with contextlib.redirect_stdout(io.StringIO()):
        for block in blocks:
            code = "\n" * text.count("\n", 0, block.start(1)) + block[1]
            exec(compile(code, str(page), "exec"), namespace)
    return namespace
