"""What the engine costs, in bytes and in calls, what it leaves behind, and what it refuses."""

import gc
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from retrograd import engine, tape
from retrograd.measure import LiveBytes


def pair(width: int = 16, dropout: float = 0.0) -> tuple[nn.Module, nn.Module]:
    f = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(dropout), nn.Tanh())
    g = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
    return f, g


def network(depth: int, dropout: float = 0.0, policy: rg.Policy | None = None) -> rg.ReversibleSequence:
    torch.manual_seed(0)
    return rg.ReversibleSequence([pair(dropout=dropout) for _ in range(depth)], policy=policy or rg.Reverse())


def peak_bytes(net: nn.Module, *, autocast: bool = False, retain: bool = False) -> int:
    """What a step holds at most, besides weights and their gradients."""
    x = torch.randn(2, 8, 16)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes() as memory:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = net(x).float().pow(2).mean()
        loss.backward(retain_graph=retain)
    return memory.peak


class Recorder(nn.Module):
    """A network that writes down when it runs."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log, self.inner = name, log, nn.Linear(4, 4)

    def forward(self, x):
        self.log.append(self.name + ("'" if rg.phase().replaying else ""))
        return self.inner(x).tanh()


# Cost


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_memory_does_not_grow_by_one_byte_with_depth(autocast, dropout):
    assert peak_bytes(network(4, dropout), autocast=autocast) == peak_bytes(network(64, dropout), autocast=autocast)


def test_kept_memory_does_grow():
    """So that the test above can fail."""
    assert peak_bytes(network(16, policy=rg.Keep())) > 3 * peak_bytes(network(4, policy=rg.Keep()))


def test_memory_is_below_that_of_checkpointing():
    class Checkpointed(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            a = b = x
            for f, g in self.net.blocks:
                a = checkpoint(lambda a, b, f=f: a + f(b), a, b, use_reentrant=False)
                b = checkpoint(lambda a, b, g=g: b + g(a), a, b, use_reentrant=False)
            return (a + b) / 2

    assert peak_bytes(network(16)) * 3 < peak_bytes(Checkpointed(network(16)))


def test_anchors_cost_the_streams_every_k_updates():
    stream = 2 * 8 * 16 * 4
    for k in (2, 4, 8):
        deep, shallow = (peak_bytes(network(depth, policy=rg.Reverse(anchor_every=k))) for depth in (64, 32))
        assert deep - shallow == (64 - 32) * 2 // k * 2 * stream


def test_retain_graph_costs_the_streams_once():
    assert peak_bytes(network(4), retain=True) == peak_bytes(network(32), retain=True)


def test_each_fn_runs_twice_in_this_order():
    log: list[str] = []
    net = rg.ReversibleSequence([(Recorder(f"f{i}", log), Recorder(f"g{i}", log)) for i in range(3)])
    net(torch.randn(2, 4)).sum().backward()
    assert ",".join(log) == "f0,g0,f1,g1,f2,g2,g2',f2',g1',f1',g0',f0'"


def test_a_kept_run_in_the_middle_is_not_replayed():
    log: list[str] = []
    fns = [Recorder(f"f{i}", log) for i in range(6)]
    updates = [
        rg.Update("ab"[i % 2], fn, "ba"[i % 2], policy=rg.Keep() if i in (2, 3) else None) for i, fn in enumerate(fns)
    ]
    x = torch.randn(2, 4)
    out = rg.run(updates, {"a": x, "b": x})
    log.clear()
    (out["a"] + out["b"]).sum().backward()
    assert log == ["f5'", "f4'", "f1'", "f0'"]


def test_only_what_is_needed_is_replayed():
    """Gradients of the last block alone need the last block alone."""
    log: list[str] = []
    net = rg.ReversibleSequence([(Recorder(f"f{i}", log), Recorder(f"g{i}", log)) for i in range(3)])
    loss = net(torch.randn(2, 4)).sum()
    log.clear()
    torch.autograd.grad(loss, list(net.blocks[2].parameters()))
    assert log == ["g2'", "f2'"]


def test_no_grad_records_nothing(monkeypatch):
    monkeypatch.setattr(engine, "Tape", None)
    log: list[str] = []
    net = rg.ReversibleSequence([(Recorder("f", log), Recorder("g", log))])
    with torch.no_grad():
        net(torch.randn(2, 4))
    with torch.inference_mode():
        net(torch.randn(2, 4))
    assert log == ["f", "g", "f", "g"]


# Lifetimes


def watched_tapes(monkeypatch) -> list[weakref.ref]:
    tapes: list[weakref.ref] = []
    original = tape.Tape.run

    def run(self, *args):
        tapes.append(weakref.ref(self))
        return original(self, *args)

    monkeypatch.setattr(tape.Tape, "run", run)
    return tapes


@pytest.fixture
def no_collector():
    """Nothing may depend on the cycle collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_after_backward_nothing_of_the_tape_is_alive(monkeypatch):
    tapes = watched_tapes(monkeypatch)
    net = network(3, dropout=0.1)
    y = net(torch.randn(2, 4, 16, requires_grad=True))
    loss = y.sum()
    assert tapes[0]() is not None
    loss.backward()
    assert tapes[0]() is None  # although y and loss still are


