"""What the two processes of test_distributed.py run: one function per row.

Every row trains a reversible network across two gloo processes and compares it with `Plain`, the same blocks written
out as a loop, in one process that sees the data of both ranks and keeps its activations. Processes and rows: see
processes.py.
"""

import contextlib
import itertools
import unittest.mock
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from processes import Rows
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import retrograd as rg

WORLD, DIM, DEPTH, STEPS = 2, 8, 3, 2

ROWS = Rows()
row = ROWS.row


# The networks


class Net(nn.Module):
    """An f or a g. It counts its calls in both phases, and logs what it is told to."""

    calls: ClassVar = {"forward": 0, "replay": 0}

    def __init__(self, dropout: float = 0.0, name: str = "", log: list[str] | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.dropout = nn.Dropout(dropout)
        self.name, self.log = name, log

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))

    def count(self) -> None:
        phase = rg.phase()
        if phase is not None:
            Net.calls["replay" if phase.replaying else "forward"] += 1
            if phase.replaying and self.log is not None:
                self.log.append(f"replay {self.name}")


class Reader(Net):
    """A network that also reads a context."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return super().forward(x * torch.sigmoid(self.read(context)))


class Bare(Net):
    """A network without a norm: every parameter of it is parallelized."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.norm = nn.Identity()  # type: ignore[assignment]


class Cast(nn.Module):
    """A network that computes in the dtype its weights have at the time."""

    def __init__(self, network: Net) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.to(self.network.up.weight.dtype))


class Counter(Net):
    """A network with a buffer that moves only while `counting`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count_of_calls", torch.zeros(()))
        self.counting = True

    def forward(self, x: Tensor) -> Tensor:
        if self.counting:
            self.count_of_calls += 1
        return super().forward(x)


class Shift(nn.Module):
    """A network whose backward needs nothing that was saved: its gradient is ready before anyone asks for a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Plain(nn.Module):
    """The reference: the loop that `rg.ReversibleSequence` stands for, with activations kept by autograd."""

    def __init__(self, blocks: Iterable[Iterable[nn.Module]], layer_dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(pair) for pair in blocks)
        self.layer_dropout = layer_dropout

    def run(self, streams: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        a, b = streams["a"], streams["b"]
        blocks = list(self.blocks)
        if self.layer_dropout:
            draws = torch.rand(len(blocks)).tolist()
            blocks = [block for block, draw in zip(blocks, draws, strict=True) if draw >= self.layer_dropout]
            blocks = blocks or [self.blocks[0]]
        for f, g in blocks:
            a = a + f(b, **(kwargs if isinstance(f, Reader) else {}))
            b = b + g(a, **(kwargs if isinstance(g, Reader) else {}))
        return {"a": a, "b": b}

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        out = self.run({"a": x, "b": x}, **kwargs)
        return (out["a"] + out["b"]) / 2


Sequence = type[Plain] | type[rg.ReversibleSequence]
Build = Callable[[Sequence], nn.Module]
Loss = Callable[[nn.Module, int, int], Tensor]
"""The loss of a model on the data of one rank at one step."""


def pairs(depth: int = DEPTH, **options: Any) -> list[tuple[nn.Module, nn.Module]]:
    return [(Net(**options), Net(**options)) for _ in range(depth)]


class Stack(nn.Module):
    """A sequence of blocks with an embedding before and a head after it."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__()
        self.embedding, self.net, self.head = nn.Embedding(11, DIM), sequence(pairs()), nn.Linear(DIM, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.net(self.embedding(tokens)))


class Twice(nn.Module):
    """A sequence that is used twice in one forward."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__()
        self.net = sequence(pairs())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.tanh(self.net(x)))


class EncoderDecoder(nn.Module):
    """A sequence whose networks read what an encoder made. The encoder counts its backward passes."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        self.net = sequence([(Reader(), Net()) for _ in range(DEPTH)])
        self.encoder_backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        context = self.encoder(x.mean(1, keepdim=True))
        context.register_hook(self.count)
        return self.net(x, context=context)

    def count(self, grad: Tensor) -> None:
        self.encoder_backwards += 1


class Streams(nn.Module):
    """A sequence that returns both its streams, for a loss that reads only some of them."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__()
        self.net = sequence(pairs())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.net.run({"a": x, "b": x})
        return out["a"], out["b"]


