"""The pages of docs/coming-from: their code runs, and what they say of drift is so."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import published  # noqa: F401 - imports the packages as the tests need them, before a page does
import pytest
import torch
from cases import CASES, data, error, gradients, loss_of, networks

PAGES = Path(__file__).parents[2] / "docs" / "coming-from"
NAMES = ["axial-attention", "nuwa-pytorch", "reformer-pytorch", "se3-transformer-pytorch"]


@pytest.mark.parametrize("name", NAMES)
def test_code_of_a_page(name: str) -> None:
    page = PAGES / f"{name}.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": f"page {name}"})


def test_bfloat16_streams_drift_in_both() -> None:
    case, found = CASES[0], {}
    for variant in ("plain", "published", "ours"):
        sequence = case.build(variant, networks(), depth=128).bfloat16()
        loss_of(case.run(sequence, data(dtype=torch.bfloat16)).float()).backward()
        found[variant] = {name: grad.float() for name, grad in gradients(sequence).items()}
    assert error(found["published"], found["plain"]) > 0.05
    assert error(found["ours"], found["plain"]) > 0.05
