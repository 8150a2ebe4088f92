"""The retrieval example: its sequences ask for what they hold, and the whole script runs."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def retrieval(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import retrieval

    return retrieval


def test_every_question_has_one_answer(retrieval: Any) -> None:
    keys, pairs = 24, 16
    tokens, targets = retrieval.sequences(4, 128, keys, torch.Generator().manual_seed(0))
    for sequence, asked in zip(tokens.tolist(), targets.tolist(), strict=True):
        said = {key: value for key, value in pairwise(sequence[:96]) if key < keys}
        assert len(said) == pairs
        assert all(keys <= value < keys + retrieval.VALUES for value in said.values())
        questions = {key: target for key, target in zip(sequence, asked, strict=True) if target != -100}
        assert questions == said
        assert sequence[96::2] != sorted(said, key=sequence.index)  # in another order


def test_the_whole_script(retrieval: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = retrieval.Setting(1, 8, 1, 8, 1, keys=8, first=32, length=64, tokens=128, rate=1e-3, longest=128)
    monkeypatch.setitem(retrieval.SETTINGS, "cpu", setting)
    monkeypatch.setattr(retrieval, "GOOD", 0.0)
    monkeypatch.setattr(retrieval, "QUESTIONS", 8)
    monkeypatch.setattr(sys, "argv", ["retrieval.py", "--device", "cpu", "--steps", "20", "--results", str(tmp_path)])
    retrieval.main()
    (path,) = tmp_path.glob("*-retrieval-cpu.json")
    result = json.loads(path.read_text())["result"]
    assert [step for step, _ in result["history"]["series"]["values that are right"]] == [10, 20]
    assert [tried["length"] for tried in result["longest"]] == [64, 128]
    assert result["questions"] >= 32


def test_stops_where_memory_ends(retrieval: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is noted, and nothing longer is tried."""
    setting = retrieval.Setting(1, 8, 1, 8, 1, keys=8, first=32, length=32, tokens=64, rate=1e-3, longest=512)
    example = retrieval.Retrieval(setting, torch.device("cpu"), seed=0)
    cost = example.cost

    def limited(length: int) -> dict[str, Any]:
        if length > 64:
            raise torch.OutOfMemoryError("Tried to allocate 1 TiB\nand more")
        return cost(length)

    monkeypatch.setattr(example, "cost", limited)
    tried = example.longest(512)
    assert [each["length"] for each in tried] == [32, 64, 128]
    assert tried[-1]["failed"] == "OutOfMemoryError: Tried to allocate 1 TiB"
