"""Buffers, weights and copies: a replay changes no state, and reads the state that the forward read."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import retrograd as rg
from networks import WIDTH, Plain, assert_same, feed_forward, gradients, loss_of, pair, sequence, tokens


def _state(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def _agrees_with_plain(net: nn.Module, x: Tensor, *, steps: int = 2) -> None:
    """Train reversible and plain copies: the same outputs, gradients and state after every step."""
    plain = Plain(copy.deepcopy(net.blocks)).train(net.training)
    for _ in range(steps):
        found = gradients(net, [x, *net.parameters()], x)
        expected = gradients(plain, [x, *plain.parameters()], x)
        assert_same(_state(net.blocks), _state(plain.blocks))
        assert_same(found, expected)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).flatten(0, 1)).view_as(x).tanh()


class Codebook(nn.Module):
    """Vector quantisation with a codebook that moves towards what it sees, in place or by a new tensor."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(WIDTH, WIDTH), in_place
        self.register_buffer("codes", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = (self.linear(x) * self.codes.clone()).sin()
        if self.training:
            with torch.no_grad():
                seen = x.mean((0, 1))
                if self.in_place:
                    self.codes.mul_(0.5).add_(seen, alpha=0.5)
                else:
                    self.codes = 0.5 * self.codes + 0.5 * seen
        return out


MOVING: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": Normed,
    "codebook in place": lambda: Codebook(in_place=True),
    "codebook replaced": lambda: Codebook(in_place=False),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
}
moving = pytest.mark.parametrize("kind", MOVING)


def _moving(kind: str, depth: int = 2) -> rg.ReversibleSequence:
    """Blocks with moving buffers after one that has none, and which is reached only by reversing them."""
    blocks = [(MOVING[kind](), MOVING[kind]()) for _ in range(depth)]
    return rg.ReversibleSequence([pair(), *blocks]).double()


def test_batch_norm_counts_once() -> None:
    net, x = _moving("BatchNorm"), tokens()
    plain = Plain(copy.deepcopy(net.blocks))
    for step in range(1, 4):
        loss_of(net(x)).backward()
        loss_of(plain(x)).backward()
        assert all(f.norm.num_batches_tracked == step for block in net.blocks[1:] for f in block)
        assert_same(_state(net.blocks), _state(plain.blocks))


@moving
def test_a_buffer_moves_once_and_replays_with_its_old_value(kind: str) -> None:
    _agrees_with_plain(_moving(kind), tokens())


@moving
def test_a_buffer_that_moves_in_training_only(kind: str) -> None:
    """First seen in eval mode, where it stands still; then it moves; then it stands still again."""
    net, x = _moving(kind), tokens()
    for training in (False, True, True, False, True):
        _agrees_with_plain(net.train(training), x, steps=1)


@moving
def test_a_buffer_with_two_calls_before_backward(kind: str) -> None:
    net, x = _moving(kind), tokens()
    plain = Plain(copy.deepcopy(net.blocks))
    found = gradients(lambda: net(net(x)), [x, *net.parameters()])
    expected = gradients(lambda: plain(plain(x)), [x, *plain.parameters()])
    assert_same(_state(net.blocks), _state(plain.blocks))
    assert_same(found, expected)


@moving
def test_a_buffer_with_double_backward(kind: str) -> None:
    net, x = _moving(kind), tokens()
    plain = Plain(copy.deepcopy(net.blocks))

    def penalty(forward: nn.Module) -> Tensor:
        (slope,) = torch.autograd.grad(loss_of(forward(x)), x, create_graph=True)
        return slope

    found = gradients(penalty, [x, net.blocks[0][1][1].weight], net)
    expected = gradients(penalty, [x, plain.blocks[0][1][1].weight], plain)
    assert_same(_state(net.blocks), _state(plain.blocks))
    assert_same(found, expected)


def test_batch_norm_in_a_closure() -> None:
    norm, x = nn.BatchNorm1d(5).double(), tokens()
    plain = copy.deepcopy(norm)
    updates = [rg.Update("a", lambda b: norm(b).tanh(), "b"), rg.Update("b", lambda a: norm(a).sin(), "a")]
    found = gradients(lambda: rg.run(updates, {"a": x, "b": x})["b"], [x, *norm.parameters()])
    expected = gradients(lambda: x + plain(x + plain(x).tanh()).sin(), [x, *plain.parameters()])
    assert norm.num_batches_tracked == 2
    assert_same(_state(norm), _state(plain))
    assert_same(found, expected)


def test_batch_norm_reached_through_an_object() -> None:
    """Only an attribute of an object that the closure holds leads to the module."""

    class Holder:
        def __init__(self) -> None:
            self.norm = nn.BatchNorm1d(5).double()

    holder, x = Holder(), tokens()
    updates = [rg.Update("a", lambda b: holder.norm(b).tanh(), "b"), rg.Update("b", torch.sin, "a")]
    loss_of(rg.run(updates, {"a": x, "b": x})["b"]).backward()
    assert holder.norm.num_batches_tracked == 1


def test_weight_norm() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())

    _agrees_with_plain(rg.ReversibleSequence([(normed(), normed()) for _ in range(2)]).double(), tokens())


@pytest.mark.parametrize("kind", ["linear", "batch norm"])
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules(kind: str) -> None:
    def lazy() -> nn.Module:
        layers = [nn.LazyLinear(WIDTH), nn.Tanh()] if kind == "linear" else [nn.LazyBatchNorm1d(), nn.Tanh()]
        return nn.Sequential(*layers)

    net, x = rg.ReversibleSequence([(lazy(), lazy()) for _ in range(2)]), tokens(requires_grad=False).float()
    y = net(x)
    plain = Plain(copy.deepcopy(net.blocks))
    torch.testing.assert_close(y, plain(x))
    y.sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


