"""What cannot be right is refused, by name and in time; and whatever is raised, torch and the module stay usable."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from networks import WIDTH, Plain, assert_same, feed_forward, gradients, loss_of, sequence, tokens

CHANGED = "changed in place|modified by an inplace operation"


@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("how", ["in place", "optimizer"])
def test_weights_changed_in_place_before_backward(which: str, how: str) -> None:
    net, x = sequence(), tokens()
    weight = net.blocks[0 if which == "first" else -1][1][1].weight
    loss = loss_of(net(x))
    if how == "in place":
        with torch.no_grad():
            weight.add_(1)
    else:
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.1).step()
    with pytest.raises(RuntimeError, match="changed in place") as caught:
        loss.backward()
    assert f"update {1 if which == 'first' else 5} (target 'b'" in str(caught.value)


def test_weights_in_a_closure_changed_in_place_before_backward() -> None:
    linear, x = nn.Linear(WIDTH, WIDTH).double(), tokens()
    loss = loss_of(rg.run([rg.Update("a", lambda b: linear(b).sin(), "b")], {"a": x, "b": x})["a"])
    with torch.no_grad():
        linear.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"update 0.*changed in place"):
        loss.backward()


def test_weights_changed_where_a_buffer_moved_unexpectedly() -> None:
    """The first call in training mode after one in eval mode goes another way through the engine."""
    net = rg.ReversibleSequence([(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(WIDTH, WIDTH)), feed_forward(WIDTH))])
    net, x = net.double().eval(), tokens()
    loss_of(net(x)).backward()
    loss = loss_of(net.train()(x))
    with torch.no_grad():
        net.blocks[0][0][1].weight.add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


@pytest.mark.parametrize("nested", [False, True])
def test_keywords_changed_in_place_before_backward(nested: bool) -> None:
    context, x = tokens(requires_grad=False), tokens()
    fn = (lambda b, info: (b * info["deep"][0]).sin()) if nested else (lambda b, info: (b * info).sin())
    info = {"deep": [context]} if nested else context
    loss = loss_of(rg.run([rg.Update("a", fn, "b", kwargs={"info": info})], {"a": x, "b": x})["a"])
    context.mul_(2)
    with pytest.raises(RuntimeError, match=r"update 0 .*keyword 'info'.*changed in place"):
        loss.backward()


def test_captured_tensor_changed_in_place_before_backward() -> None:
    captured, x = tokens(requires_grad=False), tokens()
    loss = loss_of(rg.run([rg.Update("a", lambda b: (b * captured).sin(), "b")], {"a": x, "b": x})["a"])
    captured.mul_(2)
    with pytest.raises(RuntimeError, match=r"update 0 .*the tensor 'captured'.*changed in place"):
        loss.backward()


@pytest.mark.parametrize("where", ["module attribute", "module buffer", "object in the closure", "default argument"])
def test_tensor_held_elsewhere_changed_in_place_before_backward(where: str) -> None:
    held, x = tokens(requires_grad=False), tokens()

    class Attribute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if where == "module buffer":
                self.register_buffer("held", held)
            else:
                self.held = held

        def forward(self, b: Tensor) -> Tensor:
            return (b * self.held).sin()

    class Holder:
        tensor = held

    holder = Holder()
    fns: dict[str, Callable[..., Tensor]] = {
        "module attribute": Attribute(),
        "module buffer": Attribute(),
        "object in the closure": lambda b: (b * holder.tensor).sin(),
        "default argument": lambda b, held=held: (b * held).sin(),
    }
    loss = loss_of(rg.run([rg.Update("a", fns[where], "b")], {"a": x, "b": x})["a"])
    held.mul_(2)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


@pytest.mark.parametrize("name", ["a", "b"])
def test_output_changed_in_place_before_backward(name: str) -> None:
    net, x = sequence(2), tokens()
    out = net.run({"a": x, "b": x})
    loss = loss_of(out["a"]) + loss_of(out["b"].clone())
    with torch.no_grad():
        out[name].mul_(2)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


def test_output_changed_in_place_before_the_second_backward() -> None:
    net, x = sequence(2), tokens()
    out = net.run({"a": x, "b": x})
    (slope,) = torch.autograd.grad(out["a"].sum() + out["b"].sum(), x, create_graph=True)
    with torch.no_grad():
        out["a"].mul_(2)
    with pytest.raises(RuntimeError, match=CHANGED):
        slope.square().sum().backward()


def test_fn_that_spoils_what_it_saved() -> None:
    """Plain autograd refuses this fn; a replay that served the spoiled tensor would be wrong without a word."""

    def fn(b: Tensor) -> Tensor:
        return b.exp().mul_(2)

    x = tokens()
    with pytest.raises(RuntimeError, match=CHANGED):
        (x + fn(x)).sum().backward()
    with pytest.raises(RuntimeError, match=CHANGED):
        rg.run([rg.Update("a", fn, "b")], {"a": x, "b": x})["a"].sum().backward()


def test_fn_in_place_on_what_it_made_itself_is_fine() -> None:
    net, x = rg.ReversibleSequence([(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),) * 2] * 2), tokens()
    net = net.double()
    wanted = [x, *net.parameters()]
    assert_same(gradients(net, wanted, x), gradients(Plain(net.blocks), wanted, x))


@pytest.mark.parametrize("policy", [rg.Reverse(), rg.Keep()], ids=str)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_fn_in_place_on_its_input_refused(policy: rg.Policy, grad: bool) -> None:
    net = rg.ReversibleSequence([(nn.Tanh(), nn.Tanh()), (nn.Tanh(), nn.ReLU(inplace=True))], policy=policy)
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"update 3 \(target 'b', fn ReLU\).*in place"):
        net(tokens(requires_grad=False))


def test_fn_in_place_on_a_view_of_its_input_refused() -> None:
    def fn(b: Tensor) -> Tensor:
        b[0].mul_(2)
        return b.sin()

    x = tokens(requires_grad=False)
    with pytest.raises(RuntimeError, match=r"update 0 \(target 'a', fn fn\).*in place"):
        rg.run([rg.Update("a", fn, "b")], {"a": x, "b": x})


@pytest.mark.parametrize("shape", [(2, 5, 1), (1, 5, WIDTH), (WIDTH,), (3, 2, 5, WIDTH)])
def test_broadcast_output_refused_in_the_forward(shape: tuple[int, ...]) -> None:
    def fn(b: Tensor) -> Tensor:
        return torch.ones(shape, dtype=b.dtype)

    x = tokens()
    message = rf"update 1 \(target 'b', fn fn\).*{re.escape(str(shape))}.*\(2, 5, {WIDTH}\)"
    with pytest.raises(ValueError, match=message):
        rg.run([rg.Update("a", torch.sin, "b"), rg.Update("b", fn, "a")], {"a": x, "b": x})


@pytest.mark.parametrize(
    "out", [None, 1.0, [torch.ones(2)], {"y": torch.ones(2)}], ids=["None", "float", "list", "dict"]
)
def test_output_of_another_structure_refused(out: Any) -> None:
    def fn(b: Tensor) -> Any:
        return out

    with pytest.raises(ValueError, match=r"update 0 \(target 'a', fn fn\)"):
        rg.run([rg.Update("a", fn, "b")], {"a": torch.ones(2), "b": torch.ones(2)})


@pytest.mark.parametrize("remedy", [None, rg.Keep()], ids=["refused", "kept"])
def test_fn_that_is_not_deterministic_refused(remedy: rg.Policy | None) -> None:
    calls = []

    def fn(b: Tensor) -> Tensor:
        calls.append(1)
        return b.sin() if len(calls) == 1 else b.sin().cos()

    x = tokens()
    loss = loss_of(rg.run([rg.Update("a", fn, "b", policy=remedy)], {"a": x, "b": x})["a"])
    if remedy is None:
        with pytest.raises(RuntimeError, match=r"update 0 \(target 'a', fn fn\) is not deterministic"):
            loss.backward()
    else:
        loss.backward()
        assert_same(x.grad, gradients(lambda: x + x.sin(), [x])[1])


def test_fn_that_remembers_more_often_in_the_replay_refused() -> None:
    calls = []

    def fn(b: Tensor) -> Tensor:
        calls.append(1)
        for _ in calls:
            rg.remember(lambda: 1)
        return b.sin()

    x = tokens()
    loss = loss_of(rg.run([rg.Update("a", fn, "b")], {"a": x, "b": x})["a"])
    with pytest.raises(RuntimeError, match=r"update 0 \(target 'a'.*remember"):
        loss.backward()


class Fragile(nn.Module):
    """Draws random numbers, moves a buffer, and fails in one phase if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = feed_forward(WIDTH, 0.5)
        self.norm = nn.BatchNorm1d(5)
        self.told: list[str | None] = [None]  # not a word in an attribute: a replay would find what the forward found

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(self.norm(x))
        if self.told[0] == ("replay" if rg.phase().replaying else "forward"):
            raise ArithmeticError("as told")
        return y