def blocks_of(model: nn.Module) -> list[nn.ModuleList]:
    (net,) = (module for module in model.modules() if isinstance(module, (Plain, rg.ReversibleSequence)))
    return list(net.blocks)  # type: ignore[arg-type]


# Training, and the comparison


def made(build: Build, sequence: Sequence) -> nn.Module:
    """A model with the same weights in every process and for either class."""
    torch.manual_seed(0)
    return build(sequence)


def data(rank: int, step: int) -> Tensor:
    """The batch of one rank at one step. The generator is left so that the ranks draw different dropout masks."""
    torch.manual_seed(1000 + 10 * step + rank)
    return torch.randn(2, 4, DIM)


def mean_square(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(data(rank, step)).square().mean()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter, gathered from all ranks; zero where there is none."""
    return {
        f"gradient of {name.removeprefix('module.')}": whole(torch.zeros_like(p) if p.grad is None else p.grad)
        for name, p in model.named_parameters()
    }


def train(model: nn.Module, loss: Loss, ranks: list[int]) -> list[dict[str, Tensor]]:
    """Steps of SGD on the mean loss of these ranks: the gradients of each step, and the weights at the end.

    More than one step, since DDP orders its buckets after the first, and FSDP2 must gather the weights again.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss(model, rank, step) for rank in ranks) / len(ranks)).backward()  # type: ignore[union-attr]
        left_whole = [name for name, p in model.named_parameters() if name in sharded and not isinstance(p, DTensor)]
        assert not left_whole, f"step {step}: not sharded again after the backward: {left_whole}"
        history.append(gradients(model))
        optimizer.step()
    history.append({name.removeprefix("module."): whole(p) for name, p in model.named_parameters()})
    return history


def in_one_process(build: Build, loss: Loss, ranks: Iterable[int] = range(WORLD)) -> list[dict[str, Tensor]]:
    """The reference: kept activations, no processes, the data of every rank."""
    history = train(made(build, Plain), loss, list(ranks))
    assert any(gradient.abs().max() > 1e-3 for gradient in history[0].values()), "the row compares zeros"
    return history


def largest_error(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> tuple[float, str]:
    """The largest difference, relative to the largest number of the same step, and where it is."""
    assert [step.keys() for step in found] == [step.keys() for step in expected]
    errors = []
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        scale = max(tensor.abs().max().item() for tensor in theirs.values())
        for name, tensor in theirs.items():
            errors.append(((mine[name] - tensor).abs().max().item() / scale, f"step {number}, {name}"))
    return max(errors)


def assert_same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]], error: float = 1e-9) -> None:
    seen, where = largest_error(found, expected)
    assert seen <= error, f"{where}: off by {seen:.1e}, allowed are {error:.0e}"


@contextlib.contextmanager
def each_replayed_once() -> Iterator[None]:
    """Every call of a network in a forward is repeated exactly once: the row has reversed, at the promised cost."""
    Net.calls.update(forward=0, replay=0)
    yield
    assert Net.calls["forward"] > 0
    assert Net.calls["replay"] == Net.calls["forward"], Net.calls


# What the rows train: builds, and losses


def sequence_of(**options: Any) -> Build:
    return lambda sequence: sequence(pairs(**options))


def shared(sequence: Sequence) -> nn.Module:
    f = Net()
    return sequence([(f, Net()) for _ in range(DEPTH)])


def with_layer_dropout(sequence: Sequence) -> nn.Module:
    return sequence(pairs(depth=6), layer_dropout=0.5)


def with_batch_norm(sequence: Sequence) -> nn.Module:
    def normed() -> nn.Module:
        return nn.Sequential(Net(), nn.Flatten(0, 1), nn.BatchNorm1d(DIM), nn.Unflatten(0, (2, 4)))

    return sequence([(normed(), Net()) for _ in range(DEPTH)])


