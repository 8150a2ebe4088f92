"""The digits example: its augmentation, its split, and the whole script on a few images."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn")


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import digits

    return digits


def test_images_move_by_one_pixel(digits: Any) -> None:
    image = torch.zeros(8, 8)
    image[3, 4], image[5, 2] = 1.0, 2.0
    expected = {image.roll((down, right), (0, 1)).numpy().tobytes() for down in (-1, 0, 1) for right in (-1, 0, 1)}
    assert {moved.numpy().tobytes() for moved in digits.moved(image.expand(200, 8, 8))} == expected


def test_a_neighbourhood_is_around_its_place(digits: Any) -> None:
    image = torch.arange(64.0).view(1, 8, 8)
    around = digits.neighbourhoods(image)
    assert around[0, 3, 4].tolist() == [19, 20, 21, 27, 28, 29, 35, 36, 37]
    assert around[0, 0, 7].tolist() == [0, 0, 0, 6, 7, 0, 14, 15, 0]  # background outside


def test_the_whole_script(digits: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (images, labels), (unseen, wanted) = digits.digits(torch.device("cpu"))
    assert (len(images), len(unseen)) == (1438, 359)
    few = (images[:40], labels[:40]), (unseen[:20], wanted[:20])
    monkeypatch.setattr(digits, "digits", lambda device, split: few)
    options = ["--depth", "2", "--width", "16", "--epochs", "2", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["digits.py", *options])
    digits.main()
    (path,) = tmp_path.glob("*-digits-cpu.json")
    result = json.loads(path.read_text())["result"]
    assert result["steps"] == 4
    assert [epoch for epoch, _ in result["history"]["series"]["held out"]] == [1, 2]
    assert result["held_out_accuracy"] == result["history"]["series"]["held out"][-1][1]
    assert result["activation_bytes"]["reverse"] < result["activation_bytes"]["keep"]
