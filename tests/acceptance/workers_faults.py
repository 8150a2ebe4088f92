"""What the two processes of test_faults.py run: steps in which something goes wrong on one rank or on all.

Every rank gets an error that says what happened and where, none hangs, and what comes after is right.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from processes import TIMEOUT, Rows
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from workers import (
    WORLD,
    Net,
    Sequence,
    assert_same,
    data,
    gradients,
    in_one_process,
    made,
    mean_square,
    pairs,
    shard,
    train,
)

import retrograd as rg
import train_distributed as example

ROWS = Rows(breaking=True)
row = ROWS.row


class Faulty(Net):
    """A network that runs out of memory in one of its phases, while `fault` says so."""

    fault: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        phase = rg.phase()
        if phase is not None and Faulty.fault == ("replay" if phase.replaying else "forward"):
            raise torch.OutOfMemoryError("out of memory (simulated)")
        return super().forward(x)


@contextlib.contextmanager
def fault(where: str | None) -> Iterator[None]:
    Faulty.fault = where
    try:
        yield
    finally:
        Faulty.fault = None


def build(sequence: Sequence) -> nn.Module:
    blocks = pairs(dropout=0.3)
    blocks[1] = (Faulty(0.3), Net(0.3))
    return sequence(blocks)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp_each": lambda model: shard(model, "each"),
    "fsdp_pairs": lambda model: shard(model, "pairs"),
}
EVERY_FAULT = {
    f"{wrapper}-{where}": {"wrapper": wrapper, "where": where}
    for wrapper in WRAPPERS
    for where in ("forward", "replay")
}


def meet(rank: int, meeting: str, timeout: timedelta = TIMEOUT) -> dist.Store:
    """A new process group in place of the old one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(meeting, WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
    return store


def failed_step(model: nn.Module, rank: int, where: str | None) -> None:
    """A step that fails here, or elsewhere. After its backward, the random numbers are those of before."""
    with fault(where):
        loss = mean_square(model, rank, 7)
        drawn = torch.get_rng_state()
        try:
            loss.backward()
        finally:
            assert torch.equal(torch.get_rng_state(), drawn)


@row(
    **{
        f"{wrapper}-{where}": {"wrapper": wrapper, "where": where}
        for wrapper, where in (("ddp", "replay"), ("fsdp_pairs", "forward"), ("fsdp_pairs", "replay"))
    }
)
def on_one_rank(rank: int, wrapper: str, where: str, meeting: str) -> None:
    """Rank 1 fails; rank 0 waits for it no longer than its time-out, and is told why. A new group goes on."""
    store = meet(rank, f"{meeting}-first", timedelta(seconds=2))
    model = WRAPPERS[wrapper](made(build, rg.ReversibleSequence))
    error = caught(store, rank, functools.partial(failed_step, model, rank, where if rank == 1 else None))
    if rank == 1:
        assert type(error) is torch.OutOfMemoryError
        said = "replayed in the backward" if where == "replay" else "forward"
        name = "FSDPFaulty" if isinstance(model, FSDPModule) else "Faulty"
        assert error.__notes__ == [f"retrograd: in update 2 (target 'a', fn {name}), {said}"]
    else:
        assert str(error) == "rank 0 stops, because rank 1 failed with OutOfMemoryError: out of memory (simulated)"
        assert "Timed out waiting 2000ms" in str(error.__cause__)
    meet(rank, f"{meeting}-second")
    module = getattr(model, "module", model)
    del model, error  # DDP's hooks live as long as it does
    goes_on(module, rank)


def caught(store: dist.Store, rank: int, step: Callable[[], None]) -> Exception:
    try:
        with example.failing_together(store, rank):
            step()
    except Exception as error:
        return error
    raise AssertionError("no error")


def goes_on(module: nn.Module, rank: int) -> None:
    """DDP takes the same module again; what FSDP2 has sharded over a lost group is built anew."""
    if isinstance(module, FSDPModule):
        again = shard(made(build, rg.ReversibleSequence), "pairs")
    else:
        module.zero_grad()
        again = DistributedDataParallel(module)
    assert_same(train(again, mean_square, [rank]), in_one_process(build, mean_square))


@row(**EVERY_FAULT)
def on_every_rank(rank: int, wrapper: str, where: str, meeting: str) -> None:
    """All ranks fail at the same place. The group is whole, and the same sharded model goes on."""
    model = WRAPPERS[wrapper](made(build, rg.ReversibleSequence))
    with pytest.raises(torch.OutOfMemoryError):
        failed_step(model, rank, where)
    if isinstance(model, FSDPModule):
        model.zero_grad()  # of the whole weights, which a failed backward leaves in place
        model.reset_iter_state()
        model.zero_grad()
        assert_same(train(model, mean_square, [rank]), in_one_process(build, mean_square))
    else:
        module = model.module
        del model
        goes_on(module, rank)


@row(**{wrapper: {"wrapper": wrapper} for wrapper in WRAPPERS})
def nan_in_a_microbatch(rank: int, wrapper: str, meeting: str) -> None:
    """One of two microbatches of one rank is not a number: then no gradient is, on any rank, until they are dropped."""
    model = WRAPPERS[wrapper](made(build, rg.ReversibleSequence))
    for part in range(2):
        x = data(rank, part)
        x[0, 0, 0] = float("nan") if (rank, part) == (1, 0) else 0.0
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(part == 1)
        with model.no_sync() if isinstance(model, DistributedDataParallel) and part == 0 else contextlib.nullcontext():
            model(x).square().mean().backward()
    assert all(gradient.isnan().any() for gradient in gradients(model).values())
    model.zero_grad()
    assert_same(train(model, mean_square, [rank]), in_one_process(build, mean_square))
