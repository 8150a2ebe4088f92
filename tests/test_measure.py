"""`measure`: the split adds up, the counts are right, and nothing is left changed."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from networks import Plain, pair, sequence, tokens
from retrograd.ledger import Ledger
from retrograd.measure import LiveBytes, Measurement, format_bytes, measure, parse_bytes
from retrograd.update import Step

POLICIES = [rg.Keep(), rg.Reverse(), rg.Reverse(anchor_every=2)]


def linears(depth: int, width: int = 16, policy: rg.Policy = rg.Reverse()) -> rg.ReversibleSequence:
    return rg.ReversibleSequence(
        [(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(depth)], policy=policy
    )


def weight_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


@pytest.mark.parametrize(("text", "size"), [("8GiB", 8 << 30), ("500MB", 500_000_000), ("0.5 KiB", 512), (4096, 4096)])
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("nonsense", ["", "GiB", "8 gallons", "-1", "1e400GiB", None, True, -4])
def test_nonsense_is_no_size(nonsense):
    with pytest.raises(ValueError, match="size in bytes"):
        parse_bytes(nonsense)


def test_sizes_are_written():
    assert [format_bytes(size) for size in (0, 1536, 8 << 30)] == ["0 B", "1.5 KiB", "8.0 GiB"]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_peak_is_that_of_a_step_nobody_observes_and_the_split_adds_up(policy):
    net, x = sequence(4, dropout=0.1, policy=policy), tokens(requires_grad=False)
    step = measure(net, x)
    with LiveBytes() as memory:
        net(x).square().mean().backward()
    assert step.peak == memory.peak + weight_bytes(net) + x.nbytes
    assert step.peak == step.weights + step.gradients + step.streams + step.saved + step.rest
    assert step.peak == max(sum(moment) for moment in step.timeline)
    assert step.activations == step.peak - step.weights - step.gradients
    assert step.weights == weight_bytes(net)


def test_buffers_are_weights():
    net = rg.ReversibleSequence([(nn.BatchNorm1d(4), nn.BatchNorm1d(4))])
    assert measure(net, torch.randn(3, 4)).weights == weight_bytes(net) == 2 * (4 * 16 + 8)


def test_gradients_are_what_grad_holds():
    """At the end of the step all of them are there, of the input too."""
    net, x = linears(2), torch.randn(4, 16, requires_grad=True)
    assert measure(net, x).timeline[-1][1] == sum(p.nbytes for p in net.parameters()) + x.nbytes


@pytest.mark.parametrize("depth", [2, 8])
def test_streams_are_their_current_values(depth):
    """Two streams; during the forward of kept activations what they were before counts as saved."""
    x = torch.randn(64, 16)
    for policy in POLICIES[:2]:
        step = measure(linears(depth, policy=policy), x)
        assert max(moment[2] for moment in step.timeline) == 2 * x.nbytes
    kept = measure(linears(depth, policy=rg.Keep()), x)
    saved = kept.timeline[kept.backward_at - 1][3]
    assert saved == 2 * depth * x.nbytes  # the input of each linear map but the last, which is a stream, and the output


def test_saved_tensors_do_not_grow_with_depth_when_reversed():
    def most_saved(depth, policy):
        return max(moment[3] for moment in measure(sequence(depth, policy=policy), tokens()).timeline)

    assert (
        most_saved(2, rg.Reverse()) == most_saved(6, rg.Reverse()) < most_saved(2, rg.Keep()) < most_saved(6, rg.Keep())
    )


def test_replays_and_calls_of_each_update():
    net = sequence(3)
    step = measure(net, tokens())
    assert step.replays == 6
    assert [(u.index, u.target, u.sources, u.calls, u.replays) for u in step.updates] == [
        (i, "ab"[i % 2], ("ba"[i % 2],), 2, 1) for i in range(6)
    ]
    net.policy = rg.Keep()
    assert measure(net, tokens()).replays == 0


def test_what_an_update_saves_is_what_keeping_it_costs():
    net, x = linears(3), torch.randn(5, 16)
    for policy in POLICIES:
        net.policy = policy
        saves = [update.saved for update in measure(net, x).updates]
        assert saves == [x.nbytes] * 6


def test_a_checkpoint_around_a_network_counts_as_replays():
    net = linears(2)
    step = measure(lambda x: checkpoint(net, x, use_reentrant=False), torch.randn(3, 16, requires_grad=True))
    assert [(update.calls, update.replays) for update in step.updates] == [(3, 2)] * 4


def test_a_program_inside_an_update():
    inner = linears(2)
    step = measure(rg.ReversibleSequence([(inner, nn.Linear(16, 16))]), torch.randn(3, 16))
    assert len(step.updates) == 2 + 4
    assert all(update.peak > 0 for update in step.updates)


def test_a_plain_network_has_no_updates():
    step = measure(Plain([pair() for _ in range(2)]).double(), tokens())
    assert (step.updates, step.replays) == ((), 0)
    assert step.saved > 0


def test_a_callable_its_weights_and_its_loss():
    net, x = linears(2), torch.randn(3, 16)
    step = measure(lambda x, *, scale: (net(x) * scale).sum(), x, scale=2.0)
    assert step.weights == weight_bytes(net)
    assert step.replays == 4


def test_outputs_in_a_tree():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = linears(1)

        def forward(self, x):
            return {"y": self.net(x), "mask": x > 0}

    assert measure(Two(), torch.randn(3, 16)).replays == 2


def test_autocast():
    net, x = linears(4, policy=rg.Keep()), torch.randn(256, 16)
    assert measure(net, x, autocast=torch.bfloat16).saved < measure(net, x).saved


def test_sparse_gradients_do_not_disturb():
    embedding = nn.Embedding(10, 16, sparse=True)
    net = linears(1)
    assert measure(lambda i: net(embedding(i)), torch.zeros(3, dtype=torch.long)).replays == 2


def test_gradients_are_left_as_they_were():
    net, x = linears(2), torch.randn(3, 16, requires_grad=True)
    net(x).sum().backward()
    before = [(p.grad, p.grad.clone()) for p in (*net.parameters(), x)]
    measure(net, x)
    for tensor, (grad, value) in zip((*net.parameters(), x), before, strict=True):
        assert tensor.grad is grad
        assert torch.equal(grad, value)


def test_what_is_observed_is_given_back_even_if_the_model_fails():
    places = [(Step, "call"), (Step, "join"), (Step, "unjoin"), (saved_tensors_hooks, "__enter__")]
    before = [vars(owner)[name] for owner, name in places]
    net = linears(1)
    calls = []

    def fails_when_observed(x):
        calls.append(1)
        if len(calls) == 3:
            raise ArithmeticError
        return net(x)

    with pytest.raises(ArithmeticError):
        measure(fails_when_observed, torch.randn(2, 16))
    assert [vars(owner)[name] for owner, name in places] == before
    assert all(not p._post_accumulate_grad_hooks for p in net.parameters() if p._post_accumulate_grad_hooks is not None)
    assert all(p.grad is None for p in net.parameters())


def test_nothing_to_train():
    with pytest.raises(ValueError, match="needs a gradient"):
        measure(nn.Linear(2, 2).requires_grad_(False), torch.randn(2, 2))


def test_bytes_on_another_device_count_as_none():
    ledger = Ledger(torch.device("cpu"))
    with ledger:
        meta, here = torch.empty(100, device="meta"), torch.empty(3)
    assert ledger.live == here.nbytes
    del meta, here
    assert (ledger.live, sum(ledger.split)) == (0, 0)


def test_storages_are_rounded_up():
    ledger = Ledger(torch.device("cpu"), rounding=512)
    with ledger:
        kept = [torch.empty(1), torch.empty(128), torch.empty(129)]
    assert ledger.live == 512 + 512 + 1024
    assert len(kept) == 3


def test_printed_it_is_a_table_of_80_columns():
    long = type("AnEntirelyUnreasonablyLongNameForANetwork", (nn.Linear,), {})
    net = rg.ReversibleSequence([(long(16, 16), nn.Linear(16, 16)) for _ in range(40)])
    lines = str(measure(net, torch.randn(2, 16))).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 40
    assert any(line.startswith("saved tensors") for line in lines)
    assert any("more" in line for line in lines)
    assert lines[-1].startswith("79  b <- Linear(a)")


def small() -> Measurement:
    return measure(linears(1), torch.randn(2, 16))


def test_plotted_it_is_a_timeline(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("step.png", "step.svg"):
        small().plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


def test_without_matplotlib_there_is_a_word_about_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install"):
        small().plot(tmp_path / "step.png")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_the_peak_is_the_allocators():
    net, x = linears(8, 512).cuda(), torch.randn(1024, 512, device="cuda")
    step = measure(net, x)
    assert step.weights == weight_bytes(net)
    assert step.peak == step.weights + step.gradients + step.streams + step.saved + step.rest
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    net(x).square().mean().backward()
    assert abs(torch.cuda.max_memory_allocated() - before + step.weights + x.nbytes - step.peak) < 1 << 20
