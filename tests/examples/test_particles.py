"""The particles example: its forces are those of the laws it names, and the whole script runs, in seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def particles(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    import particles

    return particles


def test_forces(particles: Any) -> None:
    """Those of one particle, pair by pair; and a rotated system is one of the same laws."""
    systems = particles.generated(3, 4, seed=0)
    for each in (systems, systems.rotated(torch.Generator().manual_seed(0))):
        charges, places, velocities = each.charges[0, :, 0], each.coordinates[0], each.velocities[0]
        force = torch.zeros(3)
        for other in range(1, 4):
            away = places[0] - places[other]
            field = charges[other] * away / (away @ away + particles.SOFTENING**2) ** 1.5
            magnetic = torch.linalg.cross(velocities[other], field)
            force += charges[0] * (field + torch.linalg.cross(velocities[0], magnetic))
        torch.testing.assert_close(each.forces[0, 0], force, rtol=1e-4, atol=1e-5)


def test_the_whole_script(particles: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = {"steps": 2, "batch": 2, "particles": 3, "training-systems": 8, "results": tmp_path}
    options = [text for name, value in small.items() for text in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["particles.py", *options])
    particles.main()
    (path,) = tmp_path.glob("*-particles-cpu.json")
    runs = json.loads(path.read_text())["result"]["runs"]
    sizes = [run["parameters"] for run in runs.values()]
    assert max(sizes) < 1.05 * min(sizes)
    assert [run["steps"] for run in runs.values()] == [2, 2, 2, 16]
    assert all(0.5 < run["relative error"] < 2 for run in runs.values())
