"""`check` finds each planted fault, finds nothing in sound modules, and leaves no trace."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from networks import WIDTH, Attention, feed_forward, pair, sequence, tokens
from retrograd.check import check
from retrograd.examine import Examination
from retrograd.report import Drift, GradientError, Problem, Report


class Calls(nn.Module):
    """A linear network and a function of what it returns: a place for a fault."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def planted(f: nn.Module | Callable[[Tensor], Tensor], depth: int = 2, **options: Any) -> rg.ReversibleSequence:
    """A sound network but for the f of its second block: update 2."""
    f = f if isinstance(f, nn.Module) else Calls(f)
    blocks = [pair() for _ in range(depth)]
    blocks[1] = (f, blocks[1][1])
    return rg.ReversibleSequence(blocks, **options).double()


def kinds(report: Report) -> set[str]:
    return {problem.kind for problem in report.problems}


def only(report: Report, kind: str) -> Problem:
    """The one problem, which must be of this kind, with a remedy."""
    assert kinds(report) == {kind}, str(report)
    (problem,) = report.problems
    assert problem.remedy
    assert not report.ok
    return problem


# ---- sound modules


def _dual(**options: Any) -> nn.Module:
    return rg.DualModality(
        [(Attention(WIDTH), feed_forward(WIDTH), Attention(WIDTH), feed_forward(WIDTH)) for _ in range(2)],
        ["self", "self"],
        **options,
    )


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).flatten(0, 1)).view_as(x).tanh()


class Remembering(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * rg.remember(lambda: ((x * 1e9).long() % 2).to(x.dtype))


class Checkpointed(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


SOUND: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "pairs": lambda: (sequence(4), (tokens(),)),
    "pairs in float32": lambda: (sequence(4).float(), (tokens().float(),)),
    "one input without grad": lambda: (sequence(2), (tokens(requires_grad=False),)),
    "two modalities": lambda: (_dual().double(), (tokens(), tokens())),
    "two exact modalities": lambda: (_dual(join=rg.ExactAdd()), (tokens().float(), tokens().float())),
    "midpoint": lambda: (rg.Midpoint([feed_forward(WIDTH) for _ in range(5)]), (tokens().float(),)),
    "exact midpoint": lambda: (
        rg.Midpoint([feed_forward(WIDTH) for _ in range(5)], join=rg.ExactAdd()),
        (tokens().float(),),
    ),
    "momentum": lambda: (rg.Momentum([feed_forward(WIDTH) for _ in range(5)]), (tokens().float(),)),
    "dropout": lambda: (sequence(3, 0.3), (tokens(),)),
    "exact dropout": lambda: (sequence(3, 0.3, join=rg.ExactAdd()).float(), (tokens().float(),)),
    "eval mode": lambda: (sequence(3, 0.3).eval(), (tokens(),)),
    "layer dropout": lambda: (sequence(6, 0.1, layer_dropout=0.5), (tokens(),)),
    "batch norm": lambda: (rg.ReversibleSequence([(Normed(), Normed()) for _ in range(3)]), (tokens().float(),)),
    "anchors": lambda: (sequence(4, policy=rg.Reverse(anchor_every=3)), (tokens(),)),
    "kept": lambda: (sequence(3, policy=rg.Keep()), (tokens(),)),
    "a remembered choice": lambda: (planted(Remembering()), (tokens(),)),
    "max pooling": lambda: (planted(nn.MaxPool1d(3, 1, 1)), (tokens(),)),
    "a checkpoint inside a fn": lambda: (
        planted(lambda y: checkpoint(torch.sin, y, use_reentrant=False)),
        (tokens(),),
    ),
    "inside a checkpoint": lambda: (Checkpointed(sequence(2, 0.1)), (tokens(),)),
    "inside another module": lambda: (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), sequence(2), nn.ReLU(), sequence(2)).double(),
        (tokens(),),
    ),
    "frozen weights": lambda: (_frozen(sequence(3)), (tokens(),)),
    "all of it frozen but the input": lambda: (sequence(3).requires_grad_(False), (tokens(),)),
}


def _frozen(net: rg.ReversibleSequence) -> rg.ReversibleSequence:
    net.blocks[1].requires_grad_(False)
    return net


@pytest.mark.parametrize("name", SOUND)
def test_nothing_in_a_sound_module(name: str) -> None:
    module, inputs = SOUND[name]()
    report = check(module, *inputs)
    assert report.ok, str(report)
    report.raise_for_problems()
    assert report.gradients
    assert report.gradients[0].error < report.tolerance


