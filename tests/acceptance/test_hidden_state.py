"""State that a fn reads in ways which are hard to see: what it meant in the forward it means in the replay, or the
replay is refused. Each case compares with kept activations in float64."""

from __future__ import annotations

import gc
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from networks import assert_same
from retrograd import tape

WIDTH = 6
NOISE = torch.Generator()
NORM = nn.BatchNorm1d(WIDTH)
MASK = torch.ones(WIDTH, dtype=torch.float64)

Made = tuple[Tensor, list[Tensor]]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def block() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh())


def program(fn: Callable[..., Tensor], policy: rg.Policy, **kwargs: Any) -> Made:
    """`a += fn(b)`, `b += tanh(linear(a))`, `a += fn(b)`: a loss, and what it depends on."""
    x, other = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True), block()
    updates = [
        rg.Update("a", fn, "b", kwargs=kwargs),
        rg.Update("b", other, "a"),
        rg.Update("a", fn, "b", kwargs=kwargs),
    ]
    out = rg.run(updates, {"a": x, "b": x}, policy=policy)
    return (out["a"] * out["b"]).sum(), [x, *other.parameters()]


def assert_as_kept(make: Callable[[rg.Policy], Made]) -> None:
    """The gradients are those of kept activations, from the same seed."""
    found = []
    for policy in (rg.Keep(), rg.Reverse(), rg.Reverse(save="output")):
        torch.manual_seed(0)
        NOISE.manual_seed(0)
        loss, wanted = make(policy)
        found.append(torch.autograd.grad(loss, wanted))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


# Random numbers


def test_a_draw_that_puts_the_generator_back() -> None:
    def fn(b: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return torch.dropout(b.tanh(), 0.5, True)

    def make(policy: rg.Policy) -> Made:
        loss, wanted = program(fn, policy)
        torch.rand(1)
        return loss, wanted

    assert_as_kept(make)


def test_states_of_a_generator_are_shared_by_the_calls_that_leave_it_alone() -> None:
    """5 KB each on a CPU, otherwise."""
    from retrograd.replay import Call
    from retrograd.surroundings import Surroundings

    surroundings, states = Surroundings([]), []
    calls = [Call(i, rg.Update("a", torch.sin, "b"), surroundings) for i in range(3)]
    for call in calls:
        call.forward(lambda: None, states)
    assert len({id(then) for call in calls for _, then, _ in call.random}) == 1


def dropped(b: Tensor, generator: torch.Generator) -> Tensor:
    return b.tanh() * torch.bernoulli(torch.full_like(b, 0.5), generator=generator)


def dropped_from_a_global(b: Tensor) -> Tensor:
    return dropped(b, NOISE)


class Helper:
    def __init__(self) -> None:
        self.generator = NOISE

    def drop(self, b: Tensor) -> Tensor:
        return dropped(b, self.generator)

    def __call__(self, b: Tensor) -> Tensor:
        return dropped(b, NOISE)


class InAGlobal(nn.Module):
    def forward(self, b: Tensor) -> Tensor:
        return dropped(b, NOISE)


class InAFunctionOfTheModule(nn.Module):
    def forward(self, b: Tensor) -> Tensor:
        return dropped_from_a_global(b)


class InAnotherMethod(nn.Module):
    def forward(self, b: Tensor) -> Tensor:
        return self.drop(b)

    def drop(self, b: Tensor) -> Tensor:
        return dropped(b, NOISE)


class InTheClass(nn.Module):
    generator = NOISE

    def forward(self, b: Tensor) -> Tensor:
        return dropped(b, self.generator)


class InAnObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper()

    def forward(self, b: Tensor) -> Tensor:
        return self.helper.drop(b)


class InABoundMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = Helper().drop

    def forward(self, b: Tensor) -> Tensor:
        return self.drop(b)


class InAnOrderedDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = OrderedDict(generator=NOISE)

    def forward(self, b: Tensor) -> Tensor:
        return dropped(b, self.held["generator"])


@pytest.mark.parametrize(
    "kind",
    [
        InAGlobal,
        InAFunctionOfTheModule,
        InAnotherMethod,
        InTheClass,
        InAnObject,
        InABoundMethod,
        InAnOrderedDict,
        Helper,
    ],
)
def test_generators(kind: Callable[[], Callable[..., Tensor]]) -> None:
    assert_as_kept(lambda policy: program(kind(), policy))


class HiddenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "norm", nn.BatchNorm1d(WIDTH))

    def forward(self, b: Tensor) -> Tensor:
        return self.norm(b)


