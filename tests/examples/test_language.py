"""The language example: each held-out byte counts once, with enough before it; and the whole script, in seconds."""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from retrograd.models import LanguageModel

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def language(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    import language

    return language


@pytest.mark.parametrize(("size", "stride"), [(9, 8), (30, 8), (31, 3), (64, 1)])
def test_every_byte_counts_once(language: Any, size: int, stride: int) -> None:
    setting = replace(language.SETTINGS["small"], length=8, stride=stride, batch=3)
    model, data = LanguageModel(1, 16, length=8).double(), torch.randint(256, (size,), dtype=torch.uint8)
    found = language.bits_per_byte(model, data, setting, nullcontext())
    expected, start = 8.0, 0  # nothing predicts the first byte
    for place in range(1, size):  # window by window, each as late as it can be: the last one ends at the last byte
        if place > start + 8:
            start = min(start + stride, size - 9)
        with torch.no_grad():
            logits = model(data[None, start:place].long())[0, -1]
        expected -= logits.log_softmax(-1)[data[place].item()].item() / math.log(2)
    assert found == pytest.approx(expected / size, rel=1e-6)


def test_the_whole_script(
    language: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = Path(language.__file__).read_bytes()
    monkeypatch.setattr(language, "corpus", lambda: (text, text[:1000]))
    options = ["--steps", "4", "--depth", "1", "--width", "16", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["language.py", *options])
    language.main()
    (path,) = tmp_path.glob("*-language-small-cpu.json")
    result = json.loads(path.read_text())["result"]
    assert result["steps"] == 4
    assert 0 < result["xz_bits_per_byte"]["xz -9 after the training files"] < 1 < result["xz_bits_per_byte"]["xz -9"]
    assert 1 < result["bits_per_byte"] < 10
    assert result["activation_bytes"]["reverse"] < result["activation_bytes"]["keep"]
    assert f"{result['bits_per_byte']:.3f} bits per byte after 4 steps" in capsys.readouterr().out


def test_the_files_are_split_by_their_path(language: Any) -> None:
    text, unseen = language.corpus()
    assert 0.03 < len(unseen) / len(text) < 0.12
    source = Path(json.__file__).read_bytes()
    assert (source in text) != (source in unseen)
    assert Path(pytest.__file__).read_bytes() not in text + unseen


def test_figures_of_the_models_page() -> None:
    """Every figure that the page gives for this example and the digits is in a result file that it names."""
    text = (EXAMPLES.parent / "docs" / "models.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    for name in re.findall(r"`(examples/results/\S+-(?:language|digits)-\S+json)`", text):
        result = json.loads((EXAMPLES.parent / name).read_text())["result"]
        expected = [f"{result['parameters'] / 1e6:.1f} million"]
        expected += [f"{size / 2**20:.1f} MiB" for size in result["activation_bytes"].values()]
        if "bits_per_byte" in result:
            compared = result["xz_bits_per_byte"]
            figures = result["bits_per_byte"], compared["xz -9"], compared["xz -9 after the training files"]
            expected += [f"{bits:.3f}" for bits in figures]
        else:
            expected += [f"{result['held_out_accuracy']:.1%}".replace("%", " %"), str(result["held_out_images"])]
        assert any(all(figure in row for figure in expected) for row in rows), (name, expected)
