"""What the device finds out: flags that arrive at once or late, and drift that nobody overlooks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from networks import loss_of, sequence, tokens
from retrograd import alarms
from retrograd.alarms import Arriving, RangeAlarms
from retrograd.check import check
from retrograd.measure import LiveBytes
from retrograd.update import Step

REMEDIES = r"relative error of .*watch=.*ExactAdd\(\), Reverse\(anchor_every=...\), streams in float32"


@pytest.fixture(autouse=True)
def _first_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as a process does: nothing has been warned about."""
    monkeypatch.setattr(alarms, "_warned", set())
    monkeypatch.setattr(alarms, "_drifts", alarms._Drifts())


def narrow(**options: Any) -> tuple[rg.ReversibleSequence, Tensor]:
    """A network that drifts: bf16 streams."""
    net = sequence(16, policy=rg.Reverse(**{"watch": 1e-3, **options})).bfloat16()
    return net, tokens().bfloat16().detach().requires_grad_()


def step(net: nn.Module, x: Tensor) -> None:
    loss_of(net(x)).backward()


# ---- drift


def test_drift_is_warned_about_once() -> None:
    net, x = narrow()
    with pytest.warns(rg.DriftWarning, match=REMEDIES):
        step(net, x)
    step(net, x)  # a warning would be an error here


def test_other_policies_warn_for_themselves() -> None:
    for watch in (1e-3, 2e-3):
        with pytest.warns(rg.DriftWarning, match=f"watch={watch:g}"):
            step(*narrow(watch=watch))


def test_drift_raises_where_asked_to() -> None:
    net, x = narrow(on_drift="raise")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=REMEDIES):
            step(net, x)


def test_the_module_works_after_drift_has_raised() -> None:
    net, x = narrow(on_drift="raise")
    with pytest.raises(RuntimeError, match=REMEDIES):
        step(net, x)
    net.policy = rg.Reverse(watch=1.0, on_drift="raise")
    step(net, x)


@pytest.mark.parametrize("on_drift", ["warn", "raise"])
def test_sound_streams_are_silent(on_drift: Any) -> None:
    net, x = sequence(16, policy=rg.Reverse(watch=1e-12, on_drift=on_drift)), tokens()
    step(net, x)
    drift = rg.last_drift()
    assert drift is not None
    assert 0 < drift < 1e-12


def test_exact_streams_drift_by_nothing() -> None:
    net = sequence(16, join=rg.ExactAdd(), policy=rg.Reverse(watch=1e-30, on_drift="raise")).float()
    step(net, tokens().float())
    assert rg.last_drift() == 0.0


def test_nothing_is_compared_unless_asked_for() -> None:
    net, x = narrow(watch=None)
    step(net, x)
    assert rg.last_drift() is None


def test_last_drift_is_what_check_measures() -> None:
    net, x = narrow(watch=10.0)
    step(net, x)
    last = rg.last_drift()
    measured = {row.update: row.error for row in check(net, x).drift}
    worst = max(measured["update 0 (target 'a', fn Attention)"], measured["update 1 (target 'b', fn Sequential)"])
    assert last == pytest.approx(worst, rel=0.3)  # there relative to the target before and after, here before


def test_last_drift_is_of_the_last_pass() -> None:
    step(*narrow(watch=10.0))
    first = rg.last_drift()
    step(sequence(2, policy=rg.Reverse(watch=10.0)), tokens())
    second = rg.last_drift()
    assert first is not None
    assert second is not None
    assert first > 1e-3 > 1e-12 > second


def test_last_drift_is_the_worst_of_all_programs_of_a_pass() -> None:
    one, x = narrow(watch=10.0)
    other = sequence(1, policy=rg.Reverse(watch=5.0)).bfloat16()
    for nets in ((one, other), (other, one)):
        step(nn.Sequential(*nets), x)
        both = rg.last_drift()
        step(one, x)
        alone = rg.last_drift()
        assert both is not None
        assert alone is not None
        assert both > alone / 10