class GlobalNorm(nn.Module):
    norm = NORM

    def forward(self, b: Tensor) -> Tensor:
        return NORM(b)


@pytest.mark.parametrize("kind", [HiddenNorm, GlobalNorm])
def test_a_norm_counts_once(kind: type[nn.Module]) -> None:
    fn, x = kind(), torch.randn(4, WIDTH, requires_grad=True)
    fn.norm.reset_running_stats()  # type: ignore[operator, union-attr]
    rg.run([rg.Update("a", fn, "b")], {"a": x, "b": x})["a"].sum().backward()
    assert fn.norm.num_batches_tracked == 1  # type: ignore[union-attr]


# What names are bound to


def test_a_loop_variable_is_what_it_was() -> None:
    def make(policy: rg.Policy) -> Made:
        blocks = [(linear(), linear()) for _ in range(3)]
        x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
        streams, gain = {"a": x, "b": x}, 0.0
        for f, g in blocks:
            gain += 0.5
            updates = [
                rg.Update("a", lambda b: gain * f(b).sin(), "b"),  # noqa: B023
                rg.Update("b", lambda a: g(a).cos(), "a"),  # noqa: B023
            ]
            streams = rg.run(updates, streams, policy=policy)
        return (streams["a"] * streams["b"]).sum(), [x, *(net.weight for pair in blocks for net in pair)]

    assert_as_kept(make)


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "hook added", "submodule"])
def test_a_module_is_put_together_as_it_was(kind: str) -> None:
    def make(policy: rg.Policy) -> Made:
        fn = block()
        if kind in ("hook", "pre-hook"):
            add = fn[0].register_forward_hook if kind == "hook" else fn[0].register_forward_pre_hook
            handle = add((lambda m, i, o: o * 3) if kind == "hook" else (lambda m, i: (i[0] * 3,)))  # type: ignore[arg-type]
            made = program(fn, policy)
            handle.remove()
        else:
            made = program(fn, policy)
            if kind == "submodule":
                fn[0] = linear()
            else:
                fn[0].register_forward_hook(lambda m, i, o: o * 3)
        return made

    assert_as_kept(make)
    fn = block()
    fn[0].register_forward_hook(lambda m, i, o: o)
    hooks = fn[0]._forward_hooks
    program(fn, rg.Reverse())[0].backward()
    assert fn[0]._forward_hooks is hooks


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, b: Tensor) -> Tensor:
        return self.linear(b) * MASK


def test_a_global_that_a_forward_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(policy: rg.Policy) -> Made:
        monkeypatch.setitem(globals(), "MASK", torch.rand(WIDTH, dtype=torch.float64))
        made = program(Masked(), policy)
        monkeypatch.setitem(globals(), "MASK", torch.rand(WIDTH, dtype=torch.float64))
        return made

    assert_as_kept(make)
    loss, _ = program(Masked(), rg.Reverse())
    MASK.add_(1)
    with pytest.raises(RuntimeError, match=r"update 2 .*: the tensor 'MASK' .*changed in place"):
        loss.backward()


@pytest.mark.parametrize("where", ["dict", "object", "keyword"])
def test_entries_of_dicts_and_objects(where: str) -> None:
    def make(policy: rg.Policy) -> Made:
        held = types.SimpleNamespace(mask=torch.rand(WIDTH, dtype=torch.float64))
        entries, net = vars(held), block()
        fns = {"dict": lambda b: net(b) * entries["mask"], "object": lambda b: net(b) * held.mask}
        if where == "keyword":
            made = program(lambda b, info: net(b) * info["mask"], policy, info=entries)
        else:
            made = program(fns[where], policy)
        held.mask = torch.rand(WIDTH, dtype=torch.float64)
        return made

    assert_as_kept(make)


class Store(nn.Module):
    value: Tensor


