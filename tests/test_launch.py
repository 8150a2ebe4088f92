"""Replays as CUDA graphs, with a stand-in for them on the CPU (graphs.py); the real ones are in test_cuda.py."""

import contextlib
import copy
import gc
import pickle
import sys
import types
import warnings
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import retrograd as rg
from graphs import Arena, equal, on_cpu, ways
from retrograd import launch, remember
from retrograd.capture import Rehearsal, under_way
from retrograd.entry import Entry

WIDTH = 8
GRAPHED = rg.Reverse(graphed=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.out(functional.scaled_dot_product_attention(q, k, v))


def feed_forward(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout))


def network(depth: int = 3, dropout: float = 0.0, policy: rg.Policy = GRAPHED, **options) -> rg.ReversibleSequence:
    torch.manual_seed(0)
    return rg.ReversibleSequence([(Attention(), feed_forward(dropout)) for _ in range(depth)], policy=policy, **options)


def tokens(length: int = 4) -> torch.Tensor:
    return torch.randn(2, length, WIDTH, requires_grad=True)


def gradients(net, x, seed: int = 1, autocast: bool = False, **options) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = net(x).float().sin().sum()
    return torch.autograd.grad(loss, [x, *net.parameters()], allow_unused=True, **options)


def reversed_gradients(net, x, **options) -> list[torch.Tensor]:
    """Those without graphs."""
    policy, net.policy = net.policy, rg.Reverse(anchor_every=net.policy.anchor_every)
    try:
        return gradients(net, x, **options)
    finally:
        net.policy = policy


@pytest.fixture
def arena(monkeypatch) -> Arena:
    return on_cpu(monkeypatch)


@pytest.fixture
def replays(monkeypatch) -> list[str]:
    """The updates that were replayed without a graph."""
    seen = []
    replay = Entry.replay

    def noted(self, *args, **kwargs):
        seen.append(str(self))
        return replay(self, *args, **kwargs)

    monkeypatch.setattr(Entry, "replay", noted)
    return seen


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("options", [{}, {"join": rg.ExactAdd()}, {"join": rg.Scale(1.0, 0.5)}], ids=str)
def test_training_is_that_without_graphs(arena, replays, dropout, autocast, options):
    net = network(dropout=dropout, **options)
    plain = copy.deepcopy(net)
    plain.policy = rg.Reverse()
    for step in range(5):
        x = tokens()
        gradients_of = [gradients(each, x, step, autocast) for each in (net, plain)]
        assert equal(*gradients_of)
        with torch.no_grad():
            for weight, gradient in zip(net.parameters(), gradients_of[0][1:], strict=True):
                weight -= 0.1 * gradient
            for weight, other in zip(plain.parameters(), net.parameters(), strict=True):
                weight.copy_(other)
    assert arena.recorded == 6
    assert arena.launched == 6 + 3 * 6  # once to compare, and once in each of the last three steps
    assert len(replays) == 2 * 6 + 5 * 6  # the first two steps, and those of the other network


def test_the_first_slot_asked_for_launches_and_the_rest_is_there(arena):
    """Calls of Python in a backward pass, per update: what hooks cost even if nothing is replayed."""
    net, x = network(depth=20), tokens()
    for _ in range(3):
        gradients(net, x, autocast=True)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(x).sum()
    arena_replay, calls = [], 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call" and "retrograd" in frame.f_code.co_filename

    launched = [way.launch for way in ways(net)]
    for each in launched:
        arena_replay.append(each.graph.replay)
        each.graph.replay = lambda: None
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(count)
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
    assert len(launched) == 40
    assert 10 < calls / 40 < 45


@pytest.mark.parametrize("anchor_every", [1, 2, 4])
def test_anchors(arena, anchor_every):
    net, x = network(policy=rg.Reverse(anchor_every=anchor_every, graphed=True)), tokens()
    for step in range(4):
        assert equal(gradients(net, x, step), reversed_gradients(net, x, seed=step))
    assert arena.launched


def test_drift_is_watched(arena):
    net, x = network(policy=rg.Reverse(watch=1e-3, graphed=True)), tokens()
    for _ in range(4):
        gradients(net, x)
        assert 0 <= rg.last_drift() < 1e-5  # pyright: ignore[reportOptionalOperand]
    assert arena.launched


