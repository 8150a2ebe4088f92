"""Accelerate over a reversible network: bf16, accumulation, clipping, averaged weights, resuming."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from pages import run_page
from witness import assert_reversed, linears

import retrograd as rg


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return run_page("ecosystem/accelerate.md")


@pytest.fixture(autouse=True)
def _no_state_left() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_reversed_is_kept_to_the_bit(page: dict[str, Any]) -> None:
    with linears() as seen:
        model, average = page["train"](rg.Reverse())
    assert_reversed(seen)
    kept, kept_average = page["train"](rg.Keep())
    assert page["same"](model, kept)
    assert page["same"](average, kept_average)
    assert not page["same"](average.module, model)


def test_resumed(page: dict[str, Any], tmp_path: Path) -> None:
    page["train"](epochs=1, save=tmp_path)
    resumed = page["train"](epochs=1, resume=tmp_path)
    whole = page["train"](rg.Keep(), epochs=2)
    assert all(map(page["same"], resumed, whole))
    assert not page["same"](resumed[0], page["train"](epochs=1)[0])