def test_deepcopy() -> None:
    net, x = sequence(dropout=0.3), tokens()
    y = net(x)  # a copy may be made while a backward is due
    other = copy.deepcopy(net)
    assert_same(gradients(other, [x, *other.parameters()], x), gradients(net, [x, *net.parameters()], x))
    assert not {id(p) for p in net.parameters()} & {id(p) for p in other.parameters()}
    y.sum().backward()
    assert all(p.grad is None for p in other.parameters())


@pytest.mark.parametrize("way", ["pickle", "torch.save", "state dict"])
def test_pickle_and_torch_save(way: str) -> None:
    def build() -> nn.Module:
        blocks = [(feed_forward(3), feed_forward(3)) for _ in range(2)]
        return rg.ReversibleSequence(blocks, split=-1, merge="concat", policy=rg.Reverse(anchor_every=2)).double()

    net, x = build(), tokens(requires_grad=False)
    if way == "pickle":
        other = pickle.loads(pickle.dumps(net))
    else:
        file = io.BytesIO()
        torch.save(net if way == "torch.save" else net.state_dict(), file)
        file.seek(0)
        if way == "torch.save":
            other = torch.load(file, weights_only=False)
        else:
            other = build()
            other.load_state_dict(torch.load(file))
    assert_same(gradients(other, other.parameters(), x), gradients(net, net.parameters(), x))


def test_averaged_model() -> None:
    net, x = sequence(), tokens()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    first = [p.detach().clone() for p in net.parameters()]
    averaged.update_parameters(net)
    loss_of(net(x)).backward()
    optimizer.step()
    averaged.update_parameters(net)
    expected = [0.5 * (a + b) for a, b in zip(first, net.parameters(), strict=True)]
    assert_same(list(averaged.parameters()), expected)
    wanted = [x, *averaged.parameters()]
    assert_same(gradients(averaged, wanted, x), gradients(Plain(averaged.module.blocks), wanted, x))


def test_averaged_model_as_fn() -> None:
    net, x = sequence(), tokens()
    for block in net.blocks:
        block[0] = AveragedModel(block[0])
    context = tokens()
    wanted = [x, context, net.blocks[0][0].module.query.weight]
    found = gradients(net, wanted, x, context=context)
    assert_same(found, gradients(Plain(net.blocks), wanted, x, context=context))


def _others(net: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(parameter).requires_grad_() for name, parameter in net.named_parameters()}


def test_functional_call_with_other_weights() -> None:
    net, x = sequence(dropout=0.3), tokens()
    others = _others(net)
    wanted = [x, *others.values()]
    before = list(net.parameters())
    found = gradients(lambda: functional_call(net, others, x), wanted)
    assert_same(found, gradients(lambda: functional_call(Plain(net.blocks), others, x), wanted))
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in before)


def test_functional_call_twice_before_backward() -> None:
    net, x = sequence(2), tokens()
    first, second = _others(net), _others(net)

    def twice(forward: nn.Module) -> Tensor:
        return functional_call(forward, first, functional_call(forward, second, x)) + forward(x)

    wanted = [x, *first.values(), *second.values(), *net.parameters()]
    assert_same(gradients(twice, wanted, net), gradients(twice, wanted, Plain(net.blocks)))


@pytest.mark.parametrize("steps", [1, 2])
def test_functional_call_with_adapted_weights(steps: int) -> None:
    """MAML: the weights are results of a graph that leads back to the module's own, through second derivatives."""
    net, x = sequence(2), tokens()

    def adapted(forward: nn.Module) -> Tensor:
        weights = dict(net.named_parameters())
        for _ in range(steps):
            loss = loss_of(functional_call(forward, weights, x))
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
        return functional_call(forward, weights, x)

    wanted = [x, *net.parameters()]
    assert_same(gradients(adapted, wanted, net), gradients(adapted, wanted, Plain(net.blocks)))


def test_functional_call_with_other_buffers() -> None:
    net, x = _moving("codebook in place"), tokens()
    others = {name: torch.randn_like(buffer) for name, buffer in net.named_buffers()}
    copies = {name: buffer.clone() for name, buffer in others.items()}
    kept = _state(net)
    wanted = [x, *net.parameters()]
    found = gradients(lambda: functional_call(net, others, x), wanted)
    assert_same(found, gradients(lambda: functional_call(Plain(net.blocks), copies, x), wanted))
    assert_same(others, copies)
    assert_same(_state(net), kept)


def test_still_buffers_from_functional_call() -> None:
    net, x = _moving("codebook in place").eval(), tokens()
    others = {name: torch.randn_like(buffer) for name, buffer in net.named_buffers()}
    wanted = [x, *net.parameters()]
    found = gradients(lambda: functional_call(net, others, x), wanted)
    assert_same(found, gradients(lambda: functional_call(Plain(net.blocks).eval(), others, x), wanted))


def test_a_network_replaced_between_forward_and_backward() -> None:
    net, x = sequence(2), tokens()
    wanted = [x, *net.parameters()]
    expected = gradients(Plain(net.blocks), wanted, x)[1:]
    loss = loss_of(net(x))
    net.blocks[0][1] = feed_forward(WIDTH).double()
    assert_same(list(torch.autograd.grad(loss, wanted)), expected)
