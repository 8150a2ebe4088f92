"""The pages of docs/ and the README: their code runs, their links lead somewhere, their figures are those measured.

A page's blocks run in order in one namespace. Pages whose code needs a larger installation run elsewhere: those on the
four packages in tests/dropin/test_documents.py, those on other libraries in tests/ecosystem.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import runpy
import shlex
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import retrograd as rg
from retrograd import cli, models

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
ELSEWHERE = {
    *(f"docs/coming-from/{name}.md" for name in ("axial-attention", "nuwa-pytorch", "reformer-pytorch")),
    *(f"docs/coming-from/{name}.md" for name in ("se3-transformer-pytorch", "transformers-reformer")),
    *(str(page.relative_to(ROOT)) for page in (DOCS / "ecosystem").glob("*.md")),
}
WITHOUT_CODE = {"README.md", "docs/api.md", "docs/command-line.md"}  # may have none; every other page must have some
PEERS = {"docs/coming-from/revlib.md": "revlib", "docs/coming-from/memcnn.md": "memcnn"}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


RUN_HERE = [page for page in PAGES if named(page) not in ELSEWHERE]


def blocks(page: Path, language: str = "python") -> Iterator[str]:
    """The blocks of a page, each below as many empty lines as it has above it: errors name the page's line."""
    text = page.read_text()
    for found in re.finditer(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield "\n" * text.count("\n", 0, found.start(1)) + found[1]


@pytest.mark.parametrize("page", RUN_HERE, ids=named)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # MemCNN's
def test_code_of_a_page(page: Path) -> None:
    if named(page) in PEERS:
        with warnings.catch_warnings(action="ignore"):  # they use what torch has deprecated
            import_module(PEERS[named(page)])
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
        if page != ROOT / "README.md":
            assert other.resolve().is_relative_to(DOCS), f"{link} is not on the site"
        if anchor:
            assert anchor in {slug(heading) for heading in re.findall(r"^#+ (.*)$", other.read_text(), re.M)}, link


def slug(heading: str) -> str:
    """A heading as GitHub writes it in a link."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_page_is_in_the_navigation_once() -> None:
    named_there = re.findall(r"^ +- .*?: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named_there) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_public_name_is_on_the_api_page() -> None:
    shown = re.findall(r"^::: retrograd\.([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(name for name in shown if "." not in name) == sorted(rg.__all__)
    assert {f"models.{name}" for name in models.__all__} <= set(shown)


def test_commands_can_be_typed_so() -> None:
    typed = 0
    for line in "".join(block for page in PAGES for block in blocks(page, "bash")).splitlines():
        words = shlex.split(re.split(r" > | \|", line)[0], comments=True)
        if words[:1] == ["retrograd"]:
            cli.parser().parse_args(words[1:])
            typed += 1
    assert typed >= 10


def test_plots_are_those_of_the_result_files() -> None:
    results = {hashlib.sha256(path.read_bytes()).digest() for path in (ROOT / "benchmarks" / "results").glob("*.png")}
    plots = sorted((DOCS / "figures").glob("*.png"))
    assert plots
    for plot in plots:
        assert hashlib.sha256(plot.read_bytes()).digest() in results, f"{plot.name} is the plot of no result file"


def test_the_quickstart_runs() -> None:
    quickstart = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert quickstart["main"](depth=2, width=16, length=32, steps=10) < 9
    assert "no problems" in said.getvalue()
    assert "8 is guessing" in said.getvalue()


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