@pytest.mark.parametrize("inside", [False, True])
def test_nothing_under_bf16_autocast_with_float32_streams(inside: bool) -> None:
    class Autocast(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x)

    net, x = sequence(2).float(), tokens().float()
    if inside:
        report = check(Autocast(net), x)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            report = check(net, x)
    report.raise_for_problems()
    assert max(row.error for row in report.drift) > 0  # and so not by chance


def test_exact_to_the_bit_is_seen_as_such() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        report = check(sequence(8, 0.1, join=rg.ExactAdd()).float(), tokens().float())
    assert {row.error for row in report.gradients} == {row.error for row in report.drift} == {0.0}
    assert "exact to the bit after 16 updates undone" in str(report)


def test_keywords_reach_the_module_and_their_gradients_are_compared() -> None:
    context = torch.randn(2, 3, WIDTH, dtype=torch.double, requires_grad=True)
    report = check(sequence(2), tokens(), context=context)
    assert report.ok
    assert {"input 0", "input context"} <= {row.name for row in report.gradients}


def test_streams_that_are_dictionaries() -> None:
    class Fiber(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"0": self.linear(x["1"]).sin(), "1": self.linear(x["0"]).cos()}

    x = {"0": tokens().float(), "1": tokens().float()}
    report = check(rg.ReversibleSequence([(Fiber(), Fiber())] * 2), x)
    assert report.ok, str(report)
    assert {"input 0[0]", "input 0[1]"} <= {row.name for row in report.gradients}


def test_nested_programs_are_all_examined() -> None:
    inner = rg.ReversibleSequence([(nn.Linear(WIDTH, WIDTH), nn.Tanh())])
    outer = rg.ReversibleSequence([(inner, nn.Linear(WIDTH, WIDTH))])
    report = check(outer, tokens().float())
    assert report.ok, str(report)
    assert len(report.drift) == 4


# ---- planted faults


def test_finds_a_fn_that_depends_on_other_random_numbers() -> None:
    problem = only_cause(check(planted(lambda y: y * random.random()), tokens()), "not deterministic")
    assert "update 2 (target 'a', fn Calls)" in problem.where
    assert "returned" in problem.seen


def only_cause(report: Report, kind: str) -> Problem:
    """The one problem besides the gradients that it spoils."""
    causes = [problem for problem in report.problems if problem.kind != "gradient"]
    assert [problem.kind for problem in causes] == [kind], str(report)
    assert len(report.problems) <= 2
    assert causes[0].remedy
    return causes[0]


def test_finds_a_fn_that_counts_its_calls() -> None:
    calls = itertools.count(1)
    problem = only_cause(check(planted(lambda y: y / next(calls)), tokens()), "not deterministic")
    assert "update 2" in problem.where


def test_finds_a_fn_that_saves_other_tensors_the_second_time() -> None:
    calls = itertools.count()
    problem = only(check(planted(lambda y: y.sin() if next(calls) % 2 else y + 1), tokens()), "not deterministic")
    assert "saved other tensors" in problem.seen


def test_finds_a_fn_that_does_something_else_in_the_replay() -> None:
    def fn(y: Tensor) -> Tensor:
        phase = rg.phase()
        return y * 1.01 if phase is not None and phase.replaying else y * 1.0

    assert "update 2" in only_cause(check(planted(fn), tokens()), "not deterministic").where


def test_finds_a_fn_that_differs_in_what_it_saves_only() -> None:
    calls = itertools.count(1)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(torch.full_like(x, next(calls)))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0]

    assert "saved values" in only_cause(check(planted(Scaled.apply), tokens()), "not deterministic").seen


def test_finds_last_bits_that_an_exact_join_needs() -> None:
    """With Add nobody would notice; the grid may round the other way."""
    calls = itertools.count()
    net = planted(lambda y: y * (1 + 1e-7 * (next(calls) % 2)), join=rg.ExactAdd(2.0**-20)).float()
    assert "update 2" in only_cause(check(net, tokens().float()), "not deterministic").where


def test_finds_a_fn_that_changes_its_source() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    x = tokens()
    kept = x.detach().clone()
    problem = only(check(planted(InPlace()), x), "changes its inputs")
    assert "update 2" in problem.where
    assert torch.equal(x, kept)


def test_finds_a_fn_that_changes_a_keyword() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return x * memory.add_(1)

    memory = torch.ones(WIDTH, dtype=torch.double)
    problem = only(check(planted(InPlace()), tokens(), memory=memory), "changes its inputs")
    assert "keyword 'memory'" in problem.seen
    assert memory.sum() == WIDTH