def test_a_drift_is_seen_from_every_thread() -> None:
    """On a device, autograd works in threads of its own."""
    net, x = narrow(watch=10.0)
    thread = threading.Thread(target=lambda: step(net, x))
    thread.start()
    thread.join()
    assert rg.last_drift() is not None


def test_anchors_are_watched_each() -> None:
    net, x = narrow(watch=10.0)
    step(net, x)
    whole = rg.last_drift()
    net.policy = rg.Reverse(watch=10.0, anchor_every=4)
    step(net, x)
    parts = rg.last_drift()
    assert whole is not None
    assert parts is not None
    assert 0 < parts < whole


def test_other_values_are_looked_at_each_time() -> None:
    """A stream of many values is sampled; a fault in any of them is found in the end."""
    leaf, policy = torch.arange(256.0 * 50), rg.Reverse(watch=1.0)
    assert {int(alarms.DriftWatch(policy, [leaf]).samples[0][0]) for _ in range(200)} == set(range(50))


def test_small_and_empty_streams_are_looked_at_whole() -> None:
    watch = alarms.DriftWatch(rg.Reverse(watch=1.0), [torch.arange(7.0), torch.zeros(0), torch.tensor(3.0)])
    assert [sample.numel() for sample in watch.samples] == [7, 0, 1]
    watch.compare([torch.arange(7.0), torch.zeros(0), torch.tensor(3.3)], current_pass=1)
    assert rg.last_drift() == pytest.approx(0.3 / 6)  # relative to the largest value of all


@pytest.mark.parametrize("drifted", [float("nan"), float("inf")])
def test_a_reconstruction_that_is_no_number_is_drift(drifted: float) -> None:
    """What overflows cannot be undone: inf - inf. The gradients are lost, so this must not pass."""

    class Overflow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(torch.arange(x.shape[-1]) == 0, x * drifted, x)

    policy = rg.Reverse(watch=1e-3, on_drift="raise")
    net = rg.ReversibleSequence([(Overflow(), nn.Tanh())], policy=policy)
    x = torch.ones(2, 4, requires_grad=True)
    y = net(x)
    with pytest.raises(RuntimeError, match="relative error"):
        y[:, 1:].sum().backward()


def test_a_stream_that_enters_as_zero_is_not_drift() -> None:
    """The v of a momentum network: a little noise where nothing was is no reason to worry."""
    net = rg.Momentum([nn.Linear(6, 6) for _ in range(4)], policy=rg.Reverse(watch=1e-3, on_drift="raise"))
    step(net, tokens().float())


@pytest.mark.parametrize("watch", [None, 1e-3])
def test_watching_costs_constant_memory(watch: float | None) -> None:
    def live(depth: int) -> int:
        net, x = sequence(depth, policy=rg.Reverse(watch=watch)), tokens()
        with LiveBytes() as memory:
            y = net(x)
            found = memory.live
        assert y.requires_grad
        return found

    assert live(40) == live(2)


def test_watching_costs_a_sample_of_each_stream() -> None:
    def live(watch: float | None) -> int:
        net, x = sequence(2, policy=rg.Reverse(watch=watch)), torch.randn(8, 100, 6, dtype=torch.double)
        with LiveBytes() as memory:
            y = net(x)
            found = memory.live
        assert y.requires_grad
        return found

    assert live(1e-3) - live(None) == 2 * 256 * 8


@pytest.mark.parametrize("watch", [0, -1.0, "often"])
def test_watch_is_a_positive_number(watch: Any) -> None:
    with pytest.raises(ValueError, match="watch must be a positive relative error"):
        rg.Reverse(watch=watch)


def test_on_drift_is_warn_or_raise() -> None:
    with pytest.raises(ValueError, match="on_drift must be 'warn' or 'raise'"):
        rg.Reverse(on_drift="ignore")  # type: ignore[arg-type]