def test_what_one_update_leaves_for_the_next() -> None:
    """A value residual: the first of two updates notes what the second adds."""

    def make(policy: rg.Policy) -> Made:
        store, f, g = Store(), linear(), linear()
        x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)

        def note(b: Tensor) -> Tensor:
            store.value = f(b).sin()
            return store.value * 2

        def add(a: Tensor) -> Tensor:
            return g(a).cos() * store.value

        out = rg.run([rg.Update("a", note, "b"), rg.Update("b", add, "a")] * 2, {"a": x, "b": x}, policy=policy)
        return (out["a"] * out["b"]).sum(), [x, f.weight, g.weight]

    assert_as_kept(make)


def test_a_name_that_is_gone_stays_gone() -> None:
    class Attribute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.mask = linear(), torch.ones(WIDTH, dtype=torch.float64)

        def forward(self, b: Tensor) -> Tensor:
            return self.linear(b) * self.mask

    fn, norm = Attribute(), nn.Sequential(linear(), nn.BatchNorm1d(WIDTH).double())
    for net, owner, name in ((fn, fn, "mask"), (norm, norm[1], "running_mean")):
        loss, _ = program(net, rg.Reverse())
        delattr(owner, name)
        loss.backward()
        assert not hasattr(owner, name)


def test_an_unrelated_global_with_the_name_of_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "mask", torch.ones(WIDTH, dtype=torch.float64))
    held, net = types.SimpleNamespace(mask=torch.ones(WIDTH, dtype=torch.float64)), linear()
    loss, _ = program(lambda b: net(b) * held.mask, rg.Reverse())
    globals()["mask"].add_(1)
    loss.backward()


# Values that change


@pytest.mark.parametrize("policy", [rg.Reverse(), rg.Reverse(save="output")], ids=str)
@pytest.mark.parametrize("show", ["closure", "bound method"])
def test_a_weight_that_is_not_saved_but_read(show: str, policy: rg.Policy) -> None:
    """A bias: its value is in the output, though no gradient needs it."""
    net = linear()
    loss, _ = program(net.forward if show == "bound method" else (lambda b: net(b).tanh()), policy)
    with torch.no_grad():
        net.bias.add_(1)
    with pytest.raises(RuntimeError, match=r"update 2 .*the parameter 'bias' of Linear .*changed in place"):
        loss.backward()


def test_a_weight_that_a_closure_shows_and_fn_does_not_read_may_change() -> None:
    both = nn.ModuleList([linear(), linear()])
    loss, _ = program(lambda b: both[0](b), rg.Reverse())
    with torch.no_grad():
        both[1].bias.add_(1)  # type: ignore[union-attr]
    loss.backward()


@pytest.mark.parametrize("policy", [rg.Keep(), rg.Offload(), rg.Reverse()], ids=str)
def test_a_saved_weight_that_changes_is_an_error_under_each_policy(policy: rg.Policy) -> None:
    fn = block()
    loss, _ = program(fn, policy)
    with torch.no_grad():
        fn[0].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        loss.backward()


class ActNorm(nn.Module):
    """Sets its scale by the first batch it sees, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.ready = linear(), False
        self.register_buffer("scale", torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, b: Tensor) -> Tensor:
        hidden = self.linear(b)
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / hidden.std(0))
            self.ready = True
        return (hidden * self.scale).tanh()


class Rotary(nn.Module):
    """Remembers how many rows its buffer is for, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.fill(2)

    def fill(self, rows: int) -> None:
        self.filled = rows
        self.register_buffer("cosines", torch.arange(rows * WIDTH).view(rows, WIDTH).double().cos(), persistent=False)

    def forward(self, b: Tensor) -> Tensor:
        if len(b) > self.filled:
            self.fill(len(b))
        return self.linear(b) * self.cosines[: len(b)]


@pytest.mark.parametrize("kind", [ActNorm, Rotary])
def test_flags_go_back_with_the_buffers(kind: type[nn.Module]) -> None:
    assert_as_kept(lambda policy: program(kind(), policy))
    fn = kind()
    program(fn, rg.Reverse())[0].backward()
    assert (fn.ready is True) if isinstance(fn, ActNorm) else (fn.filled == 4)


