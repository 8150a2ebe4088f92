"""`plan` predicts what `measure` finds, to the percent, without allocating."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import retrograd as rg
from networks import feed_forward, pair
from retrograd.measure import measure
from retrograd.plan import plan


def transformer() -> rg.ReversibleSequence:
    return rg.ReversibleSequence([pair(32, dropout=0.1) for _ in range(4)])


class Convolutional(nn.Module):
    """Embedding layers around the program, buffers, streams that are halves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.body = rg.ReversibleSequence(
            [(self.branch(), self.branch()) for _ in range(3)], split=1, merge="concat", join=rg.Add()
        )
        self.head = nn.Linear(16, 10)

    def branch(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


MODELS = [(transformer, (4, 48, 32)), (Convolutional, (4, 3, 24, 24))]


class CheckpointedPairs(nn.Module):
    """What `checkpointed` is meant to be, written by hand."""

    def __init__(self, net: rg.ReversibleSequence) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        streams = self.net.split(x)
        a, b = streams["a"], streams["b"]

        def block(f, g, a, b):
            a = a + f(b)
            return a, b + g(a)

        for f, g in self.net.pairs():
            a, b = checkpoint(block, f, g, a, b, use_reentrant=False)
        return self.net.merge({"a": a, "b": b})


def prepared(model: nn.Module, row: str) -> nn.Module:
    """A real model that does what a row of the plan says."""
    for name, module in list(model.named_modules()):
        if isinstance(module, rg.ReversibleSequence):
            module.policy = rg.Keep() if row == "kept" else rg.Reverse()
            if row == "checkpointed":
                if not name:
                    return CheckpointedPairs(module)
                setattr(model, name, CheckpointedPairs(module))
    return model


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("build", "shape"), MODELS, ids=["transformer", "convolutional"])
def test_the_plan_is_within_a_percent_of_the_measured_peak(build, shape, autocast):
    found = plan(build, shape, autocast=autocast)
    assert [row.policy for row in found.rows] == ["kept", "checkpointed", "reversed"]
    for row in found.rows:
        real = measure(prepared(build(), row.policy), torch.randn(shape), autocast=autocast)
        assert row.peak == pytest.approx(real.peak, rel=0.01)
        assert row.activations == pytest.approx(real.activations, rel=0.01)
        assert found.weights == real.weights
    assert found["reversed"].peak < found["kept"].peak


def test_auto_keeps_more_for_a_larger_budget_and_stays_within_it():
    budgets = [1_000_000, 2_000_000, 1 << 40]
    found = plan(transformer, (4, 48, 32), budgets=budgets)
    rows = found.rows[3:]
    assert [row.policy for row in rows] == ["Auto(977 KiB)", "Auto(1.9 MiB)", "Auto(1.0 TiB)"]
    assert [row.peak for row in rows] == sorted(row.peak for row in rows)
    assert [row.calls for row in rows] == sorted((row.calls for row in rows), reverse=True)
    assert all(row.activations <= budget for row, budget in zip(rows, budgets, strict=True))
    assert rows[-1].peak == found["kept"].peak
    assert rows[-1].relative == 1.0


def test_auto_is_predicted_to_the_percent_too():
    found = plan(transformer, (4, 48, 32), budgets=["1.5MB"])
    net = transformer()
    net.policy = rg.Auto("1.5MB")
    real = measure(net, torch.randn(4, 48, 32))
    assert found["Auto(1.5MB)"].peak == pytest.approx(real.peak, rel=0.01)
    assert found["Auto(1.5MB)"].calls == 8 + real.replays


def test_a_budget_that_cannot_be_met_is_a_note():
    found = plan(transformer, (4, 48, 32), budgets=["1KiB"])
    assert len(found.rows) == 3
    assert "cannot be met" in found.notes[0]


def test_cost_in_calls_and_flops():
    found = plan(transformer, (4, 48, 32))
    assert [row.calls for row in found.rows] == [8, 16, 16]
    assert found["kept"].relative == 1.0
    assert 1.0 < found["checkpointed"].relative <= found["reversed"].relative < 1.4


def test_flops_are_those_of_torch():
    def build():
        return rg.ReversibleSequence([(nn.Linear(8, 8), nn.Conv1d(4, 4, 1)) for _ in range(3)])

    for policy, row in ((rg.Keep(), "kept"), (rg.Reverse(), "reversed")):
        net = build()
        net.policy = policy
        with FlopCounterMode(display=False) as counter:
            net(torch.randn(2, 4, 8)).square().mean().backward()
        assert plan(build, (2, 4, 8))[row].flops == counter.get_total_flops()


def test_a_model_larger_than_this_machine():
    """A pebibyte of kept activations."""

    def build():
        return rg.ReversibleSequence([(nn.Linear(1 << 16, 1 << 16), nn.Linear(1 << 16, 1 << 16)) for _ in range(32)])

    found = plan(build, (64, 1 << 20, 1 << 16), card="80GiB")
    assert found["kept"].activations > 1 << 50
    assert not any(row.fits for row in found.rows)


