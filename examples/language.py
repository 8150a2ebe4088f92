"""Train a reversible language model on the source code of Python's standard library, byte by byte, and compare what it
needs for files it has not seen with `xz -9`.

The files are those that people wrote: no tests, no tables that a script wrote (encodings), no documentation
(pydoc_data). About one file in twenty is held out, chosen by a hash of its path. Every held-out byte counts, and each
is predicted from the bytes before it. xz gets all held-out files in one piece, which suits it best; and once more with
the training files before them, since the model has seen these too.

    python examples/language.py                                         # a few minutes on a CPU
    python examples/language.py --setting large --device cuda           # a few minutes on a large GPU
    python examples/language.py --plot examples/results/FILE.json       # draw the result of another machine
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import math
import os
import sysconfig
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import retrograd as rg
from retrograd.models import LanguageModel
from retrograd.sizes import format_bytes
from training import Progress, add_result_arguments, drawn, plot, record

NOT_WRITTEN = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
POLICIES = {"reverse": rg.Reverse(), "keep": rg.Keep(), "auto": rg.Auto(budget=0.5)}


@dataclass(frozen=True)
class Setting:
    """`length` bytes of context, `batch` sequences a step, the highest `rate`; bytes are judged `stride` at a time."""

    depth: int
    width: int
    length: int
    batch: int
    dropout: float
    rate: float
    stride: int
    minutes: float
    steps: int | None = None


SETTINGS = {
    "small": Setting(4, 128, 128, 8, dropout=0.0, rate=3e-3, stride=96, minutes=2.0),
    "large": Setting(12, 768, 1024, 32, dropout=0.2, rate=1e-3, stride=512, minutes=4.5),
}


def corpus() -> tuple[bytes, bytes]:
    """The files to train on, and those held out."""
    library = sysconfig.get_path("stdlib")
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for folder, folders, names in os.walk(library):
        folders[:] = sorted(set(folders) - NOT_WRITTEN)  # in place: os.walk goes into these alone
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix == ".py" and not name.startswith("_sysconfigdata"):
                digest = hashlib.sha256(path.relative_to(library).as_posix().encode()).digest()
                parts[digest[0] < 20].append(path.read_bytes())  # of 256
    return b"".join(parts[False]), b"".join(parts[True])


def xz(data: bytes, before: bytes = b"", preset: int = 9) -> float:
    """The bits per byte of `xz -9`: of data, or of what data adds to other files that come before it."""

    def size(content: bytes) -> int:
        return len(lzma.compress(content, preset=preset)) if content else 0

    return 8 * (size(before + data) - size(before)) / len(data)


def as_tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def windows(data: Tensor, starts: Tensor, length: int) -> Tensor:
    """A window of `length` bytes and their successors from each start: (starts, length + 1)."""
    offsets = torch.arange(length + 1, device=data.device)
    return data[starts.to(data.device)[:, None] + offsets].long()


@torch.no_grad()
def bits_per_byte(model: LanguageModel, data: Tensor, setting: Setting, autocast: AbstractContextManager) -> float:
    """The bits per byte of all of `data`, each byte predicted from at least `length - stride` bytes where there are
    so many before it. Nothing predicts the first byte: it counts as 8 bits."""
    last = len(data) - 1 - setting.length
    starts = torch.tensor([*range(0, last, setting.stride), last])
    known = torch.cat((torch.zeros(1, dtype=torch.long), starts[:-1] + setting.length))  # judged by the window before
    places = starts[:, None] + 1 + torch.arange(setting.length)  # of the bytes that a window predicts
    nats = torch.zeros((), dtype=torch.float64, device=data.device)
    model.eval()
    for some, new in zip(starts.split(setting.batch), (places > known[:, None]).split(setting.batch), strict=True):
        tokens = windows(data, some, setting.length)
        with autocast:
            logits = model(tokens[:, :-1])
        losses = functional.cross_entropy(logits.float().mT, tokens[:, 1:], reduction="none")  # (batch, length)
        nats += losses[new.to(data.device)].double().sum()
    model.train()
    return (nats.item() / math.log(2) + 8) / len(data)


def rate_at(fraction: float) -> float:
    """The learning rate after a fraction of the training, as a part of the highest: a short rise, then a cosine."""
    return min(fraction / 0.05, 0.5 * (1 + math.cos(math.pi * min(fraction, 1.0))))


class Clock:
    """How much of the training is over, by time or by steps, whichever is further."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.steps, self.start = setting, 0, time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def fraction(self) -> float:
        by_steps = self.steps / self.setting.steps if self.setting.steps else 0.0
        return max(self.seconds() / (60 * self.setting.minutes), by_steps)

    def until(self, fraction: float) -> Iterator[None]:
        while self.fraction() < fraction:
            yield
            self.steps += 1