class Positions(nn.Module):
    """A cache, and beside it for how many rows it is: in attributes, a buffer, a dict or an object."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = linear(), where
        self.held: Any = types.SimpleNamespace(rows=0, table=torch.zeros(0)) if where == "object" else None
        if where == "dict":
            self.held = {"rows": 0, "table": torch.zeros(0)}
        if where == "attributes":
            self.rows, self.table = 0, torch.zeros(0)
        if where == "buffer":
            self.rows = 0
            self.register_buffer("table", torch.zeros(0))

    def forward(self, b: Tensor) -> Tensor:
        entries = self.held if self.where == "dict" else vars(self if self.held is None else self.held)
        if entries["rows"] != len(b):
            entries["rows"], table = len(b), torch.arange(b.numel()).view_as(b).mul(len(b)).double().cos()
            if self.where == "buffer":
                self.table = table
            else:
                entries["table"] = table
        return self.linear(b) * (self.table if self.where == "buffer" else entries["table"])


@pytest.mark.parametrize("where", ["attributes", "buffer", "dict"])
def test_a_cache_and_its_size_stay_together(where: str) -> None:
    """Two forwards of other lengths before the backward, and then another of the second length."""

    def losses(policy: rg.Policy) -> list[float]:
        torch.manual_seed(0)
        fn, other = Positions(where), linear()
        xs = [torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=True) for rows in (5, 3)]

        def loss(x: Tensor) -> Tensor:
            updates = [rg.Update("a", fn, "b"), rg.Update("b", other, "a"), rg.Update("a", fn, "b")]
            return rg.run(updates, {"a": x, "b": x}, policy=policy)["a"].square().sum()

        (loss(xs[0]) + loss(xs[1])).backward()
        return [loss(xs[1]).item(), xs[0].grad.norm().item(), xs[1].grad.norm().item()]  # type: ignore[union-attr]

    assert losses(rg.Reverse()) == pytest.approx(losses(rg.Keep()), rel=1e-10)


class Taps(nn.Module):
    """Registers a hook, and replaces a submodule, in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.ready = block(), linear(), False

    def forward(self, b: Tensor) -> Tensor:
        if not self.ready:
            self.inner[0].register_forward_hook(lambda m, i, o: o * 3)
            self.head, self.ready = block(), True
        return self.head(self.inner(b))


def test_what_fn_does_to_its_modules_is_done() -> None:
    assert_as_kept(lambda policy: program(Taps(), policy))


def test_a_hook_that_fn_adds_where_others_came_and_went() -> None:
    class Tapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = block()

        def forward(self, b: Tensor) -> Tensor:
            handle = self.inner.register_forward_hook(lambda m, i, o: o * 2)
            out = self.inner(b)
            handle.remove()
            return out

    def make(policy: rg.Policy) -> Made:
        fn = Tapped()
        handle = fn.inner.register_forward_hook(lambda m, i, o: o + 1)
        made = program(fn, policy)
        handle.remove()
        return made

    assert_as_kept(make)


def test_caches_of_torch_are_its_own() -> None:
    def weights(policy: rg.Policy) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.utils.parametrizations.weight_norm(linear())
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.ones(4, WIDTH, dtype=torch.float64)
            with nn.utils.parametrize.cached():
                out = rg.run(
                    [rg.Update("a", net, "b"), rg.Update("b", torch.sin, "a")], {"a": x, "b": x}, policy=policy
                )
            (out["a"] * out["b"]).sum().backward()
            optimizer.step()
        return list(net.parameters())

    assert_same(weights(rg.Reverse()), weights(rg.Keep()))


def test_remembered_values_are_not_consumed() -> None:
    def fn(b: Tensor) -> Tensor:
        columns, out = rg.remember(lambda: b.argmax(-1).tolist()), b.tanh()
        while columns:
            out = out + b[:, columns.pop()].unsqueeze(1)
        return out

    assert_as_kept(lambda policy: program(fn, policy))


def test_a_remembered_tensor_that_changes_is_refused() -> None:
    def fn(b: Tensor) -> Tensor:
        column = rg.remember(lambda: b.argmax(-1))
        column.add_(1).remainder_(WIDTH)
        return b.tanh() * nn.functional.one_hot(column, WIDTH)

    loss, _ = program(fn, rg.Reverse())
    with pytest.raises(RuntimeError, match=r"update 2 .*what remember\(\) returned was changed in place"):
        loss.backward()