def mean_square_same_seed(model: nn.Module, rank: int, step: int) -> Tensor:
    x = data(rank, step)
    torch.manual_seed(7 + step)  # every rank drops the same blocks
    return model(x).square().mean()


def cross_entropy(model: nn.Module, rank: int, step: int) -> Tensor:
    torch.manual_seed(1000 + 10 * step + rank)
    tokens = torch.randint(11, (2, 5))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def with_policy(policy: rg.Policy) -> Build:
    return lambda sequence: Plain(pairs()) if sequence is Plain else rg.ReversibleSequence(pairs(), policy=policy)


def with_shifts(sequence: Sequence) -> nn.Module:
    """The gradient of each g is ready, reduced and sharded before its replay gathers its weights once more."""
    return sequence([(Net(), Shift()) for _ in range(DEPTH)])


def one_stream_then_both(model: nn.Module, rank: int, step: int) -> Tensor:
    """The first step reads the stream that the last g does not write, the second step reads both."""
    a, b = model(data(rank, step))
    return a.square().mean() if step == 0 else (a * b).mean()


def two_forwards(model: nn.Module, rank: int, step: int) -> Tensor:
    return (model(data(rank, step)) - model(data(rank, step + 5))).square().mean()


# DDP


UNUSED, STATIC = {"find_unused_parameters": True}, {"static_graph": True}


@row(
    default={"build": sequence_of()},
    find_unused_parameters={"build": sequence_of(), "options": UNUSED},
    static_graph={"build": sequence_of(), "options": STATIC},
    shared_weights={"build": shared},
    shared_weights_find_unused={"build": shared, "options": UNUSED},
    shared_weights_static={"build": shared, "options": STATIC},
    used_twice={"build": Twice},
    used_twice_find_unused={"build": Twice, "options": UNUSED},
    used_twice_static={"build": Twice, "options": STATIC},
    encoder_context={"build": EncoderDecoder},
    encoder_context_find_unused={"build": EncoderDecoder, "options": UNUSED},
    encoder_context_static={"build": EncoderDecoder, "options": STATIC},
    layer_dropout={"build": with_layer_dropout, "options": UNUSED, "loss": mean_square_same_seed},
    layer_dropout_per_rank={"build": with_layer_dropout, "options": UNUSED},
    one_of_two_outputs={"build": Streams, "options": UNUSED, "loss": one_stream_then_both},
    two_forwards={"build": sequence_of(), "options": UNUSED, "loss": two_forwards},
    dropout_per_rank={"build": sequence_of(dropout=0.3)},
    bucket_views={"build": sequence_of(), "options": {"gradient_as_bucket_view": True}},
)
def ddp(rank: int, build: Build, loss: Loss = mean_square, options: dict[str, bool] | None = None) -> None:
    model = made(build, rg.ReversibleSequence)
    with each_replayed_once():
        found = train(DistributedDataParallel(model, **(options or {})), loss, [rank])
    assert_same(found, in_one_process(build, loss))
    if isinstance(model, EncoderDecoder):
        assert model.encoder_backwards == STEPS


@row
def ddp_autocast(rank: int) -> None:
    torch.set_default_dtype(torch.float32)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(data(rank, step))
        return out.float().square().mean()

    with each_replayed_once():
        found = train(DistributedDataParallel(made(sequence_of(), rg.ReversibleSequence)), loss, [rank])
    assert_same(found, in_one_process(sequence_of(), loss), error=2e-3)
    assert largest_error(found, in_one_process(sequence_of(), mean_square))[0] > 2e-3, "the row ran in full precision"


@row
def ddp_no_sync(rank: int) -> None:
    """Three forwards and backwards, of which only the last communicates."""
    model = DistributedDataParallel(made(sequence_of(dropout=0.3), rg.ReversibleSequence))
    with each_replayed_once():
        with model.no_sync():
            for step in range(2):
                mean_square(model, rank, step).backward()
        mean_square(model, rank, 2).backward()

    plain = made(sequence_of(dropout=0.3), Plain)
    for step in range(3):
        for other in range(WORLD):
            (mean_square(plain, other, step) / WORLD).backward()
    assert_same([gradients(model)], [gradients(plain)])


