"""The private names of torch that the tape stands on, and the corners of one backward pass."""

import gc
import weakref

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd import tape


def test_the_pass_number_is_the_same_within_a_pass_and_new_in_the_next():
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    for tensor in (x, y):
        tensor.register_hook(lambda grad: seen.append(tape._current_pass()))
    (y * 2).backward(retain_graph=True)
    (y * 3).backward()
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert tape._current_pass() == -1


def test_callbacks_run_at_the_end_of_a_pass():
    log: list[str] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: tape._at_end_of_pass(lambda: log.append("end")))
    x.register_hook(lambda grad: log.append("x"))
    y.backward()
    assert log == ["x", "end"]


def test_a_custom_function_may_read_its_saved_tensors_twice():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x.square())
            return x**3

        @staticmethod
        def backward(ctx, grad):
            x = ctx.saved_tensors[0].clone()
            return grad * 3 * ctx.saved_tensors[1] * x / x

    class Net(nn.Module):
        def forward(self, x):
            return Cube.apply(x).sin()

    def grads(policy):
        torch.manual_seed(0)
        x = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
        y = rg.ReversibleSequence([(Net(), Net())] * 3, policy=policy)(x)
        return torch.autograd.grad(y.sum(), x)[0]

    torch.testing.assert_close(grads(rg.Reverse()), grads(rg.Keep()))


def test_what_a_pass_does_not_take_is_dropped_as_it_goes_on():
    """Weight norm has saved tensors of its own, which a gradient of the input alone never asks for."""
    from retrograd.measure import LiveBytes

    def peak(depth: int) -> int:
        torch.manual_seed(0)
        norm = nn.utils.parametrizations.weight_norm
        net = rg.ReversibleSequence([(norm(nn.Linear(8, 8)), norm(nn.Linear(8, 8))) for _ in range(depth)])
        x = torch.randn(2, 8, requires_grad=True)
        loss = net(x).square().sum()
        with LiveBytes() as memory:
            torch.autograd.grad(loss, x)
        return memory.peak

    assert peak(4) == peak(16)


def test_dynamo_leaves_the_hooks_alone(caplog):
    """It would compile them where a compiled fn calls them, anew for each slot, and warn at its limit."""
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=2), caplog.at_level("WARNING", logger="torch._dynamo"):
        out = rg.run([rg.Update("a", compiled, "b")], {"a": torch.zeros(2, 4), "b": torch.ones(2, 4)})
        out["a"].sum().backward()
    assert "recompile_limit" not in caplog.text


class Force(nn.Module):
    """Differentiates inside where it is told to, as a potential does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inside = nn.Parameter(torch.randn(4, dtype=torch.float64)), True

    def forward(self, b: torch.Tensor) -> torch.Tensor:
        energy = (b * self.weight).sin().square().sum()
        if not self.inside:
            return b * energy
        with torch.enable_grad():
            return torch.autograd.grad(energy, b, create_graph=True)[0]


def force_gradients(force: Force, policy: rg.Policy) -> list[torch.Tensor]:
    x = torch.linspace(0, 1, 4, dtype=torch.float64).requires_grad_()
    out = rg.run([rg.Update("a", force, "b"), rg.Update("b", force, "a")], {"a": x, "b": x + 1}, policy=policy)
    return list(torch.autograd.grad(out["a"].sum() + out["b"].square().sum(), [x, force.weight]))


def test_a_fn_may_differentiate_inside() -> None:
    force = Force()
    for _ in range(3):
        torch.testing.assert_close(force_gradients(force, rg.Reverse()), force_gradients(force, rg.Keep()))


def test_a_module_may_differentiate_inside_now_and_then() -> None:
    force = Force()
    for force.inside in (False, True, False, True):
        torch.testing.assert_close(force_gradients(force, rg.Reverse()), force_gradients(force, rg.Keep()))


def test_a_stream_with_a_past_is_not_taken_for_a_changed_tensor() -> None:
    """Its reconstruction has another version, and may lie where it lay."""
    linear = nn.Linear(4, 4)

    def fn(b: torch.Tensor) -> torch.Tensor:
        return linear(b) * b.detach()

    for _ in range(300):
        a, b = (torch.randn(3, 4).add_(1) for _ in "ab")
        out = rg.run([rg.Update("a", fn, "b"), rg.Update("b", fn, "a")], {"a": a, "b": b})
        del a, b
        (out["a"].sum() + out["b"].sum()).backward()


@pytest.mark.parametrize("past", [0, 1])
def test_a_tensor_that_is_shown_detached_and_changes_is_seen(past: int) -> None:
    class Table:
        tensor = torch.ones(4, 4)

    table = Table()
    for _ in range(past):
        table.tensor.mul_(2)

    def fn(b: torch.Tensor, holder: object = [[[[table]]]]) -> torch.Tensor:
        return (b @ holder[0][0][0][0].tensor.detach()).tanh()  # type: ignore[index]

    x = torch.randn(3, 4, requires_grad=True)
    out = rg.run([rg.Update("a", fn, "b"), rg.Update("b", fn, "a")], {"a": x, "b": x})
    table.tensor.mul_(2)
    with pytest.raises(RuntimeError, match="a tensor that fn reads was changed in place"):
        (out["a"].sum() + out["b"].sum()).backward()


@pytest.mark.parametrize("backward", [True, False])
def test_a_result_that_a_module_keeps_does_not_keep_the_tapes(backward: bool) -> None:
    """As the loss of a router: it holds the graph of its call, which holds the tape."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.aside = nn.Linear(4, 4), torch.zeros(())

        def forward(self, b: torch.Tensor) -> torch.Tensor:
            out = self.linear(b)
            self.aside = out.square().mean()
            return out

    router, x = Router(), torch.randn(3, 4)
    tapes: weakref.WeakSet[tape.Tape] = weakref.WeakSet()
    made = tape.Tape.__init__

    def counted(self: tape.Tape, *args: object) -> None:
        made(self, *args)  # type: ignore[arg-type]
        tapes.add(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tape.Tape, "__init__", counted)
        for _ in range(5):
            out = rg.run([rg.Update("a", router, "b"), rg.Update("b", router, "a")], {"a": x, "b": x})
            if backward:
                (out["a"].sum() + router.aside).backward()
            del out
    router.aside = torch.zeros(())
    gc.collect()
    assert not tapes