# Surroundings, what is returned, and kinds of tensors


@pytest.mark.parametrize("last", [None, rg.Keep(), rg.Reverse(), rg.Offload()], ids=str)
def test_what_is_returned_is_the_end_of_the_program(last: rg.Policy | None) -> None:
    """Not what later updates read of the same values, under any policy: a gradient by it, and a hook on it."""
    f, x = block(), torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    for policy in (rg.Keep(), rg.Reverse(), rg.Offload(), rg.Reverse(anchor_every=1)):
        updates = [rg.Update("a", f, "b"), rg.Update("b", f, "a", policy=last)]
        out = rg.run(updates, {"a": x, "b": x}, policy=policy)
        loss = (out["a"] * out["b"]).sum()
        assert_same(torch.autograd.grad(loss, out["a"], retain_graph=True)[0], out["b"].detach())
        expected = torch.autograd.grad((out["a"].detach() * out["b"]).sum(), x, retain_graph=True)
        out["a"].register_hook(torch.zeros_like)
        assert_same(torch.autograd.grad(loss, x), expected)


def test_the_default_dtype_of_the_forward() -> None:
    def make(policy: rg.Policy) -> Made:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return program(lambda b: (b + torch.full((WIDTH,), 1 / 3)).sin(), policy)
        finally:
            torch.set_default_dtype(torch.float32)

    assert_as_kept(make)
    assert torch.get_default_dtype() == torch.float32


def test_a_tensor_subclass() -> None:
    class Image(Tensor):
        def twice(self) -> Tensor:
            return self.sin() * 2

    def make(policy: rg.Policy) -> Made:
        x = torch.randn(4, WIDTH, dtype=torch.float64).as_subclass(Image).requires_grad_()
        weight = torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)

        def fn(b: Tensor) -> Tensor:
            return (b.twice() if isinstance(b, Image) else b) * weight

        out = rg.run([rg.Update("a", fn, "b"), rg.Update("b", fn, "a")] * 2, {"a": x, "b": x}, policy=policy)
        return (out["a"] * out["b"]).sum(), [weight]

    found = []
    for policy in (rg.Keep(), rg.Reverse()):
        torch.manual_seed(0)
        loss, (weight,) = make(policy)
        loss.backward()  # of the subclass: torch turns subclasses off in it
        found.append(weight.grad.as_subclass(Tensor))
    assert_same(found[1], found[0])


def test_a_sparse_buffer() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()
            self.register_buffer("edges", torch.rand(4, 4, dtype=torch.float64).to_sparse())

        def forward(self, b: Tensor) -> Tensor:
            return (self.edges @ self.linear(b)).tanh()

    assert_as_kept(lambda policy: program(Graph(), policy))
    auto, graph = rg.Auto("1MiB"), Graph()
    for _ in range(2):
        program(graph, auto)[0].backward()
    (learned,) = auto.learned.values()
    assert learned.kept > 0


class Owner:
    """What many modules know: an object that leads to all of them."""


@pytest.mark.parametrize("through", ["object", "parent", "closure"])
def test_statistics_of_modules_that_are_only_in_sight(through: str) -> None:
    """A call that can see another's batch norm must not take it for one that stands still."""
    from retrograd.measure import LiveBytes

    def peak(depth: int) -> int:
        nets = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh()) for _ in range(depth))
        owner = Owner()
        owner.nets = nets  # type: ignore[attr-defined]
        for net in nets:
            if through == "object":
                net.owner = owner  # type: ignore[assignment]
            elif through == "parent":
                object.__setattr__(net, "parent", nets)
        fns = [(lambda b, i=i: nets[i](b)) if through == "closure" else net for i, net in enumerate(nets)]
        x = torch.randn(32, 64, requires_grad=True)
        for parameter in nets.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(3):
            with LiveBytes() as memory:
                out = rg.run([rg.Update("ab"[i % 2], fn, "ba"[i % 2]) for i, fn in enumerate(fns)], {"a": x, "b": x})
                (out["a"].sum() + out["b"].sum()).backward()
        assert {int(net[1].num_batches_tracked) for net in nets} == {3}  # type: ignore[index, arg-type]
        return memory.peak

    copies = 6 * 2 * 64 * 4 + 6 * 8  # of the statistics: those of each update are kept for its replay
    assert peak(10) - peak(4) <= copies * (10 if through == "closure" else 1)