@pytest.mark.usefixtures("no_collector")
def test_without_backward_the_tape_dies_with_the_outputs(monkeypatch):
    tapes = watched_tapes(monkeypatch)
    y = network(3)(torch.randn(2, 4, 16, requires_grad=True))
    assert tapes[0]() is not None
    del y
    assert tapes[0]() is None


@pytest.mark.usefixtures("no_collector")
def test_a_failure_in_either_pass_leaks_nothing(monkeypatch):
    tapes = watched_tapes(monkeypatch)
    net = network(3)

    failing = {"replaying": False}

    def fail(module, args):
        if rg.phase().replaying is failing["replaying"]:
            raise ValueError("planted")

    net.blocks[1][0].register_forward_pre_hook(fail)
    for failing["replaying"] in (False, True):
        with LiveBytes() as memory:
            with pytest.raises(ValueError, match="planted") as caught:
                net(torch.randn(2, 4, 16)).sum().backward()
            assert "update 2 (target 'a', fn Sequential)" in "".join(caught.value.__notes__)
            del caught
            net.zero_grad()
        assert memory.live == 0
        assert all(ref() is None for ref in tapes)


def test_a_pass_that_stops_half_way_holds_no_streams_afterwards():
    net = network(8)
    y = net(torch.randn(2, 4, 16))
    loss = y.sum()
    with LiveBytes() as memory:
        grads = torch.autograd.grad(loss, list(net.blocks[4].parameters()), retain_graph=True)
        del grads
    assert memory.live == 0


# What is refused


def test_unknown_stream():
    with pytest.raises(ValueError, match=r"update 1 \(target 'a', fn sin\): there is no stream 'c'; .*\['a', 'b'\]"):
        rg.run(
            [rg.Update("b", torch.cos, "a"), rg.Update("a", torch.sin, "c")], {"a": torch.ones(1), "b": torch.ones(1)}
        )


def test_nothing_runs_when_the_program_is_wrong():
    log: list[str] = []
    with pytest.raises(ValueError, match="no stream 'c'"):
        rg.run(
            [rg.Update("a", Recorder("f", log), "b"), rg.Update("a", torch.sin, "c")],
            {"a": torch.ones(1, 4), "b": torch.ones(1, 4)},
        )
    assert log == []


def test_not_an_update():
    with pytest.raises(TypeError, match="update 0 must be an Update"):
        rg.run([("a", torch.sin, "b")], {"a": torch.ones(1)})