def test_shared_weights_and_streams_of_two_sizes(arena):
    """One module at several places, as source and target of several streams."""
    fn, other = feed_forward(), Attention()
    streams = {"a": tokens(4), "b": tokens(4), "c": tokens(4)}
    updates = [rg.Update(target, f, source) for target, source in ("ab", "bc", "ca", "ab") for f in (fn, other)]
    leaves = [*streams.values(), *fn.parameters(), *other.parameters()]

    def run(policy):
        out = rg.run(updates, streams, policy=policy)
        return torch.autograd.grad((out["a"] * out["b"].sin() + out["c"]).sum(), leaves)

    for _ in range(4):
        assert equal(run(GRAPHED), run(rg.Reverse()))
    assert arena.recorded == 6


def test_each_shape_and_setting_has_a_graph_of_its_own(arena):
    net = network()
    x, longer = tokens(4), tokens(6)
    half = [*net.parameters()][::2]
    for _ in range(3):
        for each in (x, longer):
            for autocast in (False, True):
                assert equal(gradients(net, each, autocast=autocast), reversed_gradients(net, each, autocast=autocast))
        for needed in (False, True):
            for weight in half:
                weight.requires_grad_(needed)
            live = [weight for weight in net.parameters() if weight.requires_grad]
            a, b = (torch.autograd.grad(net(x).sin().sum(), live) for net.policy in (GRAPHED, rg.Reverse()))
            net.policy = GRAPHED
            assert equal(a, b)
    assert arena.recorded == 6 * 5
    net.eval()
    net.train()
    launched = arena.launched
    gradients(net, x)
    assert (arena.recorded, arena.launched) == (30, launched + 6)


def test_more_shapes_than_graphs(arena):
    net = network(depth=1)

    def train() -> bool:
        lengths = [tokens(length) for length in range(2, 20)] * 2
        return all(equal(gradients(net, x), reversed_gradients(net, x)) for x in lengths)

    with pytest.warns(UserWarning, match=r"replayed without a CUDA graph: it was called in 16 ways already"):
        assert train()
    assert arena.recorded == 2 * launch.MOST


def test_weights_that_moved(arena):
    """`weight.data = ...` and `net.to(...)` leave the graph behind."""
    net, x = network(), tokens()
    for _ in range(3):
        gradients(net, x)
    for weight in net.parameters():
        weight.data = weight.data * 1.5
    for _ in range(3):
        assert equal(gradients(net, x), reversed_gradients(net, x))
    assert arena.recorded == 12


def test_a_weight_changed_before_the_backward(arena):
    net, x = network(), tokens()
    for _ in range(3):
        gradients(net, x)
    loss = net(x).sum()
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name.endswith("qkv.weight"):
                weight.add_(1)
    with pytest.raises(RuntimeError, match=r"update \d.*fn Attention.*'weight' of Linear.*changed in place"):
        loss.backward()


def test_a_weight_changed_while_its_update_is_differentiated(arena):
    """Autograd notices a saved weight that a hook changes; so must what a graph has handed out."""
    net, x = network(depth=1), tokens()
    for _ in range(3):
        gradients(net, x)
    norm = next(module for module in net.modules() if isinstance(module, nn.LayerNorm))
    linear = next(module for module in net.modules() if isinstance(module, Attention)).out

    def spoil(gradient):
        with torch.no_grad():
            norm.weight.add_(1)

    for policy in (rg.Keep(), rg.Reverse(), GRAPHED):
        net.policy = policy
        handle = linear.bias.register_hook(spoil)
        with pytest.raises(RuntimeError, match=r"modified by an inplace|changed in place"):
            net(x).sum().backward()
        handle.remove()


def test_a_backward_inside_a_backward(arena):
    """Another pass through the same graphs, in the middle of a pass: what the first has left there is moved out."""
    net, x = network(depth=4), tokens()
    for _ in range(3):
        gradients(net, x)
    expected, inner = reversed_gradients(net, x), reversed_gradients(net, x, seed=7)
    found = []

    def again(gradient):
        if not found:
            found.append(None)
            with torch.enable_grad():
                found[0] = gradients(net, x.detach().requires_grad_(), seed=7)[1:]

    weight = [module for module in net.modules() if isinstance(module, Attention)][2].qkv.bias
    weight.register_hook(again)
    launched = arena.launched
    assert equal(gradients(net, x), expected)
    assert equal(found[0], inner[1:])
    assert arena.launched == launched + 16


