"""A replay sees the modes that the forward saw: dropout, training, autocast, attention backends, threads, no grad."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import retrograd as rg
from networks import WIDTH, Plain, assert_same, differs, feed_forward, gradients, loss_of, sequence, tokens


def test_dropout_replayed() -> None:
    net, x = sequence(4, dropout=0.5), tokens()
    wanted = [x, *net.parameters()]
    found = gradients(net, wanted, x)
    assert_same(found, gradients(Plain(net.blocks), wanted, x))
    assert differs(found, gradients(net.eval(), wanted, x))  # dropout did something


def test_dropout_leaves_the_generator_where_a_plain_run_leaves_it() -> None:
    net, x = sequence(2, dropout=0.5), tokens()
    gradients(Plain(net.blocks), [x], x)
    expected = torch.rand(4)
    gradients(net, [x], x)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_calls_before_backward_with_dropout(order: tuple[int, int]) -> None:
    net, inputs = sequence(dropout=0.5), [tokens(), tokens()]
    plain = Plain(net.blocks)
    wanted = list(net.parameters())

    def each(forward: nn.Module) -> list[tuple[Tensor, ...]]:
        torch.manual_seed(7)
        losses = [loss_of(forward(x)) for x in inputs]
        torch.rand(3)  # the generator moves on before the backward
        return [torch.autograd.grad(losses[i], [inputs[i], *wanted]) for i in order]

    def together(forward: nn.Module) -> tuple[Tensor, ...]:
        torch.manual_seed(7)
        return torch.autograd.grad(sum(loss_of(forward(x)) for x in inputs), wanted)

    assert_same(each(net), each(plain))
    assert_same(together(net), together(plain))


def test_backward_in_eval_mode() -> None:
    net, x = sequence(dropout=0.5).eval(), tokens()
    wanted = [x, *net.parameters()]
    assert_same(gradients(net, wanted, x), gradients(Plain(net.blocks).eval(), wanted, x))


@pytest.mark.parametrize("first", [True, False], ids=["train, then eval", "eval, then train"])
def test_switching_mode_between_forward_and_backward(first: bool) -> None:
    net, x = sequence(dropout=0.5).train(first), tokens()
    wanted = [x, *net.parameters()]
    expected = gradients(Plain(net.blocks).train(first), wanted, x)[1:]
    torch.manual_seed(7)
    loss = loss_of(net.train(first)(x))
    net.train(not first)
    assert_same(list(torch.autograd.grad(loss, wanted)), expected)
    assert all(module.training is not first for module in net.modules())


def _in_autocast(net: nn.Module, x: Tensor, *, backward_inside: bool) -> list[Tensor]:
    wanted = [x, *net.parameters()]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = net(x)
        loss = loss_of(y)
        if backward_inside:
            return [y, *torch.autograd.grad(loss, wanted)]
    return [y, *torch.autograd.grad(loss, wanted)]


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_autocast_replayed(inside: bool) -> None:
    net, x = sequence().float(), tokens().detach().float().requires_grad_()
    found = _in_autocast(net, x, backward_inside=inside)
    expected = _in_autocast(Plain(net.blocks), x, backward_inside=inside)
    for actual, reference in zip(found, expected, strict=True):
        # bfloat16 itself is 4e-3 off; the streams, in float32, are reconstructed to 1e-7
        assert (actual - reference).norm() <= 1e-5 * reference.norm()
    full = gradients(Plain(net.blocks), [x, *net.parameters()], x)
    assert any((a - b).norm() > 1e-3 * b.norm() for a, b in zip(found, full, strict=True))


def test_autocast_entered_after_the_forward_does_not_reach_the_replay() -> None:
    net, x = sequence().float(), tokens().detach().float().requires_grad_()
    wanted = [x, *net.parameters()]
    loss, reference = loss_of(net(x)), loss_of(Plain(net.blocks)(x))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = torch.autograd.grad(loss, wanted), torch.autograd.grad(reference, wanted)
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_autocast_weight_copies_freed() -> None:
    """Autocast's cache would keep a copy of every weight until the region ends; it is off in both passes."""
    cached = []

    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            cached.append(torch.is_autocast_cache_enabled())
            return super().forward(x)

    net = rg.ReversibleSequence([(Spy(WIDTH, WIDTH), Spy(WIDTH, WIDTH))])
    with torch.autocast("cpu", torch.bfloat16):
        net(torch.randn(3, WIDTH)).sum().backward()
        assert torch.is_autocast_cache_enabled()
    assert cached == [False] * 4


def test_no_grad_records_nothing() -> None:
    net, x = sequence(dropout=0.5), tokens()
    torch.manual_seed(7)
    expected = Plain(net.blocks)(x).detach()
    torch.manual_seed(7)
    with torch.no_grad():
        y = net(x)
    assert not y.requires_grad
    assert y.grad_fn is None
    assert torch.equal(y, expected)