def _global_state() -> dict[str, Any]:
    return {
        "random numbers": torch.get_rng_state().tolist(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "grad mode": torch.is_grad_enabled(),
        "phase": rg.phase(),
    }


def _module_state(net: nn.Module) -> dict[str, Any]:
    flags = {f"{name}.training": module.training for name, module in net.named_modules()}
    return flags | {name: tensor.tolist() for name, tensor in net.state_dict().items()}


def _fragile() -> rg.ReversibleSequence:
    return rg.ReversibleSequence([(Fragile(), Fragile()) for _ in range(2)]).double()


def test_exception_in_the_forward() -> None:
    net, x = _fragile(), tokens()
    net.blocks[1][0].told[0] = "forward"
    with torch.autocast("cpu", torch.bfloat16):
        before = _global_state()
        with pytest.raises(ArithmeticError, match="as told") as caught:
            net(x)
        after = _global_state()
    before.pop("random numbers")  # a forward that fails half-way has drawn some
    after.pop("random numbers")
    assert after == before
    assert any("update 2 (target 'a', fn Fragile)" in note for note in caught.value.__notes__)
    _still_works(net, x)


def test_exception_in_the_replay() -> None:
    net, x = _fragile(), tokens()
    net.blocks[1][0].told[0] = "replay"
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(net(x))
    net.eval()
    before = _global_state(), _module_state(net)
    with pytest.raises(ArithmeticError, match="as told") as caught:
        loss.backward()
    assert (_global_state(), _module_state(net)) == before
    assert any("update 2 (target 'a', fn Fragile)" in note for note in caught.value.__notes__)
    _still_works(net.train(), x)


def _still_works(net: rg.ReversibleSequence, x: Tensor) -> None:
    net.blocks[1][0].told[0] = None
    wanted = [x, *net.parameters()]
    kept = rg.ReversibleSequence(net.blocks, policy=rg.Keep())
    assert_same(gradients(net, wanted, x), gradients(kept, wanted, x))


def test_a_backward_that_failed_can_be_repeated() -> None:
    net, x = _fragile(), tokens()
    kept = rg.ReversibleSequence(net.blocks, policy=rg.Keep())
    wanted = [x, *net.parameters()]
    expected = gradients(kept, wanted, x)[1:]
    torch.manual_seed(7)
    loss = loss_of(net(x))
    net.blocks[0][1].told[0] = "replay"
    with pytest.raises(ArithmeticError):
        torch.autograd.grad(loss, wanted, retain_graph=True)
    net.blocks[0][1].told[0] = None
    assert_same(list(torch.autograd.grad(loss, wanted)), expected)


def test_invert_refuses_random_numbers() -> None:
    net, x = sequence(dropout=0.5), tokens()
    with pytest.raises(RuntimeError, match="random numbers"):
        net.invert(net.run({"a": x, "b": x}))


def test_inverse_refuses_an_output_that_lost_a_stream() -> None:
    with pytest.raises(ValueError, match="cannot be inverted"):
        sequence().inverse(tokens())


@pytest.mark.parametrize("target", ["a", "c"])
def test_unknown_streams_and_self_reference_refused(target: str) -> None:
    with pytest.raises(ValueError, match="among the sources" if target == "a" else "no stream 'c'"):
        rg.run([rg.Update(target, torch.sin, "a")], {"a": tokens(), "b": tokens()})


def test_keyword_that_no_network_takes_refused() -> None:
    with pytest.raises(TypeError, match="keyword 'contxt'"):
        sequence()(tokens(), contxt=tokens())


@pytest.mark.parametrize("value", [object(), "text", range(3), torch.ones(0)], ids=["object", "text", "range", "empty"])
def test_keywords_of_any_kind(value: Any) -> None:
    seen, x = [], tokens()

    def fn(b: Tensor, value: Any) -> Tensor:
        seen.append(value)
        return b.sin()

    loss_of(rg.run([rg.Update("a", fn, "b", kwargs={"value": value})], {"a": x, "b": x})["a"]).backward()
    assert all(given is value for given in seen)
    assert len(seen) == 2


def test_numpy_array_as_a_keyword() -> None:
    array, x = tokens(requires_grad=False).numpy(), tokens()
    updates = [rg.Update("a", lambda b, array: (b * torch.from_numpy(array)).sin(), "b", kwargs={"array": array})]
    found = gradients(lambda: rg.run(updates, {"a": x, "b": x})["a"], [x])
    assert_same(found, gradients(lambda: x + (x * torch.from_numpy(array)).sin(), [x]))