def test_inputs_of_every_kind_give_one_plan():
    with FakeTensorMode():
        fake = torch.empty(4, 48, 32)
    real, meta = torch.randn(4, 48, 32), torch.empty(4, 48, 32, device="meta")
    small = functools.partial(rg.ReversibleSequence, [(nn.Linear(32, 32), nn.Linear(32, 32))])
    plans = [plan(small, x) for x in ((4, 48, 32), real, meta, fake, torch.Size([4, 48, 32]))]
    assert all(each == plans[0] for each in plans)


def test_integers_and_keywords():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.net = nn.Embedding(10, 32), transformer()

        def forward(self, tokens, *, context):
            return self.net(self.embed(tokens), context=context)

    tokens, context = torch.zeros(8, 50, dtype=torch.long), torch.randn(8, 40, 32, requires_grad=True)
    found = plan(Model, tokens, context=context)
    real = measure(Model(), tokens, context=context)
    assert found["reversed"].peak == pytest.approx(real.peak, rel=0.01)


def test_a_model_that_is_there_is_left_alone():
    net = transformer()
    policy, weight, before = net.policy, net.blocks[0][0].query.weight, net.state_dict()
    assert plan(net, (4, 48, 32)) == plan(transformer, (4, 48, 32))
    assert plan(lambda: net, (4, 48, 32)) == plan(transformer, (4, 48, 32))
    assert net.policy is policy
    assert "run" not in vars(net)
    assert net.blocks[0][0].query.weight is weight
    assert weight.grad is None
    assert all(torch.equal(now, then) for now, then in zip(net.state_dict().values(), before.values(), strict=True))


@pytest.mark.parametrize(
    "convert", [lambda net: net.double(), lambda net: net.half().double(), lambda net: net.to("cpu")]
)
def test_a_build_that_converts_its_model(convert):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = rg.ReversibleSequence([(nn.Linear(8, 8), nn.GRUCell(8, 8))])
            self.tied = nn.Linear(8, 8)
            self.tied.weight = self.net.blocks[0][0].weight

        def forward(self, x):
            return self.tied(self.net(x))

    model = convert(Tied())
    x = torch.randn(2, 8, dtype=next(model.parameters()).dtype)
    assert plan(lambda: convert(Tied()), x).weights == measure(model, x).weights
    assert nn.Module._apply.__module__ == "torch.nn.modules.module"


def test_exact_joins():
    def build():
        return rg.ReversibleSequence([pair(32) for _ in range(3)], join=rg.ExactAdd())

    real = measure(build(), torch.randn(4, 48, 32))
    assert plan(build, (4, 48, 32))["reversed"].peak == pytest.approx(real.peak, rel=0.01)


def test_other_policies_are_rows_too():
    found = plan(transformer, (4, 48, 32), also=[rg.Reverse(anchor_every=2), rg.Keep(), rg.Reverse(watch=0.1)])
    assert [row.policy for row in found.rows[3:]] == ["Reverse(anchor_every=2)", "Keep()", "Reverse(watch=0.1)"]
    assert rg.last_drift() is None or rg.last_drift() >= 0  # no fake tensor is left there
    assert found["Keep()"].peak == found["kept"].peak


def test_the_optimizer_takes_its_share():
    bare, adam = plan(transformer, (4, 48, 32)), plan(transformer, (4, 48, 32), optimizer_states=2)
    assert adam.states == 2 * bare.weights
    assert adam["reversed"].peak - bare["reversed"].peak == adam.states
    assert adam["reversed"].activations == bare["reversed"].activations


def test_a_card_that_is_large_enough_for_some():
    found = plan(transformer, (4, 48, 32), card="1.5MiB")
    assert [row.fits for row in found.rows] == [False, True, True]
    assert plan(transformer, (4, 48, 32))["kept"].fits is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is CUDA it is used")
