"""What the two processes of test_distributed.py run where the ranks do not do the same: batches of other sizes or
numbers, other programs, other choices of `Auto`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from processes import Rows
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from workers import (
    DEPTH,
    DIM,
    WORLD,
    Plain,
    assert_same,
    data,
    each_replayed_once,
    gradients,
    in_one_process,
    made,
    mean_square,
    pairs,
    parallelize,
    sequence_of,
    shard,
    train,
    with_layer_dropout,
)

import retrograd as rg

ROWS = Rows()
row = ROWS.row

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp_each": lambda model: shard(model, "each"),
    "fsdp_pairs": lambda model: shard(model, "pairs"),
}


def batch(rank: int, step: int, size: int) -> Tensor:
    torch.manual_seed(1000 + 10 * step + rank)
    return torch.randn(size, 4, DIM)


def larger_on_rank_1(model: nn.Module, rank: int, step: int) -> Tensor:
    """In the second step rank 1 has one sequence more than rank 0."""
    return model(batch(rank, step, 2 + rank * step)).square().mean()


def none_on_rank_1(model: nn.Module, rank: int, step: int) -> Tensor:
    """In the second step there is nothing left for rank 1: it takes part with an empty batch."""
    return model(batch(rank, step, 0 if (rank, step) == (1, 1) else 2)).square().sum()


@row(
    **{f"{wrapper}-larger": {"wrapper": wrapper, "loss": larger_on_rank_1} for wrapper in WRAPPERS},
    **{f"{wrapper}-none": {"wrapper": wrapper, "loss": none_on_rank_1} for wrapper in WRAPPERS},
)
def uneven_batches(rank: int, wrapper: str, loss: Any) -> None:
    with each_replayed_once():
        found = train(WRAPPERS[wrapper](made(sequence_of(dropout=0.3), rg.ReversibleSequence)), loss, [rank])
    assert_same(found, in_one_process(sequence_of(dropout=0.3), loss))


@row
def ddp_join(rank: int) -> None:
    """Rank 1 has no third batch: `join` takes part in its place, with gradients of zero."""
    model = DistributedDataParallel(made(sequence_of(), rg.ReversibleSequence))
    found = []
    with model.join(), each_replayed_once():
        for step in range(3 - rank):
            model.zero_grad()
            mean_square(model, rank, step).backward()
            found.append(gradients(model))
    expected = []
    for ranks, step in (((0, 1), 0), ((0, 1), 1), ((0,), 2)):
        plain = made(sequence_of(), Plain)
        for other in ranks:
            (mean_square(plain, other, step) / WORLD).backward()
        expected.append(gradients(plain))
    assert_same(found, expected[: 3 - rank])


@row(**{wrapper: {"wrapper": wrapper} for wrapper in WRAPPERS})
def auto_chooses_otherwise(rank: int, wrapper: str) -> None:
    """A new shape makes rank 1 learn, and so reverse, while rank 0 keeps: both take part in the same collectives."""
    policy = rg.Auto(budget="1GiB")
    model = made(sequence_of(), rg.ReversibleSequence)
    model.policy = policy
    found = train(WRAPPERS[wrapper](model), larger_on_rank_1, [rank])
    assert_same(found, in_one_process(sequence_of(), larger_on_rank_1))
    assert [learned.kept for learned in policy.learned.values()] == ([2 * DEPTH] if rank == 0 else [0, 0])


def layer_dropout(model: nn.Module, rank: int, step: int) -> Tensor:
    """Each rank draws other blocks to drop; those that share weights drop what the first of them has drawn."""
    x = data(rank, step)
    if isinstance(model, Plain):
        data(0, step)
    return model(x).square().mean()


@row(each={"how": "each"}, pairs={"how": "pairs"})
def fsdp_layer_dropout_per_rank(rank: int, how: str) -> None:
    with each_replayed_once():
        found = train(shard(made(with_layer_dropout, rg.ReversibleSequence), how), layer_dropout, [rank])
    assert_same(found, in_one_process(with_layer_dropout, layer_dropout))


@row
def fsdp_root_layer_dropout_per_rank(rank: int) -> None:
    """Sharded as one unit, all weights are there: each rank drops its own blocks, if FSDP2 reduces unused ones too."""
    model = shard(made(with_layer_dropout, rg.ReversibleSequence), "root")
    assert isinstance(model, FSDPModule)
    model.set_reduce_scatter_unused_params(True)
    with each_replayed_once():
        found = train(model, mean_square, [rank])
    assert_same(found, in_one_process(with_layer_dropout, mean_square))


@row
def tensor_parallel_layer_dropout_per_rank(rank: int) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        x = data(0, step)
        if rank == 1:
            torch.manual_seed(step)
        return model(x).square().mean()

    model = parallelize(made(with_layer_dropout, rg.ReversibleSequence), init_device_mesh("cpu", (WORLD,)))
    with each_replayed_once():
        found = train(model, loss, [rank])
    assert_same(found, in_one_process(with_layer_dropout, loss, [0]))


class Drawing(rg.Reversible):
    """A program of six pairs, a `share` of which each call draws, from `generator` if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(pair) for pair in pairs(depth=6))
        self.generator: torch.Generator | None = None
        self.share = 0.5

    def updates(self) -> Iterator[rg.Update]:
        draws = torch.rand(len(self.blocks), generator=self.generator).tolist()
        for (f, g), draw in zip(self.blocks, draws, strict=True):
            if draw < self.share:
                yield rg.Update("a", f, "b")
                yield rg.Update("b", g, "a")


@row(each={"how": "each"}, pairs={"how": "pairs"})
def other_programs(rank: int, how: str) -> None:
    """What each rank draws for itself is refused on all of them, before their collectives meet crosswise. What they
    draw alike is right."""
    torch.manual_seed(0)
    model = Drawing()
    for f, g in model.blocks:
        for networks in [[f, g]] if how == "pairs" else [[f], [g]]:
            fully_shard(networks)
    fully_shard(model)

    def mean(rank: int, model: nn.Module) -> Tensor:
        x = data(rank, 0)
        out = model({"a": x, "b": x})
        return (out["a"] * out["b"]).mean()

    with pytest.raises(RuntimeError, match=r"ranks \[1\] run other updates than rank 0"):
        mean(rank, model)
    model.share = float(rank)  # none at all, and all
    with pytest.raises(RuntimeError, match=r"ranks \[1\] run other updates than rank 0"):
        mean(rank, model)
    model.share = 0.5
    model.generator = torch.Generator().manual_seed(1)
    mean(rank, model).backward()

    torch.manual_seed(0)
    plain = Drawing()
    plain.generator = torch.Generator()
    for other in range(WORLD):
        plain.generator.manual_seed(1)
        (mean(other, plain) / WORLD).backward()
    assert_same([gradients(model)], [gradients(plain)])