class OnContext(torch.autograd.Function):
    """Cubes, and holds on to a tensor in the way that autograd does not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, what: str) -> Tensor:
        out = x**3
        ctx.held = {"input": x, "output": out, "other": x.square()}[what]
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 3 * ctx.saved_tensors[0] ** 2, None


@pytest.mark.parametrize("what", ["input", "output", "other"])
def test_finds_a_tensor_on_the_ctx_of_a_function(what: str) -> None:
    class Cube(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return OnContext.apply(x, what)

    problem = only(check(planted(Cube()), tokens()), "holds memory")
    assert "update 2" in problem.where
    assert f"{tokens().nbytes} bytes stay alive" in problem.seen
    assert "save_for_backward" in problem.remedy


def test_finds_a_tensor_that_a_module_holds() -> None:
    class Curious(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x.sin()
            return self.last * 2

    only(check(planted(Curious()), tokens()), "holds memory")


class Hashed(nn.Module):
    """Keeps what falls into even buckets, which are so narrow that any drift moves some values to the next."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        buckets = (x.detach() * 2.0**52).long() % 2
        if self.how == "indices":
            return self.linear(x).gather(-1, buckets)
        if self.how == "mask":
            return self.linear(x).masked_fill(buckets.bool(), 0.0)
        return self.linear(x) * buckets.to(x.dtype)


@pytest.mark.parametrize("how", ["indices", "mask", "one-hot"])
def test_finds_a_discrete_choice_that_flipped(how: str) -> None:
    report = check(planted(Hashed(how), depth=6), tokens())
    problem = only_cause(report, "discrete choice")
    assert "update 2" in problem.where
    assert "remember" in problem.remedy
    assert check(planted(Hashed(how), depth=6, join=rg.ExactAdd()), tokens()).ok


ELSEWHERE: dict[str, nn.Module] = {}


def test_finds_a_buffer_that_the_replay_changes() -> None:
    """Reached through a name that is put together as it runs: the engine cannot know."""

    def fn(y: Tensor) -> Tensor:
        return globals()["ELSE" + "WHERE"]["norm"](y.flatten(0, 1)).view_as(y)

    net = planted(fn)
    net.norm = ELSEWHERE["norm"] = nn.BatchNorm1d(WIDTH).double()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    report = check(net, tokens())
    assert kinds(report) == {"buffer"}
    assert {problem.where for problem in report.problems} == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert all(torch.equal(before[name], buffer) for name, buffer in net.named_buffers())


def test_finds_a_join_that_does_not_undo_itself() -> None:
    class Halfway(rg.Join):
        def apply(self, target: Tensor, *out: Tensor) -> Tensor:
            return target + out[0]

        def invert(self, target: Tensor, *out: Tensor) -> Tensor:
            return target - out[0] / 2

    class Net(rg.Reversible):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.g = feed_forward(WIDTH), feed_forward(WIDTH)

        def updates(self) -> Any:
            yield rg.Update("a", self.f, "b")
            yield rg.Update("b", self.g, "a", join=Halfway())

    report = check(Net(), {"a": tokens().float(), "b": tokens().float()})
    assert "update 1 (target 'b'" in only_cause(report, "join").where
    assert "gradient" in kinds(report)


def test_finds_gradients_that_drift_spoils_in_bf16_streams() -> None:
    report = check(sequence(24).bfloat16(), tokens().bfloat16())
    problem = only(report, "gradient")
    assert "streams in float32" in problem.remedy
    assert report.gradients == sorted(report.gradients, key=lambda row: -row.error)
    assert problem.where == report.gradients[0].name
    assert report.growth()[-1].undone == 48
    assert report.growth()[-1].error > 2 * report.growth()[0].error


def test_finds_gradients_that_drift_spoils_in_a_deep_momentum_network() -> None:
    net = rg.Momentum([feed_forward(WIDTH) for _ in range(40)], gamma=0.5)
    assert "ExactAdd" in only(check(net, tokens().float()), "gradient").remedy
    net.policy = rg.Reverse(anchor_every=8)
    report = check(net, tokens().float())
    assert report.ok, str(report)
    assert max(row.undone for row in report.drift) == 8


