"""The Trainer of transformers over a reversible network: bf16, accumulation, clipping, averaged weights, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pages import run_page
from witness import assert_reversed, linears

import retrograd as rg


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return run_page("ecosystem/trainer.md")


def test_reversed_is_kept_to_the_bit(page: dict[str, Any], tmp_path: Path) -> None:
    with linears() as seen:
        model, average = page["train"](rg.Reverse(), tmp_path)
    assert_reversed(seen)
    kept, kept_average = page["train"](rg.Keep(), tmp_path)
    assert page["same"](model, kept)
    assert page["same"](average, kept_average)
    assert not page["same"](average.module, model)


def test_resumed(page: dict[str, Any], tmp_path: Path) -> None:
    kept, _ = page["train"](rg.Keep(), tmp_path)
    with linears() as seen:
        resumed, _ = page["train"](rg.Reverse(), tmp_path, resume=str(tmp_path / "checkpoint-3"))
    assert_reversed(seen)
    assert seen.total() == 3 * 2 * 2 * 16  # 3 steps of 2 batches, forward and replay
    assert page["same"](resumed, kept)