def test_two_backward_passes_over_one_forward(arena):
    net, other, x = network(), network(depth=2), tokens()
    for _ in range(3):
        gradients(net, x), gradients(other, x)
    weights = [*net.parameters()]
    loss = net(x).sin().sum()
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    gradients(other, x)
    assert equal(torch.autograd.grad(loss, weights, retain_graph=True), first)
    with torch.no_grad():
        weights[0].mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_one_update_is_looked_at_anew_by_each_pass(arena):
    """What it saved is still there from the pass before, but its weight is another."""
    fn, x = nn.Linear(WIDTH, WIDTH), {"a": tokens(), "b": tokens()}

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return rg.run([rg.Update("a", fn, "b")], x, policy=GRAPHED)["a"].sum()

    for _ in range(3):
        run().backward()
    loss = run()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        fn.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_a_part_of_the_graph(arena):
    """Gradients of the input alone pass by some updates without asking for what they saved."""
    net, x = network(), tokens()
    for _ in range(3):
        gradients(net, x)
    for inputs in ([x], [*net.parameters()][:1], [*net.parameters()][-1:]):
        a, b = (torch.autograd.grad(net(x).sum(), inputs) for net.policy in (GRAPHED, rg.Reverse()))
        assert equal(a, b)


def test_second_derivatives(arena):
    """A backward that builds a graph replays without graphs: what it saves must stay."""
    net, x = network().double(), tokens().double().detach().requires_grad_()
    for _ in range(3):
        gradients(net, x)

    def second():
        (gradient,) = torch.autograd.grad(net(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, *net.parameters()], allow_unused=True)

    a, b = (second() for net.policy in (GRAPHED, rg.Keep()))
    for one, other in zip(a, b, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_batched_gradients(arena):
    net, x = network(), tokens()
    for _ in range(3):
        gradients(net, x)
    out, vectors = net(x), torch.randn(3, 2, 4, WIDTH)
    (together,) = torch.autograd.grad(out, x, vectors, is_grads_batched=True, retain_graph=True)
    for vector, gradient in zip(vectors, together, strict=True):
        torch.testing.assert_close(torch.autograd.grad(out, x, vector, retain_graph=True)[0], gradient)


def test_a_mixture(arena):
    """Plain modules, one with buffers, and kept ones, in one program."""
    torch.manual_seed(0)
    fns = [feed_forward(), nn.Sequential(nn.BatchNorm1d(4), feed_forward()), Attention(), feed_forward()]
    x = {"a": tokens(), "b": tokens()}
    leaves = [*x.values(), *(weight for fn in fns for weight in fn.parameters())]

    def run(policy):
        updates = [rg.Update("ab"[i % 2], fn, "ba"[i % 2]) for i, fn in enumerate(fns * 2)]
        updates.insert(3, rg.Update("b", fns[0], "a", policy=rg.Keep()))
        out = rg.run(updates, x, policy=policy)
        return torch.autograd.grad((out["a"] * out["b"]).sin().sum(), leaves)

    with pytest.warns(UserWarning, match=r"fn Sequential.*replayed without a CUDA graph: only that of a plain module"):
        assert all(equal(run(GRAPHED), run(rg.Reverse())) for _ in range(4))
    assert arena.launched


@pytest.mark.parametrize(
    ("streams", "options", "why"),
    [
        ({"a": torch.randn(2, WIDTH), "b": {"x": torch.randn(2, WIDTH)}}, {}, "single tensors"),
        ({"a": torch.randn(2, WIDTH), "b": torch.randn(2, WIDTH)}, {"kwargs": {"scale": 2.0}}, "without keywords"),
        ({"a": torch.randn(2, WIDTH), "b": torch.randn(WIDTH).expand(2, WIDTH)}, {}, "gaps or overlaps"),
    ],
)
def test_what_has_no_graph_says_so_once(arena, recwarn, streams, options, why):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, b, scale=1.0):
            return self.linear(b["x"] if isinstance(b, dict) else b) * scale

    fn = Scaled()
    for _ in range(4):
        rg.run([rg.Update("a", fn, "b", **options)], streams, policy=GRAPHED)["a"].sum().backward()
    told = [str(each.message) for each in recwarn]
    assert len(told) == 1
    assert "update 0 (target 'a', fn Scaled) is replayed without a CUDA graph" in told[0]
    assert why in told[0]
    assert not arena.recorded


