"""The pages of docs/ and the README: their code runs, their links lead somewhere, their figures are those measured.

A page's blocks run in order in one namespace. The pages of docs/coming-from need other packages: see
tests/dropin/test_documents.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_HERE = [page for page in PAGES if page.parent.name != "coming-from"]
WITHOUT_CODE = {"README.md"}  # may have none; every other page must have some


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[str]:
    """The Python blocks of a page, each below as many empty lines as it has above it: errors name the page's line."""
    text = page.read_text()
    for found in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield "\n" * text.count("\n", 0, found.start(1)) + found[1]


@pytest.mark.parametrize("page", RUN_HERE, ids=named)
def test_code_of_a_page(page: Path) -> None:
    namespace = {"__name__": f"page {page.stem}"}
    found = list(blocks(page))
    assert found or named(page) in WITHOUT_CODE
    with contextlib.redirect_stdout(io.StringIO()):
        for block in found:
            exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_of_a_page(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        other = (page.parent / path) if path else page
        assert other.exists(), link
        if anchor:
            assert anchor in {slug(heading) for heading in re.findall(r"^#+ (.*)$", other.read_text(), re.M)}, link


def slug(heading: str) -> str:
    """A heading as GitHub writes it in a link."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_figures_of_the_policies_page() -> None:
    """Every row of a table of times is a row of the result file that is named above it."""
    text = (ROOT / "docs" / "policies.md").read_text()
    tables = re.split(r"`(benchmarks/results/\S+\.json)`", text)
    checked = 0
    for name, following in zip(tables[1::2], tables[2::2], strict=True):
        runs = json.loads((ROOT / name).read_text())["runs"]
        measured = {
            (f"{run['step_ms']:.0f} ms", f"{run['time_ratio']:.2f}x", f"{run['memory_bytes'] / 2**20:.0f} MiB")
            for run in runs
            if run["status"] == "ok"
        }
        for row in re.findall(r"\| (\d+ ms) \| (\S+) \| (\d+ MiB) \|", following):
            assert row in measured, name
            checked += 1
    assert checked >= 10