def test_finds_a_stream_that_leaves_the_range_of_its_join() -> None:
    problem = only_cause(check(planted(lambda y: y * 1e4, join=rg.ExactAdd()).float(), tokens().float()), "error")
    assert problem.where == "update 2 (target 'a', fn Calls)"
    assert "its target left the range" in problem.seen


def test_finds_a_fn_that_fails_in_the_replay() -> None:
    def fn(y: Tensor) -> Tensor:
        phase = rg.phase()
        if phase is not None and phase.replaying:
            raise ArithmeticError("twice is too much")
        return y

    assert "twice is too much" in only(check(planted(fn), tokens()), "not deterministic").seen


def test_errors_of_the_engine_in_the_forward_are_problems() -> None:
    class Mixed(rg.Reversible):
        def updates(self) -> Any:
            yield rg.Update("a", torch.sin, "b", join=rg.ExactAdd())
            yield rg.Update("a", torch.sin, "b")

    x = tokens().float()
    assert "meets" in only(check(Mixed(), {"a": x, "b": x}), "error").seen


def test_faults_of_an_update_with_kept_activations_are_none() -> None:
    class Net(rg.Reversible):
        def __init__(self, policy: rg.Policy | None) -> None:
            super().__init__()
            self.f, self.g = Calls(lambda y: y * random.random()), feed_forward(WIDTH)
            self.mine = policy

        def updates(self) -> Any:
            for _ in range(2):
                yield rg.Update("a", self.f, "b", policy=self.mine)
                yield rg.Update("b", self.g, "a")

    streams = {"a": tokens().float(), "b": tokens().float()}
    assert "not deterministic" in kinds(check(Net(None), streams))
    random.seed(0)
    found = check(Net(rg.Keep()), streams)
    assert "not deterministic" not in kinds(found)
    assert {row.update[:8] for row in found.drift} == {"update 1", "update 3"}


def test_two_programs_are_told_apart() -> None:
    net = nn.Sequential(sequence(2), planted(lambda y: y * random.random()))
    report = check(net, tokens())
    assert only_cause(report, "not deterministic").where == "1, call 1: update 2 (target 'a', fn Calls)"
    assert len(report.drift) == 8


# ---- no trace


def _everything(module: nn.Module) -> dict[str, Any]:
    return {
        "state": {name: tensor.clone() for name, tensor in module.state_dict().items()},
        "who": {name: id(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]},
        "gradients": {name: (id(p.grad), p.grad.clone()) for name, p in module.named_parameters()},
        "flags": [each.training for each in module.modules()],
        "attributes": [sorted(each.__dict__) for each in module.modules()],
        "policies": [id(each.policy) for each in module.modules() if isinstance(each, rg.Reversible)],
        "needs": [p.requires_grad for p in module.parameters()],
        "random": torch.get_rng_state(),
    }


def _assert_equal(now: Any, then: Any) -> None:
    assert now.pop("attributes") == then.pop("attributes")
    torch.testing.assert_close(now, then, rtol=0, atol=0)