def test_what_waits_for_the_device(arena, monkeypatch):
    monkeypatch.setattr(launch, "_waiting", lambda: contextlib.nullcontext(["a wait"]))
    net, x = network(), tokens()
    with pytest.warns(UserWarning, match="it waits for the device"):
        assert all(equal(gradients(net, x), reversed_gradients(net, x)) for _ in range(4))
    assert not arena.recorded


def test_a_graph_that_computes_something_else(arena, monkeypatch):
    record = type(arena).record

    def wrong(self, function):
        saved, graph = record(self, function)
        replay = graph.replay
        graph.replay = lambda: (replay(), [t.add_(1) for t in graph.memory if t is not None])
        return saved, graph

    monkeypatch.setattr(type(arena), "record", wrong)
    net, x = network(depth=1), tokens()
    with pytest.warns(UserWarning, match="its graph computes something else than it does"):
        assert all(equal(gradients(net, x), reversed_gradients(net, x)) for _ in range(4))


def test_a_capture_that_fails(arena, monkeypatch):
    def failing(self, function):
        raise RuntimeError("operation not permitted when stream is capturing")

    net, x = network(depth=1), tokens()
    gradients(net, x)
    monkeypatch.setattr(type(arena), "record", failing)
    with pytest.raises(RuntimeError, match=r"update 1 .*cannot be captured in a CUDA graph; give it policy"):
        gradients(net, x)

    def full(self, function):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(type(arena), "record", full)
    with pytest.raises(torch.OutOfMemoryError):
        gradients(net, x)


def test_other_random_numbers_are_refused(arena):
    net, x = network(depth=1, dropout=0.5), tokens()
    for _ in range(3):
        gradients(net, x)
    graphs = [way.launch.graph for way in ways(net) if way.launch]
    for graph in graphs:
        graph.replay = lambda: None  # draws nothing
    with pytest.raises(RuntimeError, match="draws other random numbers in its replay"):
        gradients(net, x)


def test_generators_are_left_where_they_were(arena):
    net, x = network(dropout=0.5), tokens()
    for _ in range(4):
        loss = net(x).sum()
        before = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), before)
    assert arena.launched


def test_what_changes_between_forward_and_backward(arena):
    """A replay sees what the forward saw, and a capture too."""
    net, x = network(dropout=0.5), tokens()

    def gradients_of(policy, seed, change, back):
        net.policy = policy
        torch.manual_seed(seed)
        loss = net(x).sin().sum()
        change()
        try:
            return torch.autograd.grad(loss, [x, *(weight for weight in net.parameters() if weight is not frozen)])
        finally:
            back()

    frozen = [*net.parameters()][2]
    for change, back in (
        (net.eval, net.train),
        (lambda: frozen.requires_grad_(False), lambda: frozen.requires_grad_(True)),
        (lambda: None, lambda: None),
    ):
        for seed in range(4):
            assert equal(*(gradients_of(policy, seed, change, back) for policy in (GRAPHED, rg.Reverse())))
    assert arena.launched


def test_a_dispatch_mode_is_not_passed_by(arena):
    class Doubled(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            out = operator(*args, **(kwargs or {}))
            return out * 2 if operator is torch.ops.aten.gelu.default else out

    net, x = network(), tokens()
    for _ in range(3):
        gradients(net, x)
    with Doubled():
        assert equal(gradients(net, x), reversed_gradients(net, x))


@pytest.mark.filterwarnings("ignore:update . .* its streams are not", "ignore:Sparse CSR")
@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_streams(arena, sparse):
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, graph):
            return torch.sparse.mm(graph, self.linear(x))

    fn, x = Spread(), {"a": torch.randn(4, WIDTH), "b": torch.randn(4, WIDTH), "graph": sparse(torch.eye(4))}

    def run(policy):
        out = rg.run([rg.Update("a", fn, ("b", "graph"))], x, policy=policy)
        return torch.autograd.grad(out["a"].sin().sum(), [*fn.parameters()])

    for _ in range(4):
        assert equal(run(GRAPHED), run(rg.Reverse()))