@row(default={}, stored_outputs={"policy": rg.Reverse(save="output")})
def ddp_each_network(rank: int, policy: rg.Policy = rg.Reverse()) -> None:
    """Every f and g is wrapped by itself, so that a replay runs the forward of DDP in the backward."""

    def build(sequence: Sequence) -> nn.Module:
        wrap = DistributedDataParallel if sequence is rg.ReversibleSequence else nn.Sequential
        return sequence([(wrap(f), wrap(g)) for f, g in pairs()])

    model = made(build, rg.ReversibleSequence)
    model.policy = policy
    with each_replayed_once():
        found = train(model, mean_square, [rank])
    found = [{name.replace(".module.", ".0."): tensor for name, tensor in step.items()} for step in found]
    assert_same(found, in_one_process(build, mean_square))


@row
def ddp_batch_norm(rank: int) -> None:
    """BatchNorm inside f: DDP broadcasts its buffers before each forward, and it counts each batch once."""
    build = with_batch_norm
    model = DistributedDataParallel(made(build, rg.ReversibleSequence))
    with each_replayed_once():
        found = train(model, mean_square, [rank])
    assert_same(found, in_one_process(build, mean_square))

    kept = DistributedDataParallel(made(build, Plain))
    train(kept, mean_square, [rank])
    for (name, mine), theirs in zip(model.module.named_buffers(), kept.module.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=f"buffer {name}: {mine}, expected {theirs}")


@row
def ddp_two_forwards_with_buffers(rank: int) -> None:
    """Two forwards before one backward, of networks with a buffer that autograd saves nowhere: DDP writes it anew."""

    class Offset(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.arange(DIM) / DIM)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.offset)

    def build(sequence: Sequence) -> nn.Module:
        return sequence([(Offset(), Offset()) for _ in range(DEPTH)])

    expected = in_one_process(build, two_forwards)
    kept = train(DistributedDataParallel(made(build, Plain), find_unused_parameters=True), two_forwards, [rank])
    assert_same(kept, expected)
    with each_replayed_once():
        model = DistributedDataParallel(made(build, rg.ReversibleSequence), find_unused_parameters=True)
        found = train(model, two_forwards, [rank])
    assert_same(found, expected)


