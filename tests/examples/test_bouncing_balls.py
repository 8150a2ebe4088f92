"""The bouncing balls: a sound begins where a ball touches a wall, and nowhere else; and the whole script runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def balls(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import bouncing_balls

    return bouncing_balls


def test_what_is_seen_is_heard(balls: Any) -> None:
    video, audio, words = balls.clips(20, torch.Generator().manual_seed(0))
    assert set(words.flatten().tolist()) == {0, 1}
    assert (video.sum((2, 3)) == torch.tensor([9.0, 0.0, 9.0])).all()  # a red and a blue ball of 3 x 3 pixels, always
    edges = video.clone()
    edges[:, :, 1:-1, 1:-1] = 0
    touches = edges.flatten(2).any(-1)  # (clips, frames)
    loud = audio.unflatten(1, (balls.FRAMES, balls.WINDOW)).abs().amax(-1) > 1
    assert torch.equal(touches, loud)  # what rings on from the frame before is softer
    assert touches.any()
    assert not touches.all()


def test_walls_and_balls_have_their_pitches(balls: Any) -> None:
    """Of all frames with a single hit in a box of wood, those with the same ball and wall sound alike."""
    video, audio, words = balls.clips(200, torch.Generator().manual_seed(0))
    sounds = audio.unflatten(1, (balls.FRAMES, balls.WINDOW))[words[:, 0] == 0, 0]  # nothing rings on in a first frame
    first = video[words[:, 0] == 0, 0]
    red, blue = first[..., 0], first[..., 2]
    hits = [ball[:, row].any(-1) for ball in (red, blue) for row in (0, -1)]
    hits += [ball[:, :, column].any(-1) for ball in (red, blue) for column in (0, -1)]
    single = torch.stack(hits).sum(0) == 1
    kinds = [sounds[hit & single] for hit in hits]
    assert all(len(kind) > 1 for kind in kinds)
    assert all(torch.allclose(kind, kind[:1].expand_as(kind)) for kind in kinds)
    heard = torch.stack([kind[0] for kind in kinds])
    assert torch.pdist(heard).min() > 1


def test_the_whole_script(balls: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(balls, "DEPTH", 3)
    monkeypatch.setattr(balls, "WIDTH", 8)
    options = ["--steps", "3", "--batch", "2", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bouncing_balls.py", *options])
    balls.main()
    (path,) = tmp_path.glob("*-bouncing-balls-cpu.json")
    errors = json.loads(path.read_text())["result"]["errors"]
    assert set(errors) == {"with cross-modality blocks", "without"}
    assert all(0 < error["sound"] < 100 for error in errors.values())