def test_without_a_gpu_a_plan_for_cuda_is_made_on_cpu_operators_and_says_so():
    cuda, cpu = plan(transformer, (4, 48, 32), device="cuda"), plan(transformer, (4, 48, 32))
    assert "no GPU here" in str(cuda)
    assert all(row.peak % 512 == 0 for row in cuda.rows)
    assert all(b.peak <= a.peak < 1.2 * b.peak for a, b in zip(cuda.rows, cpu.rows, strict=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_on_cuda_the_plan_is_close_to_the_allocator(autocast):
    """Attention is left out: its kernels have workspaces of their own, which a plan cannot see."""

    def build():
        return rg.ReversibleSequence([(feed_forward(512, 0.1), feed_forward(512)) for _ in range(12)])

    found = plan(build, (8, 2048, 512), device="cuda", autocast=autocast)
    for row in found.rows:
        x = torch.randn(8, 2048, 512, device="cuda")
        real = measure(prepared(build().cuda(), row.policy), x, autocast=autocast)
        assert row.peak == pytest.approx(real.peak, rel=0.05)


@pytest.mark.parametrize("name", ["language", "pixels", "reformer", "video and audio", "particles"])
def test_every_model(name):
    """Planned first: what the fake step leaves behind must not disturb the real one."""
    from retrograd.models import AxialPixels, LanguageModel
    from retrograd.models.reformer import Reformer
    from retrograd.models.se3 import SE3Transformer
    from retrograd.models.video_audio import VideoAudio

    tokens = torch.randint(8, (2, 32))
    build, inputs = {
        "language": (lambda: LanguageModel(4, 32, length=32), (tokens,)),
        "pixels": (lambda: AxialPixels((8, 4), 8, 4, 32), (tokens.view(2, 8, 4),)),
        "reformer": (lambda: Reformer(4, 32, vocabulary=8, heads=2, length=32, bucket_size=8), (tokens,)),
        "video and audio": (
            lambda: VideoAudio(4, 32, 16, picture=(8, 8, 3), patch=4, window=20),
            (torch.rand(2, 5, 8, 8, 3), torch.randn(2, 100)),
        ),
        "particles": (
            lambda: SE3Transformer({0: 1, 2: 1}, {0: 1, 1: 1}, depth=3, width=16, max_degree=2, cutoff=3.0),
            ({0: torch.randn(2, 6, 1, 1), 2: torch.randn(2, 6, 1, 5)}, torch.randn(2, 6, 3)),
        ),
    }[name]
    planned = rg.plan(build, *inputs)["reversed"].peak
    assert planned == pytest.approx(rg.measure(build(), *inputs).peak, rel=0.01)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"optimizer_states": -1}, ValueError, "optimizer_states must be a number of tensors, 0 or more, not -1"),
        ({"budgets": "8GiB"}, TypeError, r"budgets is a list, such as \['8GiB'\]"),
        ({"budgets": [0.5]}, ValueError, "a fraction of the card; say how large it is"),
        ({"budgets": [0]}, ValueError, "Auto: budget must be"),
        ({"also": ["keep"]}, TypeError, "also takes policies"),
        ({"autocast": "bf16"}, TypeError, "autocast must be a dtype"),
    ],
)
def test_what_cannot_be_planned(options, error, message):
    with pytest.raises(error, match=message):
        rg.plan(lambda: rg.ReversibleSequence([(nn.Linear(4, 4), nn.Linear(4, 4))]), (2, 4), **options)


def test_a_fraction_is_one_of_the_card_and_policies_learn_nothing():
    def build():
        return rg.ReversibleSequence([(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)])

    auto = rg.Auto("1MiB")
    found = rg.plan(build, (64, 16), card="80KiB", budgets=[0.5, "40KiB", "2KiB"], also=[auto])
    assert found["Auto(0.5)"].peak == found["Auto(40KiB)"].peak
    with pytest.raises(KeyError, match=r"no row .*Auto\(2KiB\).*; there are kept, .*budget of 2.0 KiB cannot be met"):
        found["Auto(2KiB)"]
    assert not auto.learned


def test_no_reversible():
    with pytest.raises(ValueError, match="no Reversible"):
        plan(lambda: nn.Linear(2, 2), (2, 2))


def test_build_must_return_a_module():
    with pytest.raises(TypeError, match="module"):
        plan(lambda: 3, (2, 2))


def test_a_model_that_asks_for_values():
    class Asks(nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    with pytest.raises(ValueError, match="without data"):
        plan(lambda: rg.ReversibleSequence([(Asks(), nn.Linear(4, 4))]), (2, 4))


def test_printed_it_is_a_table_of_80_columns():
    text = str(plan(transformer, (4, 48, 32), card="80GiB", budgets=["8GiB"], device="cuda", also=[rg.Reverse(16)]))
    assert max(map(len, text.splitlines())) <= 80
    assert "reversed" in text
    assert "yes" in text


def test_every_policy_has_a_row() -> None:
    def rows(**options) -> list[str]:
        return [row.policy for row in plan(transformer, (1, 4, 32), **options).rows[3:]]

    assert rows(also=(policy for policy in [rg.Reverse(anchor_every=2)])) == ["Reverse(anchor_every=2)"]
    saving = [rg.Reverse(save="attention"), rg.Reverse(save=["mm", "addmm"]), rg.Reverse(save="output")]
    assert rows(also=saving) == [
        "Reverse(save='attention')",
        "Reverse(save=['aten.addmm', 'aten.mm'])",
        "Reverse(save='output')",
    ]
    assert rows(budgets=[2**30, 2**30 + 1]) == ["Auto(1.0 GiB)", f"Auto({2**30 + 1} bytes)"]
