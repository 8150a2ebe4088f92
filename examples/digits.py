"""Train a reversible axial-attention network on scikit-learn's digits: 1797 images of 8 by 8 pixels, a fifth held out.

Each place of an image brings its 3 by 3 neighbourhood. Training images are moved by up to one pixel in both directions,
anew at each step. What counts is the accuracy after the last step.

    python examples/digits.py                                         # a few minutes on a CPU; needs scikit-learn
    python examples/digits.py --plot examples/results/FILE.json       # draw the result of another machine
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor
from torch.nn import functional

import retrograd as rg
from retrograd.models import AxialClassifier
from retrograd.sizes import format_bytes
from training import Progress, add_result_arguments, drawn, plot, record

POLICIES = {"reverse": rg.Reverse(), "keep": rg.Keep()}


def digits(device: torch.device, split: int = 0) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images (number, 8, 8), the background 0, and their digits: to train on, and held out."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 6, dtype=torch.float32, device=device).view(-1, 8, 8)  # a variance of about one
    digits = torch.tensor(labels, device=device)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(split)).to(device)
    held_out, rest = order[: len(digits) // 5], order[len(digits) // 5 :]
    return (images[rest], digits[rest]), (images[held_out], digits[held_out])


def moved(images: Tensor) -> Tensor:
    """Each image moved by -1, 0 or 1 pixels along both axes; what comes in is background."""
    number = len(images)
    padded = functional.pad(images, (1, 1, 1, 1))  # (number, 10, 10)
    down, right = torch.randint(3, (2, number, 1, 1), device=images.device)
    places = torch.arange(8, device=images.device)
    rows, columns = places[:, None] + down, places + right
    return padded[torch.arange(number, device=images.device)[:, None, None], rows, columns]


def neighbourhoods(images: Tensor) -> Tensor:
    """What the model reads at each place, the 3 by 3 pixels around it: (number, 8, 8) -> (number, 8, 8, 9)."""
    return functional.pad(images, (1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1).flatten(3)


@torch.no_grad()
def accuracy(model: AxialClassifier, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = (model(neighbourhoods(images)).argmax(-1) == labels).double().mean().item()
    model.train()
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("depth", 4), ("width", 48), ("epochs", 30), ("batch", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--split", type=int, default=0, help="which fifth is held out: the seed of the choice")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--policy", choices=POLICIES, default="reverse")
    add_result_arguments(parser)
    options = parser.parse_args()
    if drawn(options.plot):
        return

    torch.manual_seed(0)
    device = torch.device(options.device)
    (images, labels), held_out = digits(device, options.split)
    model = AxialClassifier((8, 8), 9, 10, options.depth, options.width).to(device)
    held = {}
    for name, policy in POLICIES.items():
        model.blocks.policy = policy
        held[name] = rg.measure(model, neighbourhoods(images[: options.batch])).activations
    model.blocks.policy = POLICIES[options.policy]
    print(f"activations of a step: {format_bytes(held['reverse'])} reversed, {format_bytes(held['keep'])} kept")

    optimizer = torch.optim.AdamW(model.parameters(), options.rate, weight_decay=0.05)
    steps = options.epochs * -(-len(images) // options.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, steps, pct_start=0.1)
    trained, judged, start = [], [], time.monotonic()
    for epoch in (progress := Progress(options.epochs, "training")):
        right = 0
        for chosen in torch.randperm(len(images)).split(options.batch):
            logits = model(neighbourhoods(moved(images[chosen])))
            loss = functional.cross_entropy(logits, labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            right += (logits.argmax(-1) == labels[chosen]).sum().item()
        trained.append([epoch + 1, right / len(images)])
        judged.append([epoch + 1, accuracy(model, *held_out)])
        progress.note(f"held-out accuracy {judged[-1][1]:.1%}")
    seconds = time.monotonic() - start

    result = {
        "held_out_accuracy": judged[-1][1],
        "held_out_images": len(held_out[1]),
        "train_images": len(images),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": steps,
        "step_ms": 1e3 * seconds / steps,
        "activation_bytes": held,
        "history": {
            "x": "epoch",
            "y": "accuracy",
            "series": {"train, images moved": trained, "held out": judged},
            "levels": {"97 %": 0.97},
        },
    }
    named = ("depth", "width", "epochs", "batch", "rate", "policy", "split")
    settings = {name: getattr(options, name) for name in named}
    name = f"digits-split-{options.split}" if options.split else "digits"
    path = record(name, device, settings, result, options.results)
    print(f"held-out accuracy {judged[-1][1]:.2%} of {len(held_out[1])} images after {steps} steps")
    print("written:", path, plot(path) or "(no plot: matplotlib is missing)")


if __name__ == "__main__":
    main()