def test_hooks_on_all_modules(arena):
    """They run in a replay, and not in a graph."""
    net, x = network(), tokens()
    for _ in range(3):
        gradients(net, x)
    launched = arena.launched

    def doubled(module, inputs, out):
        return out * 2 if type(module) is nn.Linear else None

    handle = nn.modules.module.register_module_forward_hook(doubled)
    try:
        assert equal(gradients(net, x), reversed_gradients(net, x))
    finally:
        handle.remove()
    assert arena.launched == launched
    assert equal(gradients(net, x), reversed_gradients(net, x))
    assert arena.launched == launched + 6


def test_inside_a_captured_step_nothing_is_launched(arena):
    class Still:
        def get_offset(self) -> int:
            return 0

    net, x = network(), tokens()
    for _ in range(3):
        gradients(net, x)
    launched = arena.launched
    with under_way(Rehearsal(Still())):  # type: ignore[arg-type]
        gradients(net, x)
    assert arena.launched == launched


def test_nothing_outlives_its_module(arena):
    net, x = network(), tokens()
    for _ in range(3):
        gradients(net, x)
    graphs, streams = [*arena.graphs], [weakref.ref(stream) for stream in arena.streams.values()]
    assert (len(graphs), len(streams)) == (6, 2)
    for graph in graphs:
        graph.function = None  # a real one does not hold what it recorded
    graphs = [weakref.ref(graph) for graph in graphs]
    del net, graph
    gc.collect()
    assert not any(each() is not None for each in graphs + streams)


def test_the_tape_dies_after_its_backward(arena, monkeypatch):
    from retrograd import tape

    tapes = []
    init = tape.Tape.__init__
    monkeypatch.setattr(
        tape.Tape, "__init__", lambda self, *args: (tapes.append(weakref.ref(self)), init(self, *args))[1]
    )
    net, x = network(), tokens()
    gc.disable()
    try:
        for _ in range(4):
            gradients(net, x)
        assert [each() for each in tapes] == [None] * 4
    finally:
        gc.enable()


def test_the_policy():
    assert pickle.loads(pickle.dumps(GRAPHED)) == GRAPHED != rg.Reverse()
    with pytest.raises(ValueError, match="graphed must be True or False"):
        rg.Reverse(graphed=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="graphed=True captures whole replays, save= shortens them"):
        rg.Reverse(graphed=True, save="output")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_on_a_cpu_it_is_reverse(recwarn):
    net, x = network(), tokens()
    for _ in range(3):
        assert equal(gradients(net, x), reversed_gradients(net, x))
    assert not [*recwarn]


class Mixed(nn.Module):
    """Of any number of streams, to as many parts as a join takes."""

    def __init__(self, sources: int, parts: int, dropout: float) -> None:
        super().__init__()
        self.parts, self.dropout = parts, dropout
        self.into = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(sources))
        self.out = nn.Linear(WIDTH, parts * WIDTH)

    def forward(self, *streams):
        total = functional.gelu(sum(layer(stream) for layer, stream in zip(self.into, streams, strict=True)))
        out = functional.dropout(self.out(total).tanh(), self.dropout)
        return out.chunk(2, -1) if self.parts == 2 else out


