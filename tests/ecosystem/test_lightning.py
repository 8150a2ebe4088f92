"""Lightning over a reversible network: bf16, accumulation, clipping, averaged weights, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pages import run_page
from witness import assert_reversed, linears

import retrograd as rg

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler"),
]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return run_page("ecosystem/lightning.md")


def test_reversed_is_kept_to_the_bit(page: dict[str, Any]) -> None:
    with linears() as seen:
        averaged = page["train"]()
    assert_reversed(seen)
    assert page["same"](averaged, page["train"](rg.Keep()))
    assert not page["same"](averaged, page["train"](average=False))


@pytest.mark.parametrize("average", [True, False])
def test_resumed(page: dict[str, Any], tmp_path: Path, average: bool) -> None:
    half = page["train"](epochs=1, average=average, save=tmp_path / "half")
    resumed, kept = (page["train"](p, average=average, resume=tmp_path / "half") for p in (rg.Reverse(), rg.Keep()))
    assert page["same"](resumed, kept)
    assert not page["same"](resumed, half)
