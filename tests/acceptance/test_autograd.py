"""Every way of asking autograd for a gradient gives what a plain loop with kept activations gives."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

import retrograd as rg
from networks import WIDTH, Plain, assert_same, differs, feed_forward, gradients, loss_of, sequence, tokens

# torch's own: forward-mode differentiation compiles some formulas with torch.jit.
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

POLICIES = [rg.Reverse(), rg.Reverse(anchor_every=2), rg.Reverse(save="output"), rg.Keep()]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_gradients_are_those_of_a_plain_loop(policy: rg.Policy) -> None:
    net, x = sequence(4, policy=policy), tokens()
    wanted = [x, *net.parameters()]
    assert_same(gradients(net, wanted, x), gradients(Plain(net.blocks), wanted, x))


def test_autograd_grad_on_parameters_leaves_grad_untouched() -> None:
    net, x = sequence(), tokens(requires_grad=False)
    wanted = list(net.parameters())
    found = torch.autograd.grad(loss_of(net(x)), wanted)
    assert_same(list(found), gradients(Plain(net.blocks), wanted, x)[1:])
    assert all(parameter.grad is None for parameter in wanted)


def test_autograd_grad_on_the_input_leaves_grad_untouched() -> None:
    net, x = sequence(), tokens()
    (found,) = torch.autograd.grad(loss_of(net(x)), x)
    assert_same(found, gradients(Plain(net.blocks), [x], x)[1])
    assert x.grad is None
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("first", ["attention", "linear"])
def test_input_that_needs_no_grad(first: str) -> None:
    """A linear layer saves its weight only if its input needs grad."""
    net, x = sequence(), tokens(requires_grad=False)
    if first == "linear":
        net.blocks[0][0] = nn.Linear(WIDTH, WIDTH).double()
    loss_of(net(x)).backward()
    expected = gradients(Plain(net.blocks), net.parameters(), x)[1:]
    assert_same([parameter.grad for parameter in net.parameters()], expected)


def test_gradient_of_context_with_the_encoder_backward_once() -> None:
    net, x = sequence(), tokens()
    encoder, memory = nn.Linear(WIDTH, WIDTH).double(), tokens()
    wanted = [x, *encoder.parameters(), *net.parameters()]
    calls = []
    context = encoder(memory)
    context.register_hook(lambda grad: calls.append("context"))
    encoder.register_full_backward_hook(lambda module, given, returned: calls.append("encoder"))
    encoder.weight.register_hook(lambda grad: calls.append("weight"))

    found = torch.autograd.grad(loss_of(net(x, context=context)), wanted)
    assert sorted(calls) == ["context", "weight"]

    calls.clear()
    loss_of(net(x, context=encoder(memory))).backward()
    assert sorted(calls) == ["encoder", "weight"]

    plain = Plain(net.blocks)
    assert_same(list(found), gradients(lambda: plain(x, context=encoder(memory)), wanted)[1:])
    assert_same(encoder.weight.grad, found[1])


def test_gradient_of_tensors_deep_inside_keywords() -> None:
    edges = {"near": (tokens(), [tokens()]), "count": 3}
    x, weight = tokens(), torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)

    def fn(b: Tensor, edges: dict) -> Tensor:
        first, (second,) = edges["near"]
        return (b * first @ weight).tanh() * second * edges["count"]

    def reversible() -> Tensor:
        updates = [rg.Update("a", fn, "b", kwargs={"edges": edges}), rg.Update("b", fn, "a", kwargs={"edges": edges})]
        return rg.run(updates, {"a": x, "b": x})["b"]

    def plain() -> Tensor:
        return x + fn(x + fn(x, edges), edges)

    wanted = [x, weight, edges["near"][0], edges["near"][1][0]]
    assert_same(gradients(reversible, wanted), gradients(plain, wanted))


@pytest.mark.parametrize("frozen", ["first", "last", "f", "all"])
def test_frozen_weights(frozen: str) -> None:
    net, x = sequence(), tokens()
    chosen = {"first": net.blocks[0], "last": net.blocks[-1], "f": nn.ModuleList(f for f, _ in net.blocks), "all": net}
    chosen[frozen].requires_grad_(False)
    loss_of(net(x)).backward()
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    assert_same([x.grad, *(p.grad for p in trained)], gradients(Plain(net.blocks), [x, *trained], x)[1:])
    assert all(p.grad is None for p in net.parameters() if not p.requires_grad)


@pytest.mark.parametrize("needed", [True, False], ids=["input needs grad", "input needs none"])
def test_freezing_between_forward_and_backward(needed: bool) -> None:
    """As in a GAN step: the flags at the time of the forward count."""
    net, x = sequence(), tokens(requires_grad=needed)
    plain = Plain(net.blocks)
    head = nn.Linear(WIDTH, WIDTH).double()
    wanted = [head.weight, x] if needed else [head.weight]
    expected = gradients(lambda: plain(head(x)), wanted)[1:]
    y = net(head(x))
    net.requires_grad_(False)
    assert_same(list(torch.autograd.grad(loss_of(y), wanted)), expected)


@pytest.mark.parametrize("shared", ["blocks", "f and g"])
def test_shared_weights(shared: str) -> None:
    f, g = feed_forward(WIDTH), feed_forward(WIDTH)
    blocks = [(f, g)] * 3 if shared == "blocks" else [(f, f), (g, f), (f, g)]
    net, x = rg.ReversibleSequence(blocks).double(), tokens()
    wanted = [x, *net.parameters()]
    assert_same(gradients(net, wanted, x), gradients(Plain(blocks), wanted, x))


def test_fn_ignoring_its_input_gives_zero_gradient() -> None:
    bias, x = nn.Parameter(torch.randn(2, 5, WIDTH, dtype=torch.float64)), tokens()
    other = tokens()
    updates = [rg.Update("a", lambda b: bias.exp(), "b"), rg.Update("a", lambda b: torch.ones_like(b), "b")]
    out = rg.run(updates, {"a": other, "b": x})
    of_x, of_bias, of_other = torch.autograd.grad(loss_of(out["a"]), [x, bias, other], materialize_grads=True)
    assert_same(of_x, torch.zeros_like(x))
    plain = gradients(lambda: other + bias.exp() + 1, [bias, other])
    assert_same([of_bias, of_other], plain[1:])


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_double_backward(policy: rg.Policy) -> None:
    net, x = sequence(2, policy=policy), tokens()
    plain = Plain(net.blocks)

    def with_penalty(forward: nn.Module) -> Tensor:
        y = forward(x)
        (slope,) = torch.autograd.grad(loss_of(y), x, create_graph=True)
        return y.square() + slope.square()

    wanted = [x, *net.parameters()]
    found, expected = gradients(with_penalty, wanted, net), gradients(with_penalty, wanted, plain)
    assert_same(found, expected)
    assert differs(found[1:], gradients(lambda: plain(x).square(), wanted)[1:])  # the second-order term matters


@pytest.mark.parametrize("linear", [False, True], ids=["loss of y", "loss linear in y"])
def test_gradient_penalty_alone_with_y_deleted(linear: bool) -> None:
    net, x = sequence(2), tokens()

    def penalty(forward: nn.Module) -> Tensor:
        y = forward(x)
        (slope,) = torch.autograd.grad(y.sum() if linear else loss_of(y), x, create_graph=True)
        del y
        gc.collect()
        return slope.square()

    wanted = list(net.parameters())[:-1]  # the last bias does not enter the slope of a linear loss
    assert_same(gradients(penalty, wanted, net), gradients(penalty, wanted, Plain(net.blocks)))


def test_double_backward_through_parameters_with_dropout() -> None:
    net, x = sequence(2, dropout=0.5), tokens()
    wanted = list(net.parameters())

    def penalty(forward: nn.Module) -> Tensor:
        slopes = torch.autograd.grad(loss_of(forward(x)), wanted, create_graph=True)
        return torch.stack([slope.square().sum() for slope in slopes])

    assert_same(gradients(penalty, wanted, net), gradients(penalty, wanted, Plain(net.blocks)))


def test_third_derivative() -> None:
    net, x = rg.ReversibleSequence([(nn.Tanh(), nn.Sigmoid())] * 2), tokens()

    def third(forward: nn.Module) -> Tensor:
        (slope,) = torch.autograd.grad(loss_of(forward(x)), x, create_graph=True)
        (curvature,) = torch.autograd.grad(loss_of(slope), x, create_graph=True)
        return curvature

    assert_same(gradients(third, [x], net), gradients(third, [x], Plain(net.blocks)))


def test_retain_graph_and_backward_twice() -> None:
    net, x = sequence(dropout=0.3), tokens()
    wanted = [x, *net.parameters()]
    expected = gradients(Plain(net.blocks), wanted, x)[1:]
    torch.manual_seed(7)
    loss = loss_of(net(x))
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same([tensor.grad for tensor in wanted], [2 * gradient for gradient in expected])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_autograd_grad_twice() -> None:
    net, x = sequence(), tokens()
    wanted = [x, *net.parameters()]
    loss = loss_of(net(x))
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    second = torch.autograd.grad(loss, wanted)
    assert_same(first, second)
    assert_same(list(second), gradients(Plain(net.blocks), wanted, x)[1:])


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_one_of_several_outputs(name: str) -> None:
    first, second, third = (feed_forward(WIDTH).double() for _ in range(3))
    x = tokens()

    def reversible() -> Tensor:
        updates = [rg.Update("a", first, "b"), rg.Update("c", second, "a"), rg.Update("b", third, "c")]
        return rg.run(updates, {"a": x, "b": x, "c": x})[name]

    def plain() -> Tensor:
        a = x + first(x)
        c = x + second(a)
        return {"a": a, "b": x + third(c), "c": c}[name]

    wanted = [x, *first.parameters()]
    assert_same(gradients(reversible, wanted), gradients(plain, wanted))


def test_outputs_one_after_the_other() -> None:
    net, x = sequence(2), tokens()
    wanted = [x, *net.blocks[0].parameters()]
    out = net.run({"a": x, "b": x})
    kept = rg.run(net.updates(), {"a": x, "b": x}, policy=rg.Keep())
    for name in ("b", "a"):
        found = torch.autograd.grad(loss_of(out[name]), wanted, retain_graph=True)
        assert_same(found, torch.autograd.grad(loss_of(kept[name]), wanted, retain_graph=True))


def test_a_pass_that_stops_half_way() -> None:
    net, x = sequence(), tokens()
    late, everything = list(net.blocks[-1].parameters()), [x, *net.parameters()]
    loss = loss_of(net(x))
    found = torch.autograd.grad(loss, late, retain_graph=True)
    plain = Plain(net.blocks)
    assert_same(list(found), gradients(plain, late, x)[1:])
    assert_same(list(torch.autograd.grad(loss, everything)), gradients(plain, everything, x)[1:])


def test_a_pass_that_stops_half_way_does_not_replay_the_rest() -> None:
    replayed = []

    def fn(b: Tensor, weight: Tensor) -> Tensor:
        if rg.phase().replaying:
            replayed.append(rg.phase().update)
        return (b * weight).sin()

    weights = [torch.ones(1, requires_grad=True) for _ in range(4)]
    updates = [rg.Update("ab"[i % 2], fn, "ba"[i % 2], kwargs={"weight": weights[i]}) for i in range(4)]
    out = rg.run(updates, {"a": torch.ones(1), "b": torch.ones(1)})
    torch.autograd.grad(out["a"] + out["b"], weights[2])
    assert replayed == [3, 2]


def test_a_pass_that_starts_in_the_middle_raises() -> None:
    inside = []

    def fn(b: Tensor) -> Tensor:
        inside.append(b.sin().square())
        return inside[-1]

    x = tokens()
    out = rg.run([rg.Update("a", fn, "b"), rg.Update("b", fn, "a")], {"a": x, "b": x})
    with pytest.raises(RuntimeError, match=r"update 0 \(target 'a', fn fn\).*did not begin after"):
        inside[0].sum().backward()
    loss_of(out["a"]).backward()  # the other way round still works
    assert_same(x.grad, gradients(lambda: x + x.sin().square(), [x])[1])


def test_parameter_hooks_see_the_whole_gradient_once() -> None:
    net, x = sequence(), tokens()
    shared = net.blocks[0][1]
    net.blocks[1][1] = shared
    expected = gradients(Plain(net.blocks), [shared[1].weight], x)[1]
    seen, accumulated = [], []
    shared[1].weight.register_hook(seen.append)
    shared[1].weight.register_post_accumulate_grad_hook(lambda parameter: accumulated.append(parameter.grad.clone()))
    loss_of(net(x)).backward()
    assert_same([*seen, *accumulated], [expected, expected])


def test_a_parameter_hook_that_changes_the_gradient() -> None:
    net, x = sequence(), tokens()
    weight = net.blocks[1][1][1].weight
    expected = 3 * gradients(Plain(net.blocks), [weight], x)[1]
    weight.register_hook(lambda gradient: 3 * gradient)
    loss_of(net(x)).backward()
    assert_same(weight.grad, expected)


def test_optimizer_in_backward() -> None:
    net, x = sequence(4, dropout=0.2), tokens()
    wanted = list(net.parameters())
    expected = [
        (parameter - 0.5 * gradient).detach()
        for parameter, gradient in zip(wanted, gradients(Plain(net.blocks), wanted, x)[1:], strict=True)
    ]
    for parameter in wanted:
        optimizer = torch.optim.SGD([parameter], lr=0.5)

        def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    torch.manual_seed(7)
    loss_of(net(x)).backward()
    assert_same([parameter.detach() for parameter in wanted], expected)
    assert all(parameter.grad is None for parameter in wanted)


class Affines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale(x).tanh(), self.shift(x).sin()


def _small(kind: str) -> tuple[nn.Module, Tensor]:
    smooth = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)]
    net = {
        "pairs": lambda: rg.ReversibleSequence([smooth[:2], smooth[2:]]),
        "affine": lambda: rg.ReversibleSequence([(Affines(), Affines())] * 2, join=rg.Affine()),
        "momentum": lambda: rg.Momentum(smooth, gamma=0.8),
        "midpoint": lambda: rg.Midpoint(smooth),
        "anchors": lambda: rg.ReversibleSequence([smooth[:2], smooth[2:]], policy=rg.Reverse(anchor_every=1)),
    }[kind]()
    return net.double(), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("kind", ["pairs", "affine", "momentum", "midpoint", "anchors"])
def test_gradcheck_and_gradgradcheck(kind: str) -> None:
    net, x = _small(kind)
    names = [name for name, _ in net.named_parameters()][:2]

    def forward(x: Tensor, *chosen: Tensor) -> Tensor:
        return functional_call(net, dict(zip(names, chosen, strict=True)), x)

    chosen = [net.get_parameter(name).detach().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(forward, (x, *chosen))
    assert torch.autograd.gradgradcheck(forward, (x, *chosen))


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.exp())
        return x.exp() * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        first = ctx.saved_tensors[0]
        second = ctx.saved_tensors[1]
        return gradient * (first + 1) * second


def test_custom_function_reading_its_saved_tensors_twice() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return ReadsTwice.apply(self.linear(x)).tanh()

    net, x = rg.ReversibleSequence([(Inside(), Inside()) for _ in range(2)]).double(), tokens()
    wanted = [x, *net.parameters()]
    assert_same(gradients(net, wanted, x), gradients(Plain(net.blocks), wanted, x))


def test_anomaly_mode() -> None:
    net, x = sequence(dropout=0.2), tokens()
    wanted = [x, *net.parameters()]
    expected = gradients(Plain(net.blocks), wanted, x)
    with torch.autograd.set_detect_anomaly(True):
        assert_same(gradients(net, wanted, x), expected)


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")  # where the anomaly is explained
def test_anomaly_mode_finds_the_culprit() -> None:
    x = torch.zeros(1, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        out = rg.run([rg.Update("a", lambda b: b.sqrt() * b, "b")], {"a": x, "b": x})["a"]
        with pytest.raises(RuntimeError, match=r"SqrtBackward0.*nan"):
            out.backward()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_batched_gradients(dropout: float) -> None:
    net, x = sequence(2, dropout), tokens()
    wanted = [x, *net.parameters()]
    directions = torch.randn(3, *x.shape, dtype=torch.float64)

    def batched(forward: nn.Module) -> tuple[Tensor, ...]:
        torch.manual_seed(7)
        return torch.autograd.grad(forward(x), wanted, directions, is_grads_batched=True)

    assert_same(batched(net), batched(Plain(net.blocks)))


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("function", ["jacobian", "hessian"])
def test_functional_jacobian_and_hessian(function: str, vectorize: bool) -> None:
    net, x = _small("pairs")
    differentiate = getattr(torch.autograd.functional, function)

    def of(forward: nn.Module) -> Tensor:
        inner = forward if function == "jacobian" else lambda x: loss_of(forward(x))
        return differentiate(inner, x.detach(), vectorize=vectorize)

    assert_same(of(net), of(Plain(net.blocks)))


@forward_mode
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap", "jacrev", "jacfwd", "hessian", "per-sample grad"])
def test_func_transforms(transform: str) -> None:
    net, x = _small("pairs")
    x = x.detach()
    direction = torch.randn_like(x)

    def of(forward: nn.Module) -> object:
        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return loss_of(functional_call(forward, parameters, x))

        parameters = dict(net.named_parameters())
        return {
            "grad": lambda: torch.func.grad(loss)(parameters, x),
            "vjp": lambda: torch.func.vjp(forward, x)[1](direction),
            "jvp": lambda: torch.func.jvp(forward, (x,), (direction,)),
            "vmap": lambda: torch.func.vmap(forward)(x),
            "jacrev": lambda: torch.func.jacrev(forward)(x),
            "jacfwd": lambda: torch.func.jacfwd(forward)(x),
            "hessian": lambda: torch.func.hessian(lambda x: loss_of(forward(x)))(x),
            "per-sample grad": lambda: torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x),
        }[transform]()

    assert_same(of(net), of(Plain(net.blocks)))


def test_backward_through_vmap() -> None:
    net, x = sequence(2), tokens()
    wanted = [x, *net.parameters()]
    found = gradients(torch.func.vmap(net), wanted, x)
    assert_same(found, gradients(torch.func.vmap(Plain(net.blocks)), wanted, x))


@forward_mode
def test_forward_mode_differentiation() -> None:
    net, x = _small("pairs")
    direction = torch.randn_like(x)

    def of(forward: nn.Module) -> list[Tensor]:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, direction)
            y, tangent = forward_ad.unpack_dual(forward(dual))
            return [y, tangent, *torch.autograd.grad(loss_of(tangent), [x, net.blocks[0][1][0].weight])]

    assert_same(of(net), of(Plain(net.blocks)))


def test_func_grad_inside_fn() -> None:
    """Torch forbids it inside saved-tensor hooks: the error says so, and a kept update works."""

    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.grad(lambda x: self.linear(x).tanh().sum())(x)

    net, x = rg.ReversibleSequence([(Force(), Force())]).double(), tokens()
    wanted = [x, net.blocks[0][0].linear.weight]
    with pytest.raises(RuntimeError, match="saved tensor hooks") as caught:
        net(x)
    assert "update 0" in caught.value.__notes__[0]
    assert "policy=Keep()" in caught.value.__notes__[1]
    net.policy = rg.Keep()
    assert_same(gradients(net, wanted, x), gradients(Plain(net.blocks), wanted, x))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_autograd_grad_inside_fn(dropout: float) -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = feed_forward(WIDTH, dropout)

        def forward(self, x: Tensor) -> Tensor:
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=True)[0]

    net, x = rg.ReversibleSequence([(Force(), Force()) for _ in range(2)]).double(), tokens()
    wanted = [x, *(net.blocks[i][j].energy[1].weight for i in (0, 1) for j in (0, 1))]
    assert_same(gradients(net, wanted, x), gradients(Plain(net.blocks), wanted, x))


def test_outputs_that_need_no_grad() -> None:
    fixed, x = feed_forward(WIDTH).double().requires_grad_(False), tokens()
    updates = [rg.Update("a", fixed, "b"), rg.Update("c", fixed, "a")]
    out = rg.run(updates, {"a": x.detach(), "b": x.detach(), "c": x})
    assert not out["a"].requires_grad
    assert not out["b"].requires_grad
    (found,) = torch.autograd.grad(loss_of(out["c"] * out["a"]), x)
    kept = rg.run(updates, {"a": x.detach(), "b": x.detach(), "c": x}, policy=rg.Keep())
    assert_same(found, torch.autograd.grad(loss_of(kept["c"] * kept["a"]), x)[0])


def test_inputs_changed_in_place_after_the_forward_do_not_matter() -> None:
    net, x = sequence(), tokens(requires_grad=False)
    expected = gradients(Plain(net.blocks), net.parameters(), x.clone())[1:]
    y = net(x)
    x.zero_()
    assert_same(list(torch.autograd.grad(loss_of(y), list(net.parameters()))), expected)


def test_two_modules_in_a_row_and_one_used_twice() -> None:
    net, other, x = sequence(2, 0.2), sequence(2, 0.2), tokens()
    first, second = Plain(net.blocks), Plain(other.blocks)
    wanted = [x, *net.parameters(), *other.parameters()]
    found = gradients(lambda: net(other(net(x))), wanted)
    assert_same(found, gradients(lambda: first(second(first(x))), wanted))