@st.composite
def programs(draw):
    """Plain modules on two to four streams, some of them used more than once, some kept, some not plain."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    names = "abcd"[: draw(st.integers(2, 4))]
    streams = {name: torch.randn(2, 3, WIDTH).requires_grad_(draw(st.booleans())) for name in names}
    updates: list[rg.Update] = []
    for _ in range(draw(st.integers(1, 8))):
        if updates and draw(st.booleans()):
            updates.append(draw(st.sampled_from(updates)))
            continue
        target, *sources = draw(st.permutations(names))
        sources = sources[: draw(st.integers(1, len(sources)))]
        join = draw(st.sampled_from([rg.Add(), rg.Scale(1.25, 0.5), rg.Affine()]))
        fn = Mixed(len(sources), join.parts, draw(st.sampled_from([0.0, 0.5])))
        if draw(st.integers(0, 4)) == 0:
            fn.register_buffer("unused", torch.zeros(1))
        policy = draw(st.sampled_from([None, None, None, rg.Keep()]))
        updates.append(rg.Update(target, fn, tuple(sources), join=join, policy=policy))
    return updates, streams, draw(st.sampled_from([None, 1, 3]))


@settings(deadline=None, max_examples=60)
@given(programs())
def test_random_programs_equal_those_without_graphs(program):
    updates, streams, anchor_every = program
    weights = {id(weight): weight for update in updates for weight in update.fn.parameters()}
    leaves = [*weights.values(), *(stream for stream in streams.values() if stream.requires_grad)]

    def run(seed: int, **options):
        torch.manual_seed(seed)
        out = rg.run(updates, streams, policy=rg.Reverse(anchor_every=anchor_every, **options))
        loss = sum(stream.sin().sum() * (i + 1) for i, stream in enumerate(out.values()))
        return torch.autograd.grad(loss, leaves, allow_unused=True)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_cpu(patch)
        for seed in range(4):
            assert equal(run(seed, graphed=True), run(seed))


class Kept(torch.autograd.Function):
    """Its gradient is what it saved: the very memory."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.saved_tensors[0]


@pytest.mark.filterwarnings("ignore:update 1 .* is replayed without a CUDA graph")
def test_what_is_replayed_without_a_graph_has_streams_of_its_own(arena):
    """A function may hand on what it saved, and the next launch must not write there."""
    x, fn = {"a": tokens(), "b": tokens()}, feed_forward()

    def run(policy):
        updates = [rg.Update("b", fn, "a"), rg.Update("a", Kept.apply, "b"), rg.Update("b", fn, "a")]
        out = rg.run(updates, x, policy=policy)
        return torch.autograd.grad(out["a"].sin().sum(), [*x.values(), *fn.parameters()])

    for _ in range(4):
        assert equal(run(GRAPHED), run(rg.Reverse()))
    assert arena.launched


def test_one_module_in_several_updates(arena):
    """With other joins, and with its sources in another order."""
    fn, x = Mixed(2, 1, 0.0), {"a": tokens(), "b": tokens(), "c": tokens()}
    first = rg.Update("a", fn, ("b", "c"))
    updates = [first, replace(first, join=rg.Scale(1.0, 0.5)), replace(first, sources=("c", "b")), first]
    leaves = [*x.values(), *fn.parameters()]

    def run(policy):
        return torch.autograd.grad(rg.run(updates, x, policy=policy)["a"].sin().sum(), leaves)

    for _ in range(4):
        assert equal(run(GRAPHED), run(rg.Reverse()))
    assert arena.recorded == 3


