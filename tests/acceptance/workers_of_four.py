"""What the four processes of test_distributed.py run: rows as in workers.py, and meshes of two dimensions."""

from typing import Any

import torch
import torch.distributed as dist
from processes import Rows
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from workers import (
    DEPTH,
    Bare,
    Net,
    Plain,
    Sequence,
    assert_same,
    blocks_of,
    data,
    each_replayed_once,
    in_one_process,
    made,
    mean_square,
    pairs,
    parallelize,
    sequence_of,
    shard,
    train,
)

import retrograd as rg
from retrograd.auto import Learned
from retrograd.measure import LiveBytes

WORLD = 4

ROWS = Rows()
row = ROWS.row


def mesh_of(first: str, second: str) -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=(first, second))


@row
def ddp(rank: int) -> None:
    with each_replayed_once():
        found = train(
            DistributedDataParallel(made(sequence_of(dropout=0.3), rg.ReversibleSequence)), mean_square, [rank]
        )
    assert_same(found, in_one_process(sequence_of(dropout=0.3), mean_square, range(WORLD)))


@row(each={"how": "each"}, pairs={"how": "pairs"})
def fsdp(rank: int, how: str) -> None:
    with each_replayed_once():
        found = train(shard(made(sequence_of(dropout=0.3), rg.ReversibleSequence), how), mean_square, [rank])
    assert_same(found, in_one_process(sequence_of(dropout=0.3), mean_square, range(WORLD)))


@row(each={"how": "each"}, pairs={"how": "pairs"})
def fsdp_of_replicas(rank: int, how: str) -> None:
    """Weights sharded over two ranks, and that twice."""
    mesh = mesh_of("replicas", "shards")
    with each_replayed_once():
        found = train(shard(made(sequence_of(), rg.ReversibleSequence), how, mesh=mesh), mean_square, [rank])
    assert_same(found, in_one_process(sequence_of(), mean_square, range(WORLD)))


def bare(dropout: float = 0.0) -> Any:
    """Blocks of which every parameter is parallelized."""

    def build(sequence: Sequence) -> nn.Module:
        return sequence([(Bare(dropout), Bare(dropout)) for _ in range(DEPTH)])

    return build


@row(
    **{
        f"{how}-{'reshard' if again else 'stay'}": {"how": how, "reshard_after_forward": again}
        for how in ("each", "pairs")
        for again in (True, False)
    },
    dropout={"how": "pairs", "dropout": 0.3},
)
def fsdp_and_tensor_parallel(rank: int, how: str, dropout: float = 0.0, **options: Any) -> None:
    """Two ranks share the tensors of each network, and two such groups shard what they have and share the data."""
    mesh = mesh_of("data", "tensor")
    model = parallelize(made(bare(dropout), rg.ReversibleSequence), mesh["tensor"])
    model = shard(model, how, mesh=mesh["data"], **options)
    with each_replayed_once():
        found = train(model, mean_square, [mesh.get_local_rank("data")])
    assert_same(found, in_one_process(bare(dropout), mean_square, range(2)))


@row
def auto_agrees(rank: int) -> None:
    """Every rank learns the same sizes and keeps the same updates: some, but not all."""
    mesh = mesh_of("data", "tensor")

    def trained(policy: rg.Auto) -> Learned:
        model = made(bare(), rg.ReversibleSequence)
        model.policy = policy
        shard(parallelize(model, mesh["tensor"]), "pairs", mesh=mesh["data"])
        Net.calls.update(forward=0, replay=0)
        found = train(model, mean_square, [mesh.get_local_rank("data")])
        assert_same(found, in_one_process(bare(), mean_square, range(2)))
        (learned,) = policy.learned.values()
        return learned

    roomy = trained(rg.Auto(budget="1GiB"))
    learned = trained(rg.Auto(budget=roomy.need(roomy.kept_bytes // 2)))
    said: list[Any] = [None] * WORLD
    dist.all_gather_object(said, (learned.kept, sorted(learned.saved.values())))
    assert said == [said[0]] * WORLD, said
    assert 0 < learned.kept < roomy.kept == 2 * DEPTH
    assert Net.calls["replay"] == 2 * DEPTH + 2 * DEPTH - learned.kept  # the first step learns


@row
def layer_dropout_per_rank(rank: int) -> None:
    """All four drop what the first has drawn."""

    def build(sequence: Sequence) -> nn.Module:
        return sequence([(Bare(), Bare()) for _ in range(6)], layer_dropout=0.5)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        x = data(rank // 2, step)
        torch.manual_seed(step if isinstance(model, Plain) else step + 10 * rank)
        return model(x).square().mean()

    mesh = mesh_of("data", "tensor")
    model = shard(parallelize(made(build, rg.ReversibleSequence), mesh["tensor"]), "pairs", mesh=mesh["data"])
    with each_replayed_once():
        found = train(model, loss, [rank])
    assert_same(found, in_one_process(build, loss, [0, 2]))


@row
def sharded_memory(rank: int) -> None:
    """Each rank holds a quarter of weights, gradients and moments; its activations do not grow with depth."""

    def peak(depth: int, sequence: Any) -> int:
        model = sequence(pairs(depth))
        for f, g in blocks_of(model):
            fully_shard([f, g])
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters())
        mean_square(model, rank, 0).backward()
        optimizer.step()
        held = list(model.parameters()) + [p.grad for p in model.parameters()]
        held += [m for state in optimizer.state.values() for m in state.values() if m.dim()]
        assert len(held) == 4 * 12 * depth
        assert all(isinstance(tensor, DTensor) for tensor in held)
        assert sum(tensor.to_local().nbytes for tensor in held) == 4 * 2 * depth * 296 * 8 // WORLD
        # What FSDP2 gathers it gathers into storages that are there since the first step: only activations are new.
        # That it gathers one block at a time is fsdp_gathers_no_more in workers.py.
        x = data(rank, 1)
        with LiveBytes() as memory:
            model(x).square().mean().backward()
        return memory.peak

    assert peak(3, rg.ReversibleSequence) == peak(12, rg.ReversibleSequence)
    assert peak(12, Plain) > 2 * peak(3, Plain)  # the same count sees kept activations grow
