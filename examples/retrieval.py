"""Find what was said many thousand tokens ago: a Reformer learns to look things up by their keys.

A sequence is noise in which pairs of a key and its value are planted anywhere. At its end every key comes once more, in
another order, and the model must say its value. Training begins with short sequences and goes on to four times the
length whenever the present one is solved. Then follows the longest sequence that fits: one training step each, at twice
the length of the one before.

    python examples/retrieval.py                  # 1024 tokens, about two minutes on a CPU
    python examples/retrieval.py --device cuda    # 16384 tokens, then up to what the GPU holds
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrograd.measure import LiveBytes
from retrograd.models.reformer import Reformer
from retrograd.sizes import format_bytes
from training import RESULTS, Progress, plot, record

VALUES, NOISE = 16, 64
GOOD, SOLVED = 0.97, 0.995  # shares of the values that are right: to go on to longer sequences, and to stop
QUESTIONS, TESTS = 1024, 3  # at least, for such a share; tests in a row that must be passed to stop


@dataclasses.dataclass(frozen=True)
class Setting:
    depth: int
    width: int
    heads: int
    bucket_size: int
    rounds: int
    keys: int
    first: int  # the lengths of the sequences: the first
    length: int  # and the last
    tokens: int  # in a step
    rate: float
    longest: int  # to be tried, if memory allows


SETTINGS = {
    "cpu": Setting(2, 64, 2, 16, 4, keys=64, first=128, length=1024, tokens=2048, rate=3e-3, longest=8192),
    "cuda": Setting(4, 256, 4, 64, 4, keys=256, first=128, length=16384, tokens=32768, rate=1e-3, longest=2**23),
}


def sequences(number: int, length: int, keys: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens, and what follows each of them where it is asked for (else -100): both (number, length)."""

    def some(of: int, count: int) -> Tensor:  # different ones
        return torch.rand(number, of, generator=generator).argsort(-1)[:, :count]

    pairs = min(keys, length // 8)
    key, value = some(keys, pairs), torch.randint(keys, keys + VALUES, (number, pairs), generator=generator)
    tokens = torch.randint(keys + VALUES, keys + VALUES + NOISE, (number, length), generator=generator)
    asked = length - 2 * pairs  # where the questions begin
    place = 2 * some(asked // 2, pairs)
    tokens.scatter_(1, place, key).scatter_(1, place + 1, value)
    again = some(pairs, pairs)
    key, value = key.gather(1, again), value.gather(1, again)
    tokens[:, asked::2], tokens[:, asked + 1 :: 2] = key, value
    targets = torch.full_like(tokens, -100)
    targets[:, asked::2] = value
    return tokens, targets


class Retrieval:
    """A model, and the sequences it learns from."""

    def __init__(self, setting: Setting, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        self.setting, self.device = setting, device
        self.generator = torch.Generator().manual_seed(seed)
        self.model = self.build(setting.length)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)

    def build(self, length: int) -> Reformer:
        setting = self.setting
        return Reformer(
            setting.depth,
            setting.width,
            vocabulary=setting.keys + VALUES + NOISE,
            heads=setting.heads,
            length=length,
            bucket_size=setting.bucket_size,
            rounds=setting.rounds,
            feed_forward_chunks=max(length // 16384, 1),
        ).to(self.device)

    def batch(self, number: int, length: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        tokens, targets = sequences(number, length, self.setting.keys, generator or self.generator)
        return tokens.to(self.device), targets.to(self.device)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def step(self, length: int, rate: float) -> Tensor:
        tokens, targets = self.batch(max(self.setting.tokens // length, 1), length)
        with self.autocast():
            loss = self.model.loss(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def accuracy(self, questions: int, length: int, generator: torch.Generator | None = None) -> tuple[float, int]:
        """Which share of the values is right in fresh sequences, and of how many: at least so many questions."""
        right = asked = 0
        while asked < questions:
            tokens, targets = self.batch(max(self.setting.tokens // length, 1), length, generator)
            with self.autocast():
                said = self.model(tokens).argmax(-1)
            right += int((said == targets).sum())
            asked += int((targets != -100).sum())
        return right / asked, asked

    def train(self, steps: int, minutes: float) -> dict[str, Any]:
        setting, start = self.setting, time.monotonic()
        length, rate, step = setting.first, setting.rate, 0
        passed = 0  # tests at the last length, in a row
        right: list[list[float]] = []
        lengths: list[list[float]] = []
        for step in (progress := Progress(steps, "training")):
            loss = self.step(length, rate * min(1.0, (step + 1) / 50))
            if step % 10 == 9:
                accuracy, _ = self.accuracy(QUESTIONS, length)
                progress.note(f"{length} tokens: loss {loss.item():.3f}, {accuracy:.1%} right")
                right.append([step + 1, accuracy])
                lengths.append([step + 1, length / setting.length])
                passed = passed + 1 if length == setting.length and accuracy >= SOLVED else 0
                if passed == TESTS:
                    break
                if length < setting.length and accuracy >= GOOD:
                    print(f"step {step + 1}: {length} tokens, {accuracy:.1%} right", flush=True)
                    length, rate = min(4 * length, setting.length), 0.7 * rate
            if time.monotonic() - start > 60 * minutes:
                break
        series = {"values that are right": right, f"length of the sequences, in {setting.length} tokens": lengths}
        history = {"x": "step", "y": "share", "series": series, "levels": {"chance": 1 / VALUES}}
        return {"solved": passed == TESTS, "steps": step + 1, "seconds": time.monotonic() - start, "history": history}

    def longest(self, until: int) -> list[dict[str, Any]]:
        """Time and memory of one training step on one sequence, at twice the length each time, while it fits."""
        tried: list[dict[str, Any]] = []
        length = self.setting.length
        self.cost(length)  # to warm up
        while length <= until:
            try:
                tried.append(self.cost(length))
            except RuntimeError as error:  # out of memory, or more elements than a kernel can count
                tried.append({"length": length, "failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]})
                print(f"{length} tokens: {tried[-1]['failed']}", flush=True)
                return tried
            print(f"{length} tokens: {tried[-1]['seconds']:.2f} s,", format_bytes(tried[-1]["bytes"]), flush=True)
            length *= 2
        return tried

    def cost(self, length: int) -> dict[str, Any]:
        """Seconds and peak memory of one training step."""
        self.model = self.build(length)
        optimizer = torch.optim.AdamW(self.model.parameters())
        tokens, targets = self.batch(1, length)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.monotonic()
        with self.autocast():
            loss = self.model.loss(tokens, targets)
        loss.backward()
        optimizer.step()
        loss.item()  # wait for the device
        seconds = time.monotonic() - start
        if cuda:
            return {"length": length, "seconds": seconds, "bytes": torch.cuda.max_memory_allocated(self.device)}
        with LiveBytes() as memory:
            self.model.loss(tokens, targets).backward()
        return {"length": length, "seconds": seconds, "bytes": memory.peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=4000, help="at most")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training, at most")
    parser.add_argument("--length", type=int, help="of the sequences at the end of the training")
    parser.add_argument("--longest", type=int, help="length to be tried at the end, if memory allows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = torch.device(args.device)
    given = {name: value for name in ("length", "longest") if (value := getattr(args, name)) is not None}
    setting = dataclasses.replace(SETTINGS[device.type], **given)
    if setting.length < setting.first:
        parser.error(f"--length must be {setting.first} or more, where the training begins, not {setting.length}")

    retrieval = Retrieval(setting, device, args.seed)
    parameters = sum(parameter.numel() for parameter in retrieval.model.parameters())
    print(f"{parameters / 1e6:.1f} million parameters, {setting}", flush=True)
    result = retrieval.train(args.steps, args.minutes)
    held_out = torch.Generator().manual_seed(1_000_003 + args.seed)
    accuracy, questions = retrieval.accuracy(4 * QUESTIONS, setting.length, held_out)
    print(f"{setting.length} tokens, {questions} questions in fresh sequences: {accuracy:.2%} right", flush=True)
    result |= {"parameters": parameters, "accuracy": accuracy, "questions": questions}
    result["longest"] = retrieval.longest(setting.longest)
    path = record("retrieval", device, dataclasses.asdict(setting) | {"seed": args.seed}, result, args.results)
    print(path, plot(path) or "(no plot: matplotlib is missing)")


if __name__ == "__main__":
    main()