class InPlace(nn.Module):
    """It changes what it has saved: autograd refuses to differentiate that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        out = self.linear(x).exp()
        return out.mul_(2)


class Inside(InPlace):
    """It differentiates inside."""

    def forward(self, x):
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(z).sin().sum(), z)
        return self.linear(x) * slope


@pytest.mark.filterwarnings("ignore:update . .* is replayed without a CUDA graph")
def test_what_autograd_refuses_is_refused(arena):
    fn, x = InPlace(), {"a": tokens(), "b": tokens()}
    for _ in range(4):
        out = rg.run([rg.Update("a", fn, "b")], x, policy=GRAPHED)
        with pytest.raises(RuntimeError, match="changed in place"):
            out["a"].sum().backward()


@pytest.mark.filterwarnings("ignore:update . .* is replayed without a CUDA graph")
def test_what_differentiates_inside(arena):
    fn, x = Inside(), {"a": tokens(), "b": tokens()}
    for _ in range(4):
        a, b = (
            torch.autograd.grad(rg.run([rg.Update("a", fn, "b")], x, policy=policy)["a"].sum(), [*fn.parameters()])
            for policy in (GRAPHED, rg.Reverse())
        )
        assert equal(a, b)


def test_what_needs_no_gradient(arena):
    """The same sizes, and other tensors saved."""
    fn, x = feed_forward(), {"a": tokens(), "b": tokens()}
    for _ in range(3):
        for needed in (True, False):
            x["b"].requires_grad_(needed)
            leaves = [*fn.parameters()]
            a, b = (
                torch.autograd.grad(rg.run([rg.Update("a", fn, "b")], x, policy=policy)["a"].sin().sum(), leaves)
                for policy in (GRAPHED, rg.Reverse())
            )
            assert equal(a, b)
    assert arena.recorded == 2


# What code reads: a graph holds it as it was at the capture


def helper(x):
    return x * 2


def other(x):
    return x * 3


SCALE = 2.0


class Settings:
    scale = 2.0


class Reads(nn.Module):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(WIDTH, WIDTH), nn.Conv1d(4, 4, 3, padding=1)


class ReadsClass(Reads):
    def forward(self, x):
        return self.linear(x) * self.scale


class ReadsGlobal(Reads):
    def forward(self, x):
        return self.linear(x) * SCALE


class ReadsFunction(Reads):
    def forward(self, x):
        return helper(self.linear(x))


class ReadsMethod(Reads):
    def forward(self, x):
        return self.inner(x)

    def inner(self, x):
        return self.linear(x) * 2


class ReadsLayer(Reads):
    def forward(self, x):
        return self.conv(x)


class ReadsSettings(Reads):
    def forward(self, x):
        return self.linear(x) * Settings.scale


class ReadsModule(Reads):
    def forward(self, x):
        return self.linear(x) * settings_module.scale


class ReadsByName(Reads):
    def forward(self, x):
        return self.linear(x) * getattr(self, "scale")  # noqa: B009


class ReadsAttribute(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings

    def forward(self, x):
        return self.linear(x) * self.settings.scale


def reads_closure():
    scale = 2.0

    class ReadsClosure(Reads):
        def forward(self, x):
            return self.linear(x) * scale

    def change():
        nonlocal scale
        scale = 3.0

    return ReadsClosure, change


elsewhere = types.ModuleType("elsewhere")  # another package, with a function that reads its own globals
exec("SCALE = 2.0\ndef scaled(x):\n    return x * SCALE", vars(elsewhere))
scaled = elsewhere.scaled


class ReadsElsewhere(Reads):
    def forward(self, x):
        return scaled(self.linear(x))


class ReadsDefault(Reads):
    def forward(self, x, settings=Settings):
        return self.linear(x) * settings.scale


class ReadsCode(Reads):
    def forward(self, x):
        return self.linear(x) * 2


def three(self, x):
    return self.linear(x) * 3


def activation(x):
    return functional.gelu(x) * Settings.scale


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self, activation=activation) -> None:
        super().__init__(WIDTH, 2, 16, dropout=0.0, activation=activation, batch_first=True)


class Overrides(Encoder):
    """Torch calls this, and no code of ours."""

    def __init__(self) -> None:
        super().__init__(functional.gelu)

    def _ff_block(self, x):
        return super()._ff_block(x) * Settings.scale


class ReadsImplicitly(Reads):
    def __getattr__(self, name):
        return Settings.scale if name == "gain" else super().__getattr__(name)

    def forward(self, x):
        return self.linear(x) * self.gain


class Special(Reads):
    def special(self, x):
        return self.linear(x) * Settings.scale


class Calls(Reads):
    def forward(self, special, x):
        return special.special(x)


class ReadsSibling(nn.Module):
    """The later one calls what only it names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Special(), Calls()

    def forward(self, x):
        return self.second(self.first, x)


class ReadsWrapped(Reads):
    helper = staticmethod(partial(activation))

    def forward(self, x):
        return self.helper(self.linear(x))


