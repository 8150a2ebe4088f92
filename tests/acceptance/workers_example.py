"""What the processes of test_train_distributed.py run: parts of examples/train_distributed.py, with a tiny model."""

import functools
import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Rows
from torch import Tensor
from workers import whole

import train_distributed as example

ROWS = Rows()
row = ROWS.row

TINY = {"depth": 2, "width": 16, "length": 8, "batch": 4, "dropout": 0.1, "budget": "32KiB", "rate": 1e-2, "every": 4}


def options(**changes: Any) -> Namespace:
    return Namespace(**{**TINY, "seed": 0, "steps": 4, "exact": True, "checkpoints": None, **changes})


@row
def train(rank: int, directory: Path, steps: int) -> None:
    """The run that nobody interrupts. Some of its updates are kept, some reversed."""
    torch.set_default_dtype(torch.float32)
    model = example.train(options(steps=steps, checkpoints=directory), torch.device("cpu"))
    (learned,) = model.blocks.policy.learned.values()
    assert 0 < learned.kept < learned.length == 2 * TINY["depth"], learned.explain()


def resumed(directory: Path) -> tuple[example.Checkpoints, int, Any, torch.optim.Optimizer]:
    """A run that has just gone on from the newest checkpoint in a directory: it must be what was noted at its save."""
    torch.set_default_dtype(torch.float32)
    directory.mkdir(exist_ok=True)
    checkpoints = example.Checkpoints(options(checkpoints=directory))
    model = example.build(options(budget="1MiB"), torch.device("cpu"))  # on one rank the whole batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=TINY["rate"])
    step = checkpoints.load(model, optimizer)
    if step:
        noted, loaded = torch.load(directory / f"{step}.pt"), numbers(model, optimizer)
        assert len(noted) == 4 * len(list(model.parameters()))
        assert loaded.keys() == noted.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in noted.items())
    return checkpoints, step, model, optimizer


def numbers(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every weight and every moment, whole."""
    return {
        name if key is None else f"{name}, {key}": whole(tensor)
        for name, parameter in model.named_parameters()
        for key, tensor in ((None, parameter), *optimizer.state[parameter].items())
    }


@row
def save(rank: int, directory: Path, before: Callable[[], None] = lambda: None) -> None:
    """Go on from the newest checkpoint, train a step, note every number, and save."""
    checkpoints, step, model, optimizer = resumed(directory)
    example.train_step(model, optimizer, example.batch(example.corpus(), step, options()), step)
    noted = numbers(model, optimizer)
    if rank == 0:
        torch.save(noted, directory / f"{step + 1}.pt")
    before()
    checkpoints.save(step + 1, model, optimizer)


@row
def nan(rank: int) -> None:
    """With exact joins a stream that is not a number is an error of its rank alone: the ranks agree before it comes."""
    torch.set_default_dtype(torch.float32)
    outcomes = []
    for poisoned in (True, False):
        model = example.build(options(), torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=TINY["rate"])
        step = functools.partial(example.train_step, model, optimizer, example.batch(example.corpus(), 0, options()), 0)
        if poisoned:
            spoil = model.embed.register_forward_hook(lambda module, inputs, out: out * (math.nan if rank == 1 else 1))
            with pytest.raises(FloatingPointError, match=r"^step 0: the loss is nan on rank 1; no weight was changed$"):
                step()
            spoil.remove()
        torch.manual_seed(rank)
        outcomes.append((step(), [whole(parameter) for parameter in optimizer.param_groups[0]["params"]]))
    (loss, weights), (expected_loss, expected_weights) = outcomes
    assert loss == expected_loss
    assert all(torch.equal(a, b) for a, b in zip(weights, expected_weights, strict=True))