# ---- figures that arrive late, as on a busy device


@pytest.fixture
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for without waiting is there only the second time."""
    here = Arriving.here

    def late(self: Arriving, *, wait: bool) -> Tensor | None:
        if wait or getattr(self, "asked", False):
            return here(self, wait=wait)
        self.asked = True  # type: ignore[attr-defined]
        return None

    monkeypatch.setattr(Arriving, "here", late)


@pytest.mark.usefixtures("_late")
def test_late_drift_is_warned_about_in_the_next_pass() -> None:
    net, x = narrow()
    step(net, x)
    with pytest.warns(rg.DriftWarning, match=REMEDIES):
        step(net, x)


@pytest.mark.usefixtures("_late")
def test_late_drift_raises_at_once_where_asked_to() -> None:
    with pytest.raises(RuntimeError, match=REMEDIES):
        step(*narrow(on_drift="raise"))


@pytest.mark.usefixtures("_late")
def test_last_drift_waits() -> None:
    step(*narrow(watch=10.0))
    drift = rg.last_drift()
    assert drift is not None
    assert drift > 1e-3


# ---- flags of exact joins


def _steps(number: int) -> list[Step]:
    updates = [rg.Update("a", torch.sin, "b", join=rg.ExactAdd()) for _ in range(number)]
    return [Step(index, update, update.fn, {}) for index, update in enumerate(updates)]


def test_one_byte_per_update_and_one_for_what_enters() -> None:
    alarm = RangeAlarms(_steps(5))
    with LiveBytes() as memory:
        for index in range(-1, 5):
            alarm.flag(index, torch.device("cpu"))
        assert memory.live == 6


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("index", [0, 3, 4])
def test_a_flag_names_its_update(index: int, wait: bool) -> None:
    alarm = RangeAlarms(_steps(5))
    alarm.flag(index, torch.device("cpu")).fill_(True)
    alarm.check(wait=wait)  # not sent yet
    alarm.send()
    with pytest.raises(RuntimeError, match=rf"update {index} \(target 'a', fn sin\): its target left the range"):
        alarm.check(wait=wait)


def test_the_first_update_that_left_is_named() -> None:
    alarm = RangeAlarms(_steps(5))
    for index in (4, 2, 3):
        alarm.flag(index, torch.device("cpu")).fill_(True)
    alarm.send()
    with pytest.raises(RuntimeError, match="update 2 "):
        alarm.check(wait=True)


def test_what_enters_is_named_before_the_updates_that_follow() -> None:
    alarm = RangeAlarms(_steps(5))
    for index in (-1, 0, 2):
        alarm.flag(index, torch.device("cpu")).fill_(True)
    alarm.send()
    with pytest.raises(RuntimeError, match="a stream that enters left the range"):
        alarm.check(wait=True)


def test_flags_that_are_not_set_say_nothing() -> None:
    alarm = RangeAlarms(_steps(5))
    alarm.flag(2, torch.device("cpu"))
    alarm.send()
    alarm.check(wait=True)


def test_a_tensor_on_the_host_is_there() -> None:
    value = torch.tensor(3.0)
    assert Arriving(value).here(wait=False) is value


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_drift_on_a_device_is_seen_by_the_thread_that_called_backward() -> None:
    """Autograd works in a thread per device; last_drift is asked for in the user's."""
    net, x = narrow(watch=10.0)
    net.cuda()(x.detach().cuda().requires_grad_()).float().square().sum().backward()
    drift = rg.last_drift()
    assert drift is not None
    assert drift > 1e-3


def test_the_drift_of_complex_streams_is_measured() -> None:
    x = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    out = rg.run([rg.Update("a", torch.sin, "b")], {"a": x, "b": x}, policy=rg.Reverse(watch=1e-3))
    out["a"].abs().sum().backward()
    assert rg.last_drift() is not None
    assert rg.last_drift() < 1e-6