class ReadsWeight(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.gain = 2.0  # type: ignore[assignment]

    def forward(self, x):
        return self.linear(x) * self.linear.weight.gain


class ReadsNone(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.extra = None

    def forward(self, x):
        out = self.linear(x)
        try:
            return out if self.extra is None else out * 2
        except AttributeError:
            return out * 3


class ReadsDict(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.linear.settings = {"scale": 2.0}

    def forward(self, x):
        return self.linear(x) * self.linear.settings["scale"]


class ReadsTorch(Reads):
    def forward(self, x):
        return functional.silu(self.linear(x))


class Remembers(Reads):
    def forward(self, x):
        return self.linear(x) * (1 + remember(lambda: x > 0))


def _exchange(owner, name):
    return lambda fn, patch: patch.setattr(owner, name, 3.0)


def _removed(fn, patch):
    del fn.extra
    fn.other = None


settings_module = types.ModuleType("settings_module")
settings_module.scale = 2.0  # type: ignore[attr-defined]
ReadsClosure, _change = reads_closure()


@pytest.mark.parametrize(
    ("kind", "change", "captured"),
    [
        (ReadsClass, lambda fn, patch: patch.setattr(ReadsClass, "scale", 3.0), True),
        (ReadsClass, lambda fn, patch: setattr(fn, "scale", 3.0), True),
        (ReadsGlobal, lambda fn, patch: patch.setitem(globals(), "SCALE", 3.0), True),
        (ReadsFunction, lambda fn, patch: patch.setitem(globals(), "helper", other), True),
        (ReadsMethod, lambda fn, patch: patch.setattr(ReadsMethod, "inner", lambda fn, x: fn.linear(x) * 3), True),
        (ReadsLayer, lambda fn, patch: (setattr(fn.conv, "dilation", (2,)), setattr(fn.conv, "padding", (2,))), True),
        (ReadsSettings, lambda fn, patch: patch.setattr(Settings, "scale", 3.0), False),
        (ReadsModule, lambda fn, patch: patch.setattr(settings_module, "scale", 3.0), False),
        (ReadsByName, lambda fn, patch: patch.setattr(Reads, "scale", 3.0), False),
        (ReadsAttribute, lambda fn, patch: patch.setattr(Settings, "scale", 3.0), False),
        (ReadsClosure, lambda fn, patch: _change(), False),
        (ReadsElsewhere, _exchange(elsewhere, "SCALE"), False),
        (ReadsDefault, _exchange(Settings, "scale"), False),
        (ReadsCode, lambda fn, patch: patch.setattr(ReadsCode.forward, "__code__", three.__code__), True),
        (Encoder, _exchange(Settings, "scale"), False),
        (Overrides, _exchange(Settings, "scale"), False),
        (ReadsImplicitly, _exchange(Settings, "scale"), False),
        (ReadsSibling, _exchange(Settings, "scale"), False),
        (ReadsWrapped, _exchange(Settings, "scale"), False),
        (ReadsWeight, lambda fn, patch: setattr(fn.linear.weight, "gain", 3.0), True),
        (ReadsWeight, lambda fn, patch: setattr(fn.linear.weight, "data", fn.linear.weight.data.t()), True),
        (ReadsNone, _removed, True),
        (ReadsDict, lambda fn, patch: fn.linear.settings.update(scale=3.0), False),
        (ReadsTorch, lambda fn, patch: patch.setattr(functional, "silu", functional.gelu), True),
        (ReadsTorch, lambda fn, patch: patch.setattr(nn.Linear, "forward", lambda fn, x: x @ fn.weight), True),
        (Remembers, lambda fn, patch: patch.setattr(torch, "float_power", None), False),
    ],
)
@pytest.mark.filterwarnings("ignore:update . .* is replayed without a CUDA graph")
def test_what_its_code_reads_is_changed_between_two_steps(arena, monkeypatch, kind, change, captured):
    fn, x = kind(), {"a": tokens(), "b": tokens()}
    leaves = [x["b"], *fn.parameters()]

    def run(policy):
        out = rg.run([rg.Update("a", fn, "b"), rg.Update("b", fn, "a")], x, policy=policy)
        return torch.autograd.grad((out["a"] * out["b"]).sin().sum(), leaves, allow_unused=True)

    for _ in range(3):
        before = run(GRAPHED)
        assert equal(before, run(rg.Reverse()))
    assert bool(arena.recorded) == captured
    change(fn, monkeypatch)
    for _ in range(3):
        after = run(GRAPHED)
        assert equal(after, run(rg.Reverse()))
    assert kind is Remembers or not equal(before, after)