@row
def ddp_gradient_order(rank: int) -> None:
    """Gradients are ready block by block from the last to the first, each before the next block is replayed.

    So DDP's first all-reduce starts while most of the backward is still to be done.
    """
    log: list[str] = []

    def build(sequence: Sequence) -> nn.Module:
        return sequence([(Net(name=f"{i}.0", log=log), Net(name=f"{i}.1", log=log)) for i in range(DEPTH)])

    model = made(build, rg.ReversibleSequence)
    names = {}
    for name, parameter in model.named_parameters():
        network = ".".join(name.split(".")[1:3])  # blocks.2.1.up.weight -> 2.1
        names[parameter] = network
        parameter.register_post_accumulate_grad_hook(lambda p: log.append(f"ready {names[p]}"))

    def communicate(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        log.extend(f"reduce {network}" for network in dict.fromkeys(names[p] for p in bucket.parameters()))
        summed = dist.all_reduce(bucket.buffer().div_(WORLD), async_op=True)
        assert summed is not None
        return summed.get_future().then(lambda future: future.value()[0])

    # About one network a bucket: its six parameters hold 296 numbers.
    parallel = DistributedDataParallel(model, bucket_cap_mb=296 * 8 / 2**20)
    parallel.register_comm_hook(None, communicate)
    expected = in_one_process(build, mean_square)
    log.clear()
    found = train(parallel, mean_square, [rank])
    assert_same(found, expected)

    second = log[len(log) // 2 :]
    networks = [f"{i}.{j}" for i in reversed(range(DEPTH)) for j in (1, 0)]
    order = [event for event in second if not event.startswith("reduce")]
    assert order == [event for name in networks for event in (f"replay {name}", *[f"ready {name}"] * 6)], second
    reduced = [event.split()[1] for event in second if event.startswith("reduce")]
    assert list(dict.fromkeys(reduced)) == networks, second
    assert second.index(f"reduce {networks[0]}") < second.index(f"replay {networks[2]}"), second


# FSDP2


def shard(model: nn.Module, how: str, **options: Any) -> nn.Module:
    """Apply `fully_shard` to the root only, to each f and g (with the root or without), or to each block as a pair."""
    if how == "each_without_root":
        options.setdefault("reshard_after_forward", True)  # each is a root, and roots do not by default
    for f, g in [] if how == "root" else blocks_of(model):
        if how == "pairs":
            fully_shard([f, g], **options)
        else:
            for network in (f, g):
                if not isinstance(network, FSDPModule):
                    fully_shard(network, **options)
    if how != "each_without_root":
        fully_shard(model, **options)
    return model


def sharded_training(
    rank: int, build: Build, sequence: Sequence, loss: Loss, how: str, **options: Any
) -> list[dict[str, Tensor]]:
    return train(shard(made(build, sequence), how, **options), loss, [rank])


HOWS = ("root", "each", "pairs", "each_without_root")
EVERY_HOW = {how: {"how": how} for how in HOWS}
RESHARD = {
    f"{how}-{'reshard' if again else 'stay'}": {"how": how, "reshard_after_forward": again}
    for how in HOWS
    for again in (True, False)
}
NETWORKS: dict[str, dict[str, Any]] = {
    "inside_a_model": {"build": Stack, "loss": cross_entropy},
    "shared_weights": {"build": shared},
    "used_twice": {"build": Twice},
    "two_forwards": {"build": sequence_of(), "loss": two_forwards},
    "one_of_two_outputs": {"build": Streams, "loss": one_stream_then_both},
    "encoder_context": {"build": EncoderDecoder},
    "dropout_per_rank": {"build": sequence_of(dropout=0.3)},
    "layer_dropout": {"build": with_layer_dropout, "loss": mean_square_same_seed},
    "batch_norm": {"build": with_batch_norm},
    "anchors": {"build": with_policy(rg.Reverse(anchor_every=2))},
    "stored_outputs": {"build": with_policy(rg.Reverse(save="output"))},
    "nothing_saved": {"build": with_shifts},
}


@row(
    **{name: {"build": sequence_of(), **options} for name, options in RESHARD.items()},
    **{
        f"{how}-{name}": {"how": how, **arguments}
        for name, arguments in NETWORKS.items()
        for how in HOWS
        if not (name == "shared_weights" and how == "pairs")  # FSDP2 refuses a module in two groups
        if not (name in ("inside_a_model", "encoder_context") and how == "each_without_root")  # part is not sharded
    },
)
def fsdp(rank: int, build: Build, how: str, loss: Loss = mean_square, **options: Any) -> None:
    with each_replayed_once():
        found = sharded_training(rank, build, rg.ReversibleSequence, loss, how, **options)
    assert_same(found, in_one_process(build, loss))


@row(**EVERY_HOW)
def fsdp_buffer_that_begins_to_move(rank: int, how: str) -> None:
    """A forward teaches the engine that a buffer does not move; in the next it does, and that call is kept for once."""

    def build(sequence: Sequence) -> nn.Module:
        return sequence([(Counter(), Net()) for _ in range(DEPTH)])

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        for f, _ in blocks_of(model):
            f.counting = False
        model(data(rank, step + 5))
        for f, _ in blocks_of(model):
            f.counting = True
        return mean_square(model, rank, step)

    found = sharded_training(rank, build, rg.ReversibleSequence, loss, how)
    assert_same(found, in_one_process(build, loss))


@row(**EVERY_HOW)
def fsdp_retain_graph(rank: int, how: str) -> None:
    """Two backward passes over one graph."""
    model = shard(made(sequence_of(), rg.ReversibleSequence), how)
    loss = mean_square(model, rank, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    once = in_one_process(sequence_of(), mean_square)[0]
    assert_same([gradients(model)], [{name: 2 * gradient for name, gradient in once.items()}])


@row(each={"how": "each", "most": 1}, pairs={"how": "pairs", "most": 2})
def fsdp_gathers_no_more(rank: int, how: str, most: int) -> None:
    """While a network runs, in either pass, no other than those of its own group has its weights gathered."""
    whole_networks: dict[bool, list[int]] = {False: [], True: []}

    def look(network: nn.Module, inputs: Any) -> None:
        phase = rg.phase()
        assert phase is not None
        whole_networks[phase.replaying].append(sum(not isinstance(each.up.weight, DTensor) for each in networks))

    model = shard(made(sequence_of(), rg.ReversibleSequence), how)
    networks = [network for pair in blocks_of(model) for network in pair]
    for network in networks:
        network.register_forward_pre_hook(look)
    mean_square(model, rank, 0).backward()
    assert whole_networks == {phase: [most] * 2 * DEPTH for phase in (False, True)}


@row(each={"how": "each", "size": 1}, pairs={"how": "pairs", "size": 2})
def fsdp_gradient_order(rank: int, how: str, size: int) -> None:
    """The gradients of a network, or of a pair, are reduced before the next one is replayed."""
    log: list[str] = []

    def build(sequence: Sequence) -> nn.Module:
        return sequence([(Net(name=f"{i}.0", log=log), Net(name=f"{i}.1", log=log)) for i in range(DEPTH)])

    def logged(event: str, collective: Callable[..., Any]) -> Any:
        return unittest.mock.patch.object(
            dist, collective.__name__, lambda *args, **kwargs: (log.append(event), collective(*args, **kwargs))[1]
        )

    model = shard(made(build, rg.ReversibleSequence), how)
    with logged("reduce", dist.reduce_scatter_single), logged("gather", dist.all_gather_single):
        found = train(model, mean_square, [rank])
    assert_same(found, in_one_process(build, mean_square))
    names = [f"replay {i}.{j}" for i in reversed(range(DEPTH)) for j in (1, 0)]
    step = [event for k, name in enumerate(names, 1) for event in (name, *["reduce"] * (k % size == 0))]
    assert [event for event in log if event != "gather"] == step * STEPS
    assert log.count("gather") == 2 * STEPS * len(names) // size  # once for a forward, once for replay and backward


@row
def fsdp_prefetch(rank: int) -> None:
    """Each network tells FSDP2 to gather the next one already, in both directions."""
    model = shard(made(sequence_of(), rg.ReversibleSequence), "each")
    networks: list[Any] = [network for pair in blocks_of(model) for network in pair]
    for network, following in itertools.pairwise(networks):
        network.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([network])
    with each_replayed_once():
        found = train(model, mean_square, [rank])
    assert_same(found, in_one_process(sequence_of(), mean_square))


@row(**{how: {"how": how} for how in ("root", "each", "pairs")})
def fsdp_accumulation(rank: int, how: str) -> None:
    """Two backwards, of which the first does not reduce."""
    model = shard(made(sequence_of(), rg.ReversibleSequence), how)
    assert isinstance(model, FSDPModule)
    with each_replayed_once():
        for step in range(2):
            model.set_requires_gradient_sync(step == 1)
            mean_square(model, rank, step).backward()

    plain = made(sequence_of(), Plain)
    for step in range(2):
        for other in range(WORLD):
            (mean_square(plain, other, step) / WORLD).backward()
    assert_same([gradients(model)], [gradients(plain)])


@row(
    **{f"{name}-{cast}": {"cast": cast, **options} for name, options in RESHARD.items() for cast in ("fsdp", "network")}
)
def fsdp_mixed_precision(rank: int, how: str, cast: str, **options: Any) -> None:
    """bf16 weights, gradients reduced in float32, inputs cast by FSDP2 or by each network: as kept activations do."""
    torch.set_default_dtype(torch.float32)
    options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=cast == "fsdp")

    def build(sequence: Sequence) -> nn.Module:
        return sequence(pairs() if cast == "fsdp" else [(Cast(f), Cast(g)) for f, g in pairs()])

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(data(rank, step)).float().square().mean()

    with each_replayed_once():
        found = sharded_training(rank, build, rg.ReversibleSequence, loss, how, **options)
    kept = sharded_training(rank, build, Plain, loss, how, **options)
    # A root that casts makes the streams bf16: what is reconstructed is then as rough as they are.
    rough = cast == "fsdp" and how != "each_without_root"
    assert_same(found, kept, error=3e-2 if rough else 3e-3)


def change_registered(model: nn.Module, sharded: list[nn.Parameter]) -> None:
    """Change the parameters that the model shows now: sharded after a reshard, otherwise whole."""
    for parameter in model.parameters():
        parameter.mul_(1.5)


def change_sharded(model: nn.Module, sharded: list[nn.Parameter]) -> None:
    """Change the sharded parameters, as an optimizer does."""
    for parameter in sharded:
        parameter.mul_(1.5)


def optimizer_step(model: nn.Module, sharded: list[nn.Parameter]) -> None:
    for parameter in sharded:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(sharded, lr=0.5)
    optimizer.step()
    optimizer.zero_grad()


@row(
    **{
        f"{how}-{'reshard' if again else 'stay'}-{change.__name__}": {"how": how, "again": again, "change": change}
        for how in HOWS
        for again in (True, False)
        for change in (change_registered, change_sharded, optimizer_step)
        # FSDP2 on the root alone refills the whole weights from changed shards without a trace: kept activations are
        # then silently wrong, and so are reversed ones.
        if (how, again) != ("root", True)
    },
)
def fsdp_changed_weights(rank: int, how: str, again: bool, change: Callable[..., None]) -> None:
    """Weights changed in place between the forward and the backward: an error, or what kept activations give."""

    def outcome(sequence: Sequence) -> list[dict[str, Tensor]] | RuntimeError:
        model = shard(made(sequence_of(), sequence), how, reshard_after_forward=again)
        sharded = list(model.parameters())
        loss = mean_square(model, rank, 0)
        with torch.no_grad():
            change(model, sharded)
        try:
            loss.backward()
        except RuntimeError as error:
            return error
        return [gradients(model)]

    kept, found = outcome(Plain), outcome(rg.ReversibleSequence)
    if isinstance(found, RuntimeError):
        assert "changed in place" in str(found) or "modified by an inplace operation" in str(found), found
    else:
        assert not isinstance(kept, RuntimeError), f"kept activations raise ({kept}), reversed ones do not"
        assert_same(found, kept)


# Tensor parallel


def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
    for pair in blocks_of(model):
        for network in pair:
            parallelize_module(network, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def on_one_batch(model: nn.Module, rank: int, step: int) -> Tensor:
    return mean_square(model, 0, step)


@row
def tensor_parallel(rank: int) -> None:
    model = parallelize(made(sequence_of(), rg.ReversibleSequence), init_device_mesh("cpu", (WORLD,)))
    with each_replayed_once():
        found = train(model, on_one_batch, [rank])
    assert_same(found, in_one_process(sequence_of(), on_one_batch, [0]))


@row
def tensor_parallel_dropout(rank: int) -> None:
    build = sequence_of(dropout=0.3)
    model = parallelize(made(build, rg.ReversibleSequence), init_device_mesh("cpu", (WORLD,)))
    with each_replayed_once():
        found = train(model, on_one_batch, [rank])
    assert_same(found, in_one_process(build, on_one_batch, [0]))


@row(**EVERY_HOW)
def tensor_parallel_and_fsdp(rank: int, how: str) -> None:
    """Both on one mesh of two dimensions: two ranks share the tensors, and each group of one shards what it has."""
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("data", "tensor"))

    def build(sequence: Sequence) -> nn.Module:
        return sequence([(Bare(), Bare()) for _ in range(DEPTH)])

    model = shard(parallelize(made(build, rg.ReversibleSequence), mesh["tensor"]), how, mesh=mesh["data"])
    with each_replayed_once():
        found = train(model, on_one_batch, [rank])
    assert_same(found, in_one_process(build, on_one_batch, [0]))


@row
def sequence_parallel(rank: int) -> None:
    """Streams are DTensors, sharded along the sequence; each network gathers its input and scatters its output."""

    def build(sequence: Sequence) -> nn.Module:
        return sequence([(Bare(), Bare()) for _ in range(DEPTH)])

    mesh = init_device_mesh("cpu", (WORLD,))
    model = made(build, rg.ReversibleSequence)
    down = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    for network in (network for pair in blocks_of(model) for network in pair):
        parallelize_module(network, mesh, {"up": ColwiseParallel(input_layouts=Shard(1)), "down": down})

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(distribute_tensor(data(0, step), mesh, [Shard(1)])).square().mean().full_tensor()

    with each_replayed_once():
        found = train(model, loss, [rank])
    assert_same(found, in_one_process(build, on_one_batch, [0]))


@row
def sharded_streams(rank: int) -> None:
    """The streams themselves are DTensors, each rank holding its part of the sequence."""
    mesh = init_device_mesh("cpu", (WORLD,))
    model = made(sequence_of(), rg.ReversibleSequence)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()])))

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        out = model(distribute_tensor(data(0, step), mesh, [Shard(1)]))
        return out.square().mean().full_tensor()

    with each_replayed_once():
        found = train(model, loss, [rank])
    assert_same(found, in_one_process(sequence_of(), on_one_batch, [0]))