def test_not_a_stream():
    with pytest.raises(TypeError, match=r"stream 'b'.*NoneType"):
        rg.run([], {"a": torch.ones(1), "b": {"x": None}})


def test_not_a_policy():
    with pytest.raises(TypeError, match=r"policy must be Reverse\(\)"):
        rg.run([], {"a": torch.ones(1)}, policy="reverse")


def test_a_fn_that_saves_other_tensors_in_its_replay_is_not_deterministic():
    def fickle(x):
        return x.sin() if rg.phase().replaying else x.sin().cos()

    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    out = rg.run([rg.Update("a", fickle, "b")], {"a": a, "b": b})
    with pytest.raises(RuntimeError, match=r"update 0 \(target 'a', fn fickle\) is not deterministic: .*1 tensors.* 2"):
        out["a"].sum().backward()


def test_a_pass_that_starts_in_the_middle_raises_and_says_so():
    kept = []

    def fn(x):
        kept.append(x.sin())
        return kept[-1].cos()

    b = torch.randn(3, requires_grad=True)
    rg.run([rg.Update("a", fn, "b")], {"a": torch.zeros(3), "b": b})
    with pytest.raises(RuntimeError, match=r"update 0 .*did not begin after the reversible program"):
        kept[0].sum().backward()


def test_invert_refuses_random_numbers():
    updates = [rg.Update("a", nn.Dropout(0.5), "b")]
    with pytest.raises(RuntimeError, match="invert: an update draws random numbers"):
        rg.invert(updates, {"a": torch.ones(4), "b": torch.ones(4)})


def test_invert_refuses_a_program_drawn_at_random():
    class Dropping(rg.Reversible):
        def updates(self):
            for _ in range(4):
                if torch.rand(()) < 0.5:
                    continue
                yield rg.Update("a", torch.sin, "b")

    class Listed(Dropping):
        def updates(self):
            return list(super().updates())

    for net in (Dropping(), Listed()):
        with pytest.raises(RuntimeError, match="invert: an update draws random numbers"):
            net.inverse({"a": torch.ones(4), "b": torch.ones(4)})


def test_an_inverse_numbers_the_updates_as_the_program_does():
    def fn(b):
        return b * (rg.phase().update + 1)

    program = [rg.Update("a", fn, "b"), rg.Update("b", fn, "a"), rg.Update("a", fn, "b")]
    start = {"a": torch.ones(1), "b": torch.ones(1)}
    assert rg.invert(program, rg.run(program, start)) == start
    with pytest.raises(ValueError, match=r"^update 2 .*fn returned shape"):
        rg.invert([*program[:2], rg.Update("a", lambda b: b[:0], "b")], start)


def test_the_host_does_not_do_more_per_update():
    """Where tensors are small, the engine's own calls are what a step costs: a change that adds some must say why."""

    def calls(depth: int) -> int:
        net = rg.ReversibleSequence([(nn.Linear(4, 4), nn.Tanh()) for _ in range(depth)])
        counted = 0

        def count(frame, event, _):
            nonlocal counted
            counted += event == "call" and frame.f_globals["__name__"].startswith("retrograd.")

        for profile in (None, count):  # the first step is not counted
            sys.setprofile(profile)
            try:
                net(torch.randn(2, 4)).sum().backward()
            finally:
                sys.setprofile(None)
        return counted

    per_update = (calls(12) - calls(4)) / 16
    assert 20 < per_update <= 76


# What torch has no public name for


def test_hooks_are_known_to_be_forbidden_where_torch_forbids_them():
    seen = []

    def look(x):
        seen.append(engine._hooks_forbidden())
        return x.sum()

    assert not engine._hooks_forbidden()
    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.jvp(look, (torch.ones(2),), (torch.ones(2),))
    with torch.autograd.graph.disable_saved_tensors_hooks("planted"):
        look(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        look(torch.ones(2))
    assert seen == [True] * 5
    assert not engine._hooks_forbidden()