def test_no_grad_sets_no_hooks() -> None:
    seen = []

    def fn(b: Tensor) -> Tensor:
        seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
        return b.sin()

    updates = [rg.Update("a", fn, "b")]
    with torch.no_grad():
        rg.run(updates, {"a": tokens(), "b": tokens()})
    assert seen == [None]
    rg.run(updates, {"a": tokens(), "b": tokens()})
    assert seen[1] is not None


def test_inference_mode() -> None:
    net, x = sequence(), tokens()
    expected = Plain(net.blocks)(x).detach()
    with torch.inference_mode():
        y = net(x)
        assert y.is_inference()
        assert torch.equal(y, expected)
    assert_same(gradients(net, [x], x), gradients(Plain(net.blocks), [x], x))  # and training goes on


@pytest.mark.parametrize("where", ["keyword", "closure", "attribute"])
def test_user_generator(where: str) -> None:
    generator = torch.Generator()
    x, weight = tokens(), torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)

    def noisy(b: Tensor, generator: torch.Generator) -> Tensor:
        return b * weight * (torch.rand(b.shape, generator=generator, dtype=b.dtype) > 0.5)

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = generator

        def forward(self, b: Tensor) -> Tensor:
            return noisy(b, self.generator)

    fn, kwargs = {
        "keyword": (noisy, {"generator": generator}),
        "closure": (lambda b: noisy(b, generator), {}),
        "attribute": (Noisy(), {}),
    }[where]

    def reversible() -> Tensor:
        generator.manual_seed(3)
        updates = [rg.Update("a", fn, "b", kwargs=kwargs), rg.Update("b", fn, "a", kwargs=kwargs)]
        return rg.run(updates, {"a": x, "b": x})["b"]

    def plain() -> Tensor:
        generator.manual_seed(3)
        return x + noisy(x + noisy(x, generator), generator)

    expected = gradients(plain, [x, weight])
    after = generator.get_state()
    assert_same(gradients(reversible, [x, weight]), expected)
    assert torch.equal(generator.get_state(), after)


def test_sdpa_kernel_around_the_forward_only() -> None:
    seen: dict[bool, list[tuple[bool, bool]]] = {False: [], True: []}

    def fn(b: Tensor) -> Tensor:
        cuda = torch.backends.cuda
        seen[rg.phase().replaying].append((cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()))
        return functional.scaled_dot_product_attention(b, b, b)

    x = tokens()

    def reversible() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return rg.run([rg.Update("a", fn, "b"), rg.Update("b", fn, "a")], {"a": x, "b": x})["b"]

    def plain() -> Tensor:
        attend = functional.scaled_dot_product_attention
        a = x + attend(x, x, x)
        return x + attend(a, a, a)

    assert_same(gradients(reversible, [x]), gradients(plain, [x]))
    assert seen == {False: [(False, True)] * 2, True: [(False, True)] * 2}
    assert torch.backends.cuda.flash_sdp_enabled()


def test_threads_share_a_module() -> None:
    net, inputs = sequence(), [tokens() for _ in range(16)]
    wanted = list(net.parameters())
    plain = Plain(net.blocks)
    expected = [torch.autograd.grad(loss_of(plain(x)), [x, *wanted]) for x in inputs]
    start = threading.Barrier(4)

    def work(thread: int) -> list[tuple[Tensor, ...]]:
        start.wait()
        return [torch.autograd.grad(loss_of(net(x)), [x, *wanted]) for x in inputs[thread::4] * 3]

    with ThreadPoolExecutor(4) as pool:
        for thread, found in enumerate(pool.map(work, range(4))):
            assert_same(found, expected[thread::4] * 3)


def test_forward_in_one_thread_and_backward_in_another() -> None:
    net, x = sequence(2), tokens()
    expected = torch.autograd.grad(loss_of(Plain(net.blocks)(x)), x)
    loss = loss_of(net(x))
    with ThreadPoolExecutor(1) as pool:
        assert_same(pool.submit(torch.autograd.grad, loss, x).result(), expected)


def test_double_backward_across_threads() -> None:
    """Autograd orders nodes by numbers that each thread counts for itself."""
    nets = [feed_forward(WIDTH).double() for _ in range(4)]
    x = tokens()
    wanted = [x, *(parameter for net in nets for parameter in net.parameters())][:-1]

    def slope(policy: rg.Policy, pool: ThreadPoolExecutor) -> tuple[Tensor, ...]:
        for _ in range(50):  # numbers here run ahead of the other thread's
            x.sin()
        updates = [rg.Update(target, net, "x") for target, net in zip("abcd", nets, strict=True)]
        updates += [rg.Update("x", torch.sin, "a"), rg.Update("c", torch.sin, "x")]
        out = rg.run(updates, dict.fromkeys("abcdx", x), policy=policy)
        total = sum(loss_of(stream) for stream in out.values())
        (first,) = pool.submit(torch.autograd.grad, total, x, create_graph=True).result()
        return torch.autograd.grad(first.square().sum() + total, wanted)

    with ThreadPoolExecutor(1) as pool:
        assert_same(slope(rg.Reverse(), pool), slope(rg.Keep(), pool))