def train(model: LanguageModel, data: Tensor, held_out: Tensor, setting: Setting, autocast: AbstractContextManager):
    """Train until the time or the steps are over; the history, the number of steps and the seconds."""
    decayed = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is d for d in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, setting.rate, betas=(0.9, 0.95), fused=data.is_cuda)
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(0, len(held_out) - setting.length - 2, 16).long()  # a few windows, for the curve alone
    sample = windows(held_out, spread, setting.length)
    trained, judged = [], []
    clock = Clock(setting)
    for percent in (progress := Progress(100, "training")):
        losses = []
        for _ in clock.until((percent + 1) / 100):
            for group in optimizer.param_groups:
                group["lr"] = setting.rate * max(rate_at(clock.fraction()), 1e-3)
            starts = torch.randint(len(data) - setting.length, (setting.batch,), generator=generator)
            with autocast:
                loss = model.loss(windows(data, starts, setting.length))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
        if losses:  # none where the step before took longer than a hundredth of the time
            trained.append([clock.steps, torch.stack(losses).mean().item() / math.log(2)])
        if percent % 5 == 4:
            model.eval()
            with torch.no_grad(), autocast:
                judged.append([clock.steps, model.loss(sample).item() / math.log(2)])
            model.train()
        progress.note(f"{trained[-1][1]:.2f} bits per byte" + (f", held out {judged[-1][1]:.2f}" if judged else ""))
    return {"train": trained, "held out (16 windows)": judged}, clock.steps, clock.seconds()


def activations(model: LanguageModel, tokens: Tensor) -> dict[str, int]:
    """The bytes that a step holds besides weights and gradients, reversed and kept."""
    chosen, found = model.blocks.policy, {}
    for name in ("reverse", "keep"):
        model.blocks.policy = POLICIES[name]
        found[name] = rg.measure(model.loss, tokens, autocast=torch.bfloat16 if tokens.is_cuda else None).activations
    model.blocks.policy = chosen
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--policy", choices=POLICIES, default="reverse")
    parser.add_argument("--compile", action="store_true", help="compile the networks of each block")
    parser.add_argument("--depth", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--minutes", type=float, help="of training; the learning rate follows the time")
    parser.add_argument("--steps", type=int, help="stop after so many, if the time is not over before")
    add_result_arguments(parser)
    options = parser.parse_args()
    if drawn(options.plot):
        return
    if options.minutes is not None and options.minutes <= 0:
        parser.error(f"--minutes must be above 0, not {options.minutes:g}")

    chosen = {name: getattr(options, name) for name in ("depth", "width", "minutes", "steps")}
    setting = replace(SETTINGS[options.setting], **{name: value for name, value in chosen.items() if value is not None})
    device = torch.device(options.device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    torch.manual_seed(0)
    model = LanguageModel(
        setting.depth,
        setting.width,
        length=setting.length,
        dropout=setting.dropout,
        policy=POLICIES[options.policy],
    ).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    text, unseen = corpus()
    data, held_out = as_tensor(text, device), as_tensor(unseen, device)
    print(
        f"{setting.depth} blocks of width {setting.width}, {parameters / 1e6:.1f} million weights; "
        f"{len(text) / 1e6:.1f} MB to train on, {len(unseen) / 1e6:.2f} MB held out"
    )
    held = activations(model, windows(data, torch.arange(setting.batch), setting.length))
    print(f"activations of a step: {format_bytes(held['reverse'])} reversed, {format_bytes(held['keep'])} kept")
    if options.compile:
        for network in (network for pair in model.blocks.pairs() for network in pair):
            network.compile()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    series, steps, seconds = train(model, data, held_out, setting, autocast)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None

    with torch.compiler.set_stance("force_eager"):  # other shapes than in training: not worth compiling for
        found = bits_per_byte(model, held_out, setting, autocast)
        prompt = torch.tensor([list(b"def ")], device=device)
        with autocast:
            written = model.eval().generate(prompt, min(500, setting.length - 4), temperature=0.7)
    levels = {"xz -9": xz(unseen), "xz -9e": xz(unseen, preset=9 | lzma.PRESET_EXTREME)}
    primed = xz(unseen, before=text)
    result = {
        "bits_per_byte": found,
        "xz_bits_per_byte": {**levels, "xz -9 after the training files": primed},
        "held_out_bytes": len(unseen),
        "train_bytes": len(text),
        "parameters": parameters,
        "steps": steps,
        "epochs": steps * setting.batch * setting.length / len(text),
        "step_ms": 1e3 * seconds / max(steps, 1),
        "activation_bytes": held,
        "peak_memory_bytes": peak,
        "sample": bytes(written[0].tolist()).decode(errors="replace"),
        "history": {
            "x": "step",
            "y": "bits per byte",
            "series": series,
            "levels": {"xz -9": levels["xz -9"], "all held out": found},
        },
    }
    settings = {"setting": options.setting, "policy": options.policy, "compile": options.compile, **asdict(setting)}
    path = record(f"language-{options.setting}", device, settings, result, options.results)
    print(f"{result['sample']}\n")
    print(f"held-out files: {found:.3f} bits per byte after {steps} steps of {result['step_ms']:.0f} ms")
    for name, bits in result["xz_bits_per_byte"].items():
        print(f"{name:>32}: {bits:.3f}")
    print("written:", path, plot(path) or "(no plot: matplotlib is missing)")


if __name__ == "__main__":
    main()