class Stateful(nn.Module):
    """Batch norm, dropout, and a buffer that is exchanged for another at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = Normed(), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().mean((0, 1))
        return self.dropout(self.norm(x))


@pytest.mark.parametrize("fails", [None, "in the forward", "in the backward", "in check"])
def test_leaves_no_trace(fails: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(y: Tensor) -> Tensor:
        if fails == "in the forward":
            raise ArithmeticError
        if fails == "in the backward" and y.requires_grad:
            y.register_hook(lambda grad: 1 / 0)
        return y

    net = rg.ReversibleSequence([(Stateful(), Stateful()), (Calls(fn), Stateful())])
    net.blocks[1][1].eval()
    x = tokens().float().detach().requires_grad_()
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    if fails == "in check":
        monkeypatch.setattr(Examination, "run", lambda self: 1 / 0)
    before = _everything(net)
    if fails is None:
        assert check(net, x).ok
    else:
        with pytest.raises(ArithmeticError):
            check(net, x)
    _assert_equal(_everything(net), before)
    assert x.grad is None


def test_leaves_no_trace_of_a_problem() -> None:
    net, x = planted(lambda y: y * random.random()), tokens()
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = _everything(net)
    assert not check(net, x).ok
    _assert_equal(_everything(net), before)


def test_a_watched_policy_neither_warns_nor_raises() -> None:
    """It would warn once in the life of a process: not here."""
    net = sequence(24, policy=rg.Reverse(watch=1e-9, on_drift="raise")).bfloat16()
    assert kinds(check(net, tokens().bfloat16())) == {"gradient"}


def test_auto_learns_nothing_from_it() -> None:
    policy = rg.Auto(budget="1GiB")
    net = sequence(2, policy=policy)
    assert check(net, tokens()).ok
    assert not policy.learned
    assert net.policy is policy


def test_works_with_grad_disabled_around_it() -> None:
    with torch.no_grad():
        assert check(sequence(2), tokens()).ok


# ---- bad input


def test_refuses_a_module_without_reversible() -> None:
    with pytest.raises(ValueError, match="no Reversible in Linear"):
        check(nn.Linear(2, 2), torch.ones(2))


def test_refuses_what_is_no_module() -> None:
    with pytest.raises(TypeError, match="a module and its inputs"):
        check(torch.sin, torch.ones(2))  # type: ignore[arg-type]


def test_refuses_an_output_without_grad() -> None:
    with pytest.raises(ValueError, match="nothing in the output requires grad"):
        check(sequence(2).requires_grad_(False), tokens(requires_grad=False))


def test_refuses_a_reversible_that_does_not_run() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.linear = sequence(1), nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    with pytest.raises(ValueError, match="no Reversible in Idle ran"):
        check(Idle(), tokens())


@pytest.mark.parametrize("tolerance", [0, -1.0, float("nan")])
def test_refuses_a_tolerance_that_is_none(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance must be a positive"):
        check(sequence(1), tokens(), tolerance=tolerance)


def test_refuses_lazy_modules() -> None:
    net = rg.ReversibleSequence([(nn.LazyLinear(WIDTH), nn.Tanh())])
    with pytest.raises(ValueError, match="run it once before"):
        check(net, tokens().float())


def test_errors_of_the_user_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"(?i)shape"):
        check(sequence(1), torch.randn(2, WIDTH + 1, dtype=torch.double))


def test_refuses_a_keyword_that_no_network_takes() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        check(sequence(1), tokens(), nonsense=1)


def test_tolerance_is_of_the_streams_unless_given() -> None:
    assert check(sequence(1), tokens()).tolerance == 1e-6
    assert check(sequence(1).float(), tokens().float()).tolerance == 1e-3
    assert not check(sequence(8), tokens(), tolerance=1e-18).ok


# ---- the report


def _report(problems: list[Problem]) -> Report:
    gradients = [GradientError("very." * 40 + f"weight{i}", 10.0**-i, 1.0) for i in range(30)]
    drift = [Drift(f"update {i} (target 'a', fn F)", (20 - i) * 1e-8, 20 - i) for i in range(20)]
    return Report(gradients, drift, problems)


def test_a_report_is_a_table() -> None:
    text = str(_report([Problem("join", "update 3", "something " * 30, "another way " * 30)]))
    lines = text.splitlines()
    assert max(map(len, lines)) < 100
    assert lines[0] == "check: 1 problem (gradients may be 0.001 off)"
    assert "the worst 10 of 30" in text
    assert "weight9" in text
    assert "weight10" not in text
    assert "the worst 10 of 20" in text
    assert "update 0 " in text
    assert "update 12 " not in text
    assert "1e-08 after 1, 2e-08 after 2, 4e-08 after 4, 8e-08 after 8, 2e-07 after 16, 2e-07 after 20" in " ".join(
        text.split()
    )
    assert "1. join: update 3" in text
    assert text.index("seen: something") < text.index("remedy: another way")


def test_a_report_raises_for_problems() -> None:
    sound = _report([])
    sound.raise_for_problems()
    assert sound.ok
    assert str(sound).startswith("check: no problems")
    with pytest.raises(RuntimeError, match=r"check found 2 problems:\n- join: x: y. z\n- buffer: b: c. d"):
        _report([Problem("join", "x", "y", "z"), Problem("buffer", "b", "c", "d")]).raise_for_problems()


def test_a_report_of_nothing_reversed() -> None:
    assert "drift of the reconstruction: none" in str(check(sequence(1, policy=rg.Keep()), tokens()))


def test_complex_numbers_of_single_precision_have_its_tolerance() -> None:
    net = rg.ReversibleSequence([(nn.Linear(4, 4, dtype=torch.complex64), nn.Identity()) for _ in range(4)])
    assert check(net, torch.randn(2, 4, dtype=torch.complex64)).tolerance == 1e-3
    net = rg.ReversibleSequence([(nn.Linear(4, 4, dtype=torch.complex128), nn.Identity()) for _ in range(4)])
    assert check(net, torch.randn(2, 4, dtype=torch.complex128)).tolerance == 1e-6
