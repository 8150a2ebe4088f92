"""What the two processes of test_pipeline.py run: stages of a pipeline, each a reversible program of its own.

Between stages only the two streams travel. A stage has several microbatches in flight: it runs forward on a later one
before it runs backward on an earlier one, so whatever a module remembered of its last call would be wrong.
"""

import functools
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from processes import Rows
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from workers import DEPTH, DIM, STEPS, WORLD, Net, Plain, Sequence, assert_same, each_replayed_once, gradients, pairs

import retrograd as rg
from retrograd.measure import LiveBytes

MICROBATCHES = 4
SHAPE = (2, 4, DIM)  # of one microbatch

ROWS = Rows()
row = ROWS.row

Blocks = Callable[[], list[tuple[nn.Module, nn.Module]]]


class Stage(nn.Module):
    """A part of the blocks. The first stage makes two streams of its input, the last makes one output of them."""

    def __init__(self, net: nn.Module, index: int, number: int) -> None:
        super().__init__()
        self.net, self.first, self.last = net, index == 0, index == number - 1

    def forward(self, *streams: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        a, b = streams * 2 if self.first else streams
        out = self.net.run({"a": a, "b": b})
        return (out["a"] + out["b"]) / 2 if self.last else (out["a"], out["b"])

    def examples(self) -> dict[str, Any]:
        """What `PipelineStage` otherwise finds out by running the stage once, on memory that nobody has filled: that
        would draw random numbers and move running means."""
        x, stream = torch.empty(SHAPE), torch.empty(SHAPE, requires_grad=True)
        given = (x,) if self.first else (stream, stream)
        return {"input_args": given, "output_args": (stream,) if self.last else (stream, stream)}


def stages(sequence: Sequence, number: int, blocks: Blocks) -> list[Stage]:
    """All stages, with the same weights in every process and for either class."""
    torch.manual_seed(0)
    return [Stage(sequence(blocks()), index, number) for index in range(number)]


def of_rank(rank: int, every: list[Stage]) -> nn.ModuleDict:
    return nn.ModuleDict({str(index): stage for index, stage in enumerate(every) if index % WORLD == rank})


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The input and the target of all microbatches of one step."""
    torch.manual_seed(1000 + step)
    shape = MICROBATCHES * SHAPE[0], *SHAPE[1:]
    return torch.randn(shape), torch.randn(shape)


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


class Pipeline:
    """The stages of this rank under a schedule."""

    def __init__(
        self,
        rank: int,
        schedule: Any,
        every: list[Stage],
        described: Callable[[Stage], dict[str, Any]] = Stage.examples,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.stages = rank, of_rank(rank, every)
        placed = [
            PipelineStage(stage, int(index), len(every), torch.device("cpu"), **described(stage), group=group)
            for index, stage in self.stages.items()
        ]
        self.schedule = schedule(placed if len(placed) > 1 else placed[0], MICROBATCHES, loss_of)

    def step(self, step: int) -> None:
        """The gradients of one step."""
        x, target = batch(step)
        torch.manual_seed(2000 + self.rank)
        self.stages.zero_grad(set_to_none=False)
        if self.rank == 0:
            self.schedule.step(x)
        else:
            self.schedule.step(target=target)

    def train(self) -> list[dict[str, Tensor]]:
        """The gradients of each step, and at the end the weights and buffers."""
        optimizer = torch.optim.SGD(self.stages.parameters(), lr=0.1)
        history = []
        for step in range(STEPS):
            self.step(step)
            history.append(gradients(self.stages))
            optimizer.step()
        return [*history, dict(self.stages.state_dict())]


def in_one_process(rank: int, number: int) -> list[dict[str, Tensor]]:
    """The reference: all stages in a row, kept activations, no pipeline; the gradients of the stages of this rank."""
    every = stages(Plain, number, pairs)
    mine = of_rank(rank, every)
    optimizer = torch.optim.SGD((p for stage in every for p in stage.parameters()), lr=0.1)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, target in zip(*(each.chunk(MICROBATCHES) for each in batch(step)), strict=True):
            streams: Any = (x,)
            for stage in every[:-1]:
                streams = stage(*streams)
            (loss_of(every[-1](*streams), target) / MICROBATCHES).backward()
        history.append(gradients(mine))
        optimizer.step()
    assert all(gradient.abs().max() > 1e-4 for gradient in history[0].values()), "the row compares zeros"
    return [*history, dict(mine.state_dict())]


SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": ScheduleGPipe, "number": WORLD},
    "1f1b": {"schedule": Schedule1F1B, "number": WORLD},
    "interleaved": {"schedule": ScheduleInterleaved1F1B, "number": 2 * WORLD},
}


@row(**SCHEDULES)
def pipeline(rank: int, schedule: Any, number: int) -> None:
    with each_replayed_once():
        found = Pipeline(rank, schedule, stages(rg.ReversibleSequence, number, pairs)).train()
    assert_same(found, in_one_process(rank, number))


@row
def pipeline_without_examples(rank: int) -> None:
    every = stages(rg.ReversibleSequence, WORLD, pairs)
    found = Pipeline(rank, Schedule1F1B, every, described=lambda stage: {}).train()
    assert_same(found, in_one_process(rank, WORLD))


def with_batch_norm() -> list[tuple[nn.Module, nn.Module]]:
    def f() -> nn.Module:
        return nn.Sequential(Net(), nn.Flatten(0, 1), nn.BatchNorm1d(DIM), nn.Unflatten(0, SHAPE[:2]))

    return [(f(), Net()) for _ in range(2)]


STATES: dict[str, Blocks] = {"dropout": functools.partial(pairs, dropout=0.3), "batch_norm": with_batch_norm}


@row(
    **{
        f"{state}-{name}": {"blocks": blocks, **arguments}
        for state, blocks in STATES.items()
        for name, arguments in SCHEDULES.items()
    }
)
def state_of_each_microbatch(rank: int, schedule: Any, number: int, blocks: Blocks) -> None:
    """Dropout masks and running means are those of the microbatch that is replayed: as in a pipeline that keeps."""
    kept, found = (
        Pipeline(rank, schedule, stages(sequence, number, blocks)).train()
        for sequence in (Plain, rg.ReversibleSequence)
    )
    assert_same(found, kept)


@row
def activations_do_not_grow_with_depth(rank: int) -> None:
    def peak(sequence: Sequence, depth: int) -> int:
        trained = Pipeline(rank, Schedule1F1B, stages(sequence, WORLD, functools.partial(pairs, depth)))
        trained.step(0)  # the buffers of the pipeline are there afterwards, and the gradients
        with LiveBytes() as memory:
            trained.step(1)
        return memory.peak

    assert peak(rg.ReversibleSequence, 9) == peak(rg.ReversibleSequence, 3)
    assert peak(Plain, 9) > 2 * peak(Plain, 3)


class Faulty(Net):
    """A network that fails at its third microbatch, in the phase that `fault` says."""

    fault: ClassVar[str | None] = None
    microbatches: ClassVar[list[int]] = []  # not a number of the module: a replay would find it as the forward did

    def forward(self, x: Tensor) -> Tensor:
        phase = rg.phase()
        if phase is not None and Faulty.fault == ("replay" if phase.replaying else "forward"):
            self.microbatches.append(1)
            if len(self.microbatches) == 3:
                raise ArithmeticError("on purpose")
        return super().forward(x)


@row(forward_of_last={"where": "forward", "faulty": 1}, replay_of_first={"where": "replay", "faulty": 0})
def exception_in_a_stage(rank: int, where: str, faulty: int) -> None:
    """The error names the update, the other rank's is that of a time-out, and afterwards the same modules train."""
    every = stages(rg.ReversibleSequence, WORLD, lambda: [(Faulty(), Net()), *pairs(DEPTH - 1)])
    failing = Pipeline(rank, Schedule1F1B, every, group=dist.new_group(timeout=timedelta(seconds=2)))
    Faulty.fault = where if rank == faulty else None
    try:
        failing.step(0)
    except RuntimeError:
        error = traceback.format_exc()
    else:
        error = "none"
    finally:
        Faulty.fault = None
    phase = {"forward": "forward", "replay": "replayed in the backward"}[where]
    expected = f"on purpose\nretrograd: in update 0 (target 'a', fn Faulty), {phase}" if rank == faulty else "Timed out"
    assert expected in error, error
    assert_same(Pipeline(rank, Schedule1F1B, every).train(), in_one_process(rank, WORLD))