def test_keywords_are_seen_beside_anything_else() -> None:
    class Vocabulary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = [(str(i), i) for i in range(4000)]

        def forward(self, b: Tensor, k: Tensor) -> Tensor:
            return (b + k).sin()

    k = torch.zeros(WIDTH, dtype=torch.float64)
    loss, _ = program(Vocabulary(), rg.Reverse(), k=k)
    k.add_(1)
    with pytest.raises(RuntimeError, match="its keyword 'k'"):
        loss.backward()


def test_what_cannot_be_looked_at() -> None:
    class Odd:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("working outside of context")

    class Length(list):
        def __len__(self) -> int:
            raise RuntimeError("no length")

    def make(policy: rg.Policy) -> Made:
        fn, gone, there = Masked(), block(), block()
        for name, value in {
            "gone": weakref.proxy(gone),
            "there": weakref.proxy(there),
            "odd": Odd(),
            "list": Length(),
        }.items():
            object.__setattr__(fn, name, value)
        del gone
        return program(fn, policy)

    assert_as_kept(make)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_script() -> None:
    assert_as_kept(lambda policy: program(torch.jit.script(block()), policy))


def test_a_remembered_size_is_a_size() -> None:
    assert_as_kept(lambda policy: program(lambda b: b.sin() * rg.remember(lambda: b.shape).numel(), policy))


# What stays alive


def tapes_alive() -> int:
    gc.collect()
    return sum(type(each) is tape.Tape for each in gc.get_objects())


def test_forwards_alone_do_not_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    before, x = tapes_alive(), torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    net, latest = types.SimpleNamespace(out=linear()), globals()
    monkeypatch.setitem(latest, "out", None)
    for _ in range(5):  # a global with the name of an attribute that fn reads
        latest["out"] = rg.run([rg.Update("a", lambda b: net.out(b).tanh(), "b")], {"a": x, "b": x})["a"]
    state = {"a": x}
    for _ in range(5):  # the variable of a closure is bound to what the last program returned
        state = rg.run([rg.Update("a", lambda b: net.out(b) * state["a"].detach(), "b")], {"a": x, "b": x})  # noqa: B023
    noting = Masked()
    for _ in range(5):
        noting.last = rg.run([rg.Update("a", noting, "b")], {"a": x, "b": x})["a"]
    assert tapes_alive() - before <= 3


def test_passes_that_fail_do_not_gather() -> None:
    loss, (x, *_) = program(block(), rg.Reverse())

    def fail(grad: Tensor) -> None:
        raise ArithmeticError("as told")

    handle = x.register_hook(fail)
    for _ in range(20):
        with pytest.raises(ArithmeticError):
            loss.backward(retain_graph=True)
    gc.collect()
    assert max(len(each.passes) for each in gc.get_objects() if type(each) is tape.Tape) <= 8
    handle.remove()
    loss.backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")  # dynamo's own
def test_a_compiled_model_does_not_gather_closures() -> None:
    class Net(rg.Reversible):
        compile_options = types.MappingProxyType({"backend": "eager"})

        def __init__(self) -> None:
            super().__init__()
            self.f, self.g = linear(), linear()

        def split(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": x, "b": x}

        def merge(self, streams: Any) -> Tensor:
            return streams["a"] + streams["b"]

        def updates(self, context: Tensor) -> Any:
            yield rg.Update("a", lambda b: self.f(b) * context, "b")
            yield rg.Update("b", self.g, "a")

    net = torch.compile(Net(), backend="eager")
    contexts = []
    for _ in range(5):
        context = torch.rand(WIDTH, dtype=torch.float64)
        contexts.append(weakref.ref(context))
        net(torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True), context=context).sum().backward()
    del context
    gc.collect()
    assert sum(each() is not None for each in contexts) <= 1
