"""Hear what is seen: balls bounce in a box, and each wall that a ball hits sounds.

A red and a blue ball fly through a box of 12 x 12 pixels. A hit makes a tone: its pitch tells the ball and the wall; a
word says what the box is made of, which decides how long it rings. The model sees the frames up to this one, hears the
sound up to the frame before, reads the word, and predicts the sound of this frame. The same network is trained twice:
with blocks in which the towers attend to each other, and with those attending to themselves.

    python examples/bouncing_balls.py    # about three minutes on a CPU
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrograd.models.video_audio import VideoAudio
from training import RESULTS, Progress, plot, record

SIDE, PATCH, FRAMES, WINDOW = 12, 6, 12, 32
DEPTH, WIDTH = 6, 48
RINGING = torch.tensor([5.0, 15.0])  # of a box of wood and of metal: samples until a tone has faded to 1/e
PITCHES = torch.linspace(0.04, 0.39, 8).view(2, 4)  # periods in a sample, for each ball and wall


def clips(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Video (number, frames, 12, 12, 3), sound (number, frames * window), and the word (number, 1)."""
    least, most = 1, SIDE - 2  # where the middle of a ball of 3 x 3 pixels may be
    place = torch.randint(least + 1, most, (number, 2, 2), generator=generator)  # (number, balls, axes)
    speed = torch.tensor([-2, -1, 1, 2])[torch.randint(4, (number, 2, 2), generator=generator)]
    word = torch.randint(len(RINGING), (number,), generator=generator)

    samples = torch.arange(2 * WINDOW)  # a tone rings on into the next frame
    fading = torch.exp(-samples / RINGING[word][:, None])  # (number, samples)
    tones = 4 * torch.sin(2 * torch.pi * PITCHES.flatten()[:, None] * samples)  # (balls * walls, samples)
    pixels = torch.arange(SIDE)
    video = torch.zeros(number, FRAMES, SIDE, SIDE, 3)
    audio = torch.zeros(number, (FRAMES + 1) * WINDOW)
    for frame in range(FRAMES):
        place = place + speed
        hits = torch.stack([place <= least, place >= most], -1)  # (number, balls, axes, ends)
        place, speed = place.clamp(least, most), torch.where(hits.any(-1), -speed, speed)
        audio[:, frame * WINDOW : (frame + 2) * WINDOW] += hits.flatten(1).float() @ tones * fading
        rows, columns = ((pixels - place[..., None]).abs() <= 1).float().unbind(2)  # (number, balls, 12) each
        red, blue = (rows[..., :, None] * columns[..., None, :]).unbind(1)  # (number, 12, 12) each
        video[:, frame] = torch.stack([red, torch.zeros_like(red), blue], -1)
    return video, audio[:, : FRAMES * WINDOW], word[:, None]


def train(kinds: list[Any], steps: int, batch: int, seed: int) -> tuple[dict[str, float], list[list[float]]]:
    """The errors on fresh clips after training, as shares of what there is to predict, and those of the sound as it
    learned."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    held_out = clips(256, torch.Generator().manual_seed(1_000_003 + seed))
    model = VideoAudio(
        DEPTH, WIDTH, WIDTH, picture=(SIDE, SIDE, 3), patch=PATCH, window=WINDOW, vocabulary=len(RINGING), kinds=kinds
    )
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=steps, pct_start=0.1)
    learned: list[list[float]] = []

    def errors() -> dict[str, float]:
        with torch.no_grad():
            frames, sound = model.loss(*held_out)
        video, audio, _ = held_out
        return {"frames": float(frames / video.var()), "sound": float(sound / audio.square().mean())}

    for step in (progress := Progress(steps, "towers that hear each other" if "other" in kinds else "towers apart")):
        frames, sound = model.loss(*clips(batch, generator))
        (frames + sound).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 19 or step == steps - 1:
            learned.append([step + 1, errors()["sound"]])
            progress.note(f"error of the sound {learned[-1][1]:.3f}")
    return errors(), learned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    start = time.monotonic()
    networks = {"with cross-modality blocks": ["self", "context", "other"], "without": ["self", "context", "self"]}
    errors: dict[str, Any] = {}
    series: dict[str, list[list[float]]] = {}
    for name, kinds in networks.items():
        errors[name], series[name] = train(kinds, args.steps, args.batch, args.seed)
        print(f"{name}: error of the sound {errors[name]['sound']:.3f} (silence: 1)", flush=True)
    history = {"x": "step", "y": "error of the sound", "series": series, "levels": {"silence": 1.0}}
    result = {"errors": errors, "seconds": time.monotonic() - start, "history": history}
    settings = {"depth": DEPTH, "width": WIDTH, "steps": args.steps, "batch": args.batch, "seed": args.seed}
    path = record("bouncing-balls", "cpu", settings, result, args.results)
    print(path, plot(path) or "(no plot: matplotlib is missing)")


if __name__ == "__main__":
    main()