# Compiled networks


@row(ddp={"wrapper": "ddp"}, fsdp={"wrapper": "fsdp"}, tensor_parallel={"wrapper": "tensor_parallel"})
def compiled(rank: int, wrapper: str) -> None:
    """Each f and g is compiled: after it is parallelized, before it is sharded or wrapped."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it

    def build(sequence: Sequence) -> nn.Module:
        return sequence([(network(), network()) for _ in range(2)])

    def network() -> nn.Module:  # without the counters of Net, which would be compiled anew whenever they change
        return nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM))

    model, loss, ranks = made(build, rg.ReversibleSequence), mean_square, [*range(WORLD)]
    for each in (each for pair in blocks_of(model) for each in pair):
        if wrapper == "tensor_parallel":
            parallelize_module(
                each, init_device_mesh("cpu", (WORLD,)), {"1": ColwiseParallel(), "3": RowwiseParallel()}
            )
            loss, ranks = on_one_batch, [0]
        each.compile(backend="aot_eager")
    if wrapper != "tensor_parallel":
        model = DistributedDataParallel(model) if wrapper == "ddp" else shard(model, "pairs")
    assert_same(train(model, loss, [rank]), in_one_process(build, loss, ranks))


# Exact streams


def to_the_bit(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Reversed and kept gradients are equal to the bit on every rank, whatever the wrapper does with them."""

    def found(policy: rg.Policy) -> list[Tensor]:
        torch.manual_seed(0)
        blocks = [(network(), network()) for _ in range(12)]
        model = wrap(rg.ReversibleSequence(blocks, join=rg.ExactAdd(), policy=policy).float())
        torch.manual_seed(1 + rank)
        x = torch.randn(4, 8, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        return [getattr(p.grad, "full_tensor", lambda grad=p.grad: grad)() for p in model.parameters()]

    def network() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Dropout(0.1), nn.GELU(), nn.Linear(16, 8))

    assert all(torch.equal(a, b) for a, b in zip(found(rg.Reverse()), found(rg.Keep()), strict=True))


@row
def exact_under_ddp(rank: int) -> None:
    to_the_bit(rank, DistributedDataParallel)


@row
def exact_under_fsdp(rank: int) -> None:
    def shard_each(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            fully_shard([*block])
        return fully_shard(model)

    to_the_bit(rank, shard_each)
