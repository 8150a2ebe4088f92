"""Train a reversible language model on several GPUs, or on the cores of a CPU, with FSDP2: weights, gradients and
optimizer are divided among the ranks, activations are reversed or kept as the memory allows.

    torchrun --nproc-per-node=2 examples/train_distributed.py --steps 20
    torchrun --nproc-per-node=8 --max-restarts=3 examples/train_distributed.py --checkpoints run \\
        --depth 48 --width 1024 --length 2048 --batch 64 --steps 10000 --budget 20GiB

The text is the source of Python's standard library. With --checkpoints the run goes on from the newest checkpoint in
that directory, on any number of ranks, and so survives a rank that dies: torchrun starts all of them again. A step
depends on its number alone (data, dropout), so what is lost is computed again as it was; to the bit with --exact, since
then it makes no difference which updates are kept and which are reversed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

import retrograd as rg
from retrograd.models import LanguageModel
from training import Progress


def build(options: argparse.Namespace, device: torch.device) -> LanguageModel:
    """The model, sharded: each pair of networks is one unit that FSDP2 gathers and frees, the rest is another."""
    torch.manual_seed(options.seed)  # every rank draws the same weights, then keeps its part of them
    join = rg.ExactAdd() if options.exact else rg.Add()
    model = LanguageModel(
        options.depth,
        options.width,
        length=options.length,
        dropout=options.dropout,
        policy=rg.Auto(budget=options.budget),
        join=join,
    ).to(device)
    # The networks compute in bf16. The root does not, so the streams stay in float32: they are what is reconstructed.
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for f, g in model.blocks.pairs():
        fully_shard([f, g], mp_policy=half)
    fully_shard(model)
    register_fsdp_forward_method(model, "loss")  # FSDP2 gathers around forward(); so it must around loss()
    return model


def corpus() -> Tensor:
    """The source of Python's standard library, as bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(data: Tensor, step: int, options: argparse.Namespace) -> Tensor:
    """This rank's part of the batch of a step: (batch / ranks, length + 1). The whole batch is the same on any number
    of ranks."""
    drawn = torch.Generator().manual_seed(options.seed + step)
    starts = torch.randint(len(data) - options.length, (options.batch,), generator=drawn)
    mine = starts[dist.get_rank() :: dist.get_world_size()]
    return data[mine[:, None] + torch.arange(options.length + 1)].long()


class Checkpoints:
    """A directory of checkpoints, `step-000000020` and so on. What has such a name is whole: it is written under
    another, and renamed when all of it is on disk. The last two are kept."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.directory, self.shape = options.checkpoints, {"depth": options.depth, "width": options.width}
        self.directory.mkdir(parents=True, exist_ok=True)

    def all(self) -> list[Path]:
        return sorted(self.directory.glob("step-*"))

    def save(self, step: int, model: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
        """Every rank writes its part."""
        partial = self.directory / f"partial-{step}"
        if dist.get_rank() == 0:
            for left in self.directory.glob("partial-*"):  # by a run that was killed
                shutil.rmtree(left)
        dist.barrier()
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=partial)  # and waits for the disk
        if dist.get_rank() == 0:
            (partial / "shape.json").write_text(json.dumps(self.shape))
            flush(partial / "shape.json")
            flush(partial)
            partial.rename(self.directory / f"step-{step:09d}")
            flush(self.directory)
            for old in self.all()[:-2]:
                shutil.rmtree(old.rename(self.directory / f"partial-{old.name}"))
        dist.barrier()

    def load(self, model: LanguageModel, optimizer: torch.optim.Optimizer) -> int:
        """Fill model and optimizer from the newest checkpoint, if there is one. The step that comes next."""
        dist.barrier()
        if not (found := self.all()):
            return 0
        if (written := json.loads((found[-1] / "shape.json").read_text())) != self.shape:
            raise ValueError(f"{found[-1]} is of a model with {written}, not {self.shape}; give another --checkpoints")
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=found[-1])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        return int(found[-1].name.removeprefix("step-"))

    def log(self, step: int, loss: float) -> None:
        if dist.get_rank() == 0:
            with (self.directory / "log.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss}) + "\n")


def flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def train_step(model: LanguageModel, optimizer: torch.optim.Optimizer, tokens: Tensor, step: int) -> float:
    """One step; the mean loss of all ranks."""
    loss = model.loss(tokens)
    losses = torch.zeros(dist.get_world_size(), device=loss.device)
    losses[dist.get_rank()] = loss.detach()
    dist.all_reduce(losses)
    # Every rank sees all losses before its backward, so that none goes into it alone.
    if bad := [f"{value} on rank {rank}" for rank, value in enumerate(losses.tolist()) if not math.isfinite(value)]:
        raise FloatingPointError(f"step {step}: the loss is {', '.join(bad)}; no weight was changed")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return losses.mean().item()


@contextmanager
def failing_together(store: dist.Store, rank: int) -> Iterator[None]:
    """An error on one rank leaves the others waiting for it until their time-out, or until its process is gone. Both
    are errors that say nothing: let them name the rank that failed first, and why."""
    try:
        yield
    except Exception as error:
        first = store.compare_set("failure", "", f"rank {rank} failed with {type(error).__name__}: {error}").decode()
        if first.startswith(f"rank {rank} "):
            raise
        raise RuntimeError(f"rank {rank} stops, because {first}") from error


def train(options: argparse.Namespace, device: torch.device) -> LanguageModel:
    """Train to the last step, from the newest checkpoint if there is one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, data = build(options, device), corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    checkpoints = None if options.checkpoints is None else Checkpoints(options)
    done = 0 if checkpoints is None else checkpoints.load(model, optimizer)
    if done and rank == 0:
        print(f"resumes at step {done}")
    progress = Progress(max(options.steps - done, 0), "training") if rank == 0 else range(options.steps - done)
    for step in (done + further for further in progress):
        torch.manual_seed(options.seed + step * ranks + rank)  # for dropout: other masks on each rank
        loss = train_step(model, optimizer, batch(data, step, options).to(device), step)
        if isinstance(progress, Progress):
            progress.note(f"{loss / math.log(2):.3f} bits per byte")
        if checkpoints is not None:
            checkpoints.log(step, loss)
            if (step + 1) % options.every == 0 or step + 1 == options.steps:
                checkpoints.save(step + 1, model, optimizer)
    if rank == 0:
        print(model.blocks.policy.explain())
    return model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whole = [("steps", 20), ("depth", 8), ("width", 128), ("length", 128), ("batch", 8), ("every", 10), ("seed", 0)]
    for name, default in whole:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=2e-3, help="the learning rate")
    parser.add_argument("--budget", default="16MiB", help="for the activations of each rank, such as 20GiB")
    parser.add_argument("--exact", action="store_true", help="reversal to the bit")
    parser.add_argument("--checkpoints", type=Path, help="a directory that all ranks see; one every --every steps")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node=2 examples/train_distributed.py")
    for name in ("steps", "depth", "width", "length", "batch", "every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more, not {getattr(options, name)}")
    if options.batch % (ranks := int(os.environ["WORLD_SIZE"])):
        parser.error(f"--batch {options.batch} cannot be divided among {ranks} ranks; give a multiple of {ranks}")
    try:
        rg.Auto(budget=options.budget)
        with torch.device("meta"):
            LanguageModel(1, options.width, dropout=options.dropout)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> None:
    options = parse()
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    store, rank, ranks = next(dist.rendezvous("env://"))
    # torchrun's store outlives a restart, and in it the addresses of ranks that are gone.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
    with failing_together(store, rank):
        train(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
