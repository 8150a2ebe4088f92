"""Learn the forces between moving charges: an SE(3)-equivariant network against a transformer of the same size.

Each particle has a charge and a velocity. Every pair attracts or repels (Coulomb's law, softened), and a moving charge
also feels the magnetic field of the others, at right angles to its velocity: a force that does not point along any
line between particles. Four runs on the same configurations: the equivariant network; a transformer that reads
coordinates, relative to their centre, as plain numbers; the same with every batch rotated at random, so that it could
learn the symmetry; and the same again with eight steps for each step of the others, which is about the time that the
equivariant one takes. Errors are relative: the root mean square error of held-out forces over their root mean square.

    python examples/particles.py                            # about two minutes on a CPU
    python examples/particles.py --steps 50 --results /tmp  # a quick look
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from retrograd.models.se3 import SE3Transformer
from training import RESULTS, Progress, plot, record

SOFTENING = 0.5  # of the forces at short distances


class Systems(NamedTuple):
    """States of many-body systems. B of them, of N particles each."""

    charges: Tensor  # (B, N, 1), -1 or 1
    coordinates: Tensor  # (B, N, 3)
    velocities: Tensor  # (B, N, 3)
    forces: Tensor  # (B, N, 3)

    def chosen(self, rows: Tensor) -> Systems:
        return Systems(*(each[rows] for each in self))

    def rotated(self, generator: torch.Generator) -> Systems:
        """Each system turned by a rotation of its own."""
        matrices = torch.linalg.qr(torch.randn(len(self.charges), 3, 3, generator=generator)).Q
        matrices = matrices * torch.linalg.det(matrices).view(-1, 1, 1)  # without reflections
        return Systems(self.charges, *(each @ matrices for each in self[1:]))


def generated(number: int, particles: int, seed: int) -> Systems:
    """Random states, and the forces in them by the laws of physics (in units in which their constants are one)."""
    generator = torch.Generator().manual_seed(seed)
    charges = torch.randint(2, (number, particles, 1), generator=generator) * 2.0 - 1.0
    coordinates = 1.5 * torch.randn(number, particles, 3, generator=generator)
    velocities = torch.randn(number, particles, 3, generator=generator)
    away = coordinates.unsqueeze(2) - coordinates.unsqueeze(1)  # (B, N, N, 3): to the first from the second
    strength = charges.unsqueeze(1) * (away.square().sum(-1, keepdim=True) + SOFTENING**2) ** -1.5
    electric = (strength * away).sum(2)
    magnetic = (strength * torch.linalg.cross(velocities.unsqueeze(1), away)).sum(2)
    forces = charges * (electric + torch.linalg.cross(velocities, magnetic))
    return Systems(charges, coordinates, velocities, forces)


class Equivariant(nn.Module):
    """Charges are numbers (degree 0), velocities and forces are vectors (degree 1)."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.network = SE3Transformer({0: 1, 1: 1}, {1: 1}, depth=depth, width=width, cutoff=8.0)

    def forward(self, systems: Systems) -> Tensor:
        features = {0: systems.charges.unsqueeze(-1), 1: systems.velocities.unsqueeze(2)}
        return self.network(features, systems.coordinates)[1].squeeze(2)


class Transformer(nn.Module):
    """A particle is a token of seven numbers. The centre is at the origin, so that translations change nothing."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.embed, self.head = nn.Linear(7, width), nn.Linear(width, 3)
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, systems: Systems) -> Tensor:
        centred = systems.coordinates - systems.coordinates.mean(1, keepdim=True)
        return self.head(self.layers(self.embed(torch.cat((systems.charges, centred, systems.velocities), -1))))


def relative_error(model: nn.Module, systems: Systems, scale: Tensor) -> float:
    with torch.no_grad():
        errors = model(systems) * scale - systems.forces
    return (errors.square().mean() / systems.forces.square().mean()).sqrt().item()


def train(
    model: nn.Module,
    data: Systems,
    held_out: Systems,
    options: argparse.Namespace,
    what: str,
    *,
    rotate: bool,
    repeat: int,
) -> dict[str, object]:
    """The relative error on held-out systems ten times during training, and what training took."""
    generator = torch.Generator().manual_seed(options.seed)
    scale = data.forces.square().mean().sqrt()
    optimizer = torch.optim.Adam(model.parameters(), options.rate)
    total = options.steps * repeat
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, total_steps=total, pct_start=0.1)
    history, start = [[0, relative_error(model, held_out, scale)]], time.monotonic()
    for step in (progress := Progress(total, what)):
        batch = data.chosen(torch.randint(len(data.charges), (options.batch,), generator=generator))
        if rotate:
            batch = batch.rotated(generator)
        loss = (model(batch) - batch.forces / scale).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # two particles that almost touch feel very large forces
        optimizer.step()
        schedule.step()
        if (step + 1) * 10 // total > step * 10 // total:
            history.append([(step + 1) / repeat, relative_error(model, held_out, scale)])
            progress.note(f"error {history[-1][1]:.2f}")
    return {
        "relative error": history[-1][1],
        "steps": total,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(time.monotonic() - start),
        "history": history,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"steps": 500, "batch": 32, "particles": 8, "training-systems": 2048, "seed": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()

    data = generated(options.training_systems, options.particles, seed=options.seed + 1)
    held_out = generated(256, options.particles, seed=options.seed + 2)
    runs = {
        "equivariant": (lambda: Equivariant(depth=4, width=16), False, 1),
        "transformer": (lambda: Transformer(depth=3, width=40), False, 1),
        "transformer, rotated": (lambda: Transformer(depth=3, width=40), True, 1),
        "transformer, rotated, 8 times the steps": (lambda: Transformer(depth=3, width=40), True, 8),
    }
    results = {}
    for what, (build, rotate, repeat) in runs.items():
        torch.manual_seed(options.seed)
        results[what] = train(build(), data, held_out, options, what, rotate=rotate, repeat=repeat)

    print(f"\n{'':42}{'parameters':>12}{'steps':>8}{'seconds':>9}{'error':>8}")
    for what, result in results.items():
        parameters, steps, seconds = result["parameters"], result["steps"], result["seconds"]
        print(f"{what:42}{parameters:>12}{steps:>8}{seconds:>9}{result['relative error']:>8.3f}")
    series = {what: result.pop("history") for what, result in results.items()}
    history = {"x": "step (of the run with 8 times as many: every eighth)", "y": "relative error", "series": series}
    settings = {name: value for name, value in vars(options).items() if name != "results"}
    path = record("particles", "cpu", settings, {"runs": results, "history": history}, options.results)
    drawn = plot(path)
    print(f"\nwritten: {path} {'and its plot' if drawn else '(no plot without matplotlib)'}")


if __name__ == "__main__":
    main()
