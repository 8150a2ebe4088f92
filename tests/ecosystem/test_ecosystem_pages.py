"""The pages of docs/ecosystem name the versions that are tested, and the figures that were measured."""

from __future__ import annotations

import json
import re
from importlib.metadata import version

from pages import ROOT

REQUIREMENTS = (ROOT / "tests" / "requirements-ecosystem.txt").read_text()
PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", REQUIREMENTS.partition("# what these need")[0], re.MULTILINE))
PAGES = [*(ROOT / "docs" / "ecosystem").glob("*.md"), ROOT / "docs" / "coming-from" / "transformers-reformer.md"]


def test_versions() -> None:
    named = {}
    for page in PAGES:
        for package, said in re.findall(rf"\b({'|'.join(PINS)}) (\d[\d.]*\d)", page.read_text()):
            assert said == PINS[package], page.name
            named[package] = said
    assert named == PINS
    assert all(version(package) == pin for package, pin in PINS.items())


def test_figures_of_the_residual_page() -> None:
    """Every row of its table is what the result file says."""
    text = (ROOT / "docs" / "ecosystem" / "residual.md").read_text()
    (name,) = set(re.findall(r"benchmarks/results/[\w-]+\.json", text))
    result = json.loads((ROOT / name).read_text())
    cells = [row.split("|")[1:-1] for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    rows = {first.strip(): [cell.strip() for cell in rest] for first, *rest in cells}
    assert {*result["after"]} <= {*rows}
    for kind in result["after"]:
        right_after, back, last = rows[kind]
        assert right_after == f"{result['loss_right_after'][kind]:.2f}"
        assert back == ("not within 1000" if (steps := result["steps_to_get_back"][kind]) is None else str(steps))
        assert last == f"{result['last_loss'][kind]:.2f}"
