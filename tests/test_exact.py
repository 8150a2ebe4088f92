"""`ExactAdd` in whole programs: reversing is exact to the bit, and leaving its range is never silent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import retrograd as rg
from networks import WIDTH, Attention, feed_forward, gradients, loss_of, sequence, tokens
from retrograd import alarms
from retrograd.measure import LiveBytes

EXACT = rg.ExactAdd()


def single(depth: int, dropout: float = 0.0, **options: Any) -> rg.ReversibleSequence:
    """Pairs in float32, exact unless told otherwise."""
    return sequence(depth, dropout, **{"join": EXACT, **options}).float()


def x32() -> Tensor:
    return tokens().float().detach().requires_grad_()


def assert_equal_to_kept(net: rg.Reversible, call: Callable[[], Tensor], wanted: list[Tensor]) -> None:
    """Every gradient under Reverse is, to the bit, that of Keep."""
    found = []
    for policy in (rg.Reverse(), rg.Keep()):
        net.policy = policy
        found.append(gradients(call, wanted))
    for mine, expected in zip(*found, strict=True):
        assert torch.equal(mine, expected)
    assert all(each.isfinite().all() for each in found[0])
    assert any(each.any() for each in found[0][1:])


@pytest.mark.parametrize(("depth", "dropout"), [(8, 0.0), (8, 0.2), (96, 0.0), (96, 0.2), (512, 0.2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pairs(depth: int, dtype: torch.dtype, dropout: float) -> None:
    net, x = single(depth, dropout), x32()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        assert_equal_to_kept(net, lambda: net(x), [x, *net.parameters()])


def test_without_it_they_are_not_equal() -> None:
    """What the tests above would not show if the networks were too tame."""
    net, x = single(96, join=rg.Add()), x32()
    with pytest.raises(AssertionError), torch.autocast("cpu", torch.bfloat16):
        assert_equal_to_kept(net, lambda: net(x), [x, *net.parameters()])


def test_pairs_in_float64() -> None:
    net, x = sequence(96, 0.1, join=rg.ExactAdd(2.0**-40)), tokens()
    assert_equal_to_kept(net, lambda: net(x), [x, *net.parameters()])


@pytest.mark.parametrize("anchor_every", [1, 7])
def test_with_anchors(anchor_every: int) -> None:
    net, x = single(12, 0.1), x32()
    net.policy = rg.Keep()
    expected = gradients(net, [x, *net.parameters()], x)
    net.policy = rg.Reverse(anchor_every=anchor_every)
    for mine, kept in zip(gradients(net, [x, *net.parameters()], x), expected, strict=True):
        assert torch.equal(mine, kept)


class Attend(nn.Module):
    """Attention of one modality to another."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(WIDTH)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.attention(x, context=other)


@pytest.mark.parametrize("autocast", [False, True])
def test_two_modalities(autocast: bool) -> None:
    blocks, kinds = [], ["self", "other"] * 24
    for kind in kinds:
        f, j = (Attend(), Attend()) if kind == "other" else (Attention(WIDTH), Attention(WIDTH))
        blocks.append((f, feed_forward(WIDTH, 0.1), j, feed_forward(WIDTH, 0.1)))
    net = rg.DualModality(blocks, kinds, join=EXACT)
    x, m = x32(), torch.randn(2, 3, WIDTH, requires_grad=True)

    def call() -> Tensor:
        a, b = net(x, m)
        return torch.cat((a, b), 1)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_equal_to_kept(net, call, [x, m, *net.parameters()])


class Fiber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = feed_forward(WIDTH), feed_forward(WIDTH, 0.1)

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"0": self.low(x["1"]), "1": self.high(x["0"] + x["1"])}


def test_dictionaries_as_streams() -> None:
    net = rg.ReversibleSequence([(Fiber(), Fiber()) for _ in range(48)], join=EXACT)
    x = {"0": x32(), "1": x32()}

    def call() -> Tensor:
        y = net(x)
        return torch.cat((y["0"], y["1"]))

    assert_equal_to_kept(net, call, [*x.values(), *net.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_midpoint(dtype: torch.dtype) -> None:
    net, x = rg.Midpoint([feed_forward(WIDTH, 0.1) for _ in range(96)], join=rg.ExactAdd(range=2.0**14)), x32()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        assert_equal_to_kept(net, lambda: net(x), [x, *net.parameters()])


def test_layer_dropout_and_double_backward() -> None:
    net, x = single(6, layer_dropout=0.4), x32()

    def second(policy: rg.Policy) -> list[Tensor]:
        net.policy = policy
        torch.manual_seed(3)
        first = torch.autograd.grad(loss_of(net(x)), x, create_graph=True)
        # A dropped block has no gradient, in either.
        found = torch.autograd.grad(first[0].square().sum(), [x, *net.parameters()], allow_unused=True)
        return [*first, *(each for each in found if each is not None)]

    for mine, kept in zip(second(rg.Reverse()), second(rg.Keep()), strict=True):
        assert torch.equal(mine, kept)


def test_retained_graph_twice() -> None:
    net, x = single(8), x32()
    loss = loss_of(net(x))
    first = torch.autograd.grad(loss, [x, *net.parameters()], retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, [x, *net.parameters()]), strict=True):
        assert torch.equal(a, b)


# ---- the way back


@pytest.mark.parametrize("depth", [1, 64])
@pytest.mark.parametrize("grad_mode", [False, True])
def test_invert_gives_back_every_bit(depth: int, grad_mode: bool) -> None:
    net = single(depth)
    streams = {name: EXACT.enter(torch.randn(2, 5, WIDTH)) for name in "ab"}
    with torch.set_grad_enabled(grad_mode):
        back = net.invert(net.run(streams))
    assert all(torch.equal(back[name], streams[name]) for name in "ab")


def test_invert_rounds_what_was_on_no_grid() -> None:
    """The streams that entered are known as the program saw them."""
    net, x = single(4), {name: torch.randn(2, 5, WIDTH) for name in "ab"}
    back = net.invert(net.run(x))
    for name in "ab":
        assert torch.equal(back[name], EXACT.enter(x[name]))
        assert (back[name] - x[name]).abs().max() <= EXACT.grid / 2


def test_the_same_forward_with_and_without_grad() -> None:
    net, x = single(8), x32()
    with torch.no_grad():
        plain = net(x)
    assert torch.equal(net(x), plain)


# ---- the range


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def leaving(factor: float = 1e6, **options: Any) -> rg.ReversibleSequence:
    """Its update 2 leaves the range of 2048; what comes after it is out of range as well."""
    blocks = [(Times(0.1), Times(0.1)), (Times(factor), Times(1e-6)), (Times(0.1), Times(0.1))]
    return rg.ReversibleSequence(blocks, **{"join": EXACT, **options})


LEFT = r"update 2 \(target 'a', fn Times\): its target left the range in which ExactAdd\(.*larger range"


@pytest.fixture(params=["at once", "late"])
def _arrival(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that are on the host when the backward begins, or only at its end, as on a busy device."""
    if request.param == "late":
        here = alarms.Arriving.here
        monkeypatch.setattr(alarms.Arriving, "here", lambda self, *, wait: here(self, wait=wait) if wait else None)


@pytest.mark.usefixtures("_arrival")
@pytest.mark.parametrize("factor", [1e6, -1e6, float("inf")])
def test_leaving_the_range_raises_in_the_backward_and_names_the_update(factor: float) -> None:
    net, x = leaving(factor), torch.ones(2, 4, requires_grad=True)
    y = net(x)
    with pytest.raises(RuntimeError, match=LEFT):
        y.sum().backward()
    with pytest.raises(RuntimeError, match=LEFT):  # and so does the next pass
        torch.autograd.grad(net(x).sum(), x)


@pytest.mark.usefixtures("_arrival")
def test_leaving_the_range_in_the_last_piece_of_many() -> None:
    net, x = leaving(policy=rg.Reverse(anchor_every=2)), torch.ones(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=LEFT):
        net(x).sum().backward()


@pytest.mark.usefixtures("_arrival")
def test_a_value_that_is_not_a_number_is_out_of_range() -> None:
    net, x = leaving(float("nan")), torch.ones(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=LEFT):
        net(x).sum().backward()


@pytest.mark.usefixtures("_arrival")
def test_a_stream_that_enters_outside_the_range() -> None:
    net, x = leaving(0.1), torch.full((2, 4), 3000.0, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"a stream that enters left the range in which ExactAdd\("):
        net(x).sum().backward()


def test_the_backward_after_one_that_raised() -> None:
    net, x = leaving(), torch.ones(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=LEFT):
        net(x).sum().backward()
    with torch.no_grad():
        net.blocks[1][0].factor.fill_(0.1)
    net(x).sum().backward()
    assert x.grad is not None


def test_invert_raises_at_once() -> None:
    net = leaving(0.1)
    with pytest.raises(RuntimeError, match="left the range"), torch.no_grad():
        net.invert({"a": torch.full((2, 4), 3000.0), "b": torch.ones(2, 4)})


def test_kept_activations_need_no_range() -> None:
    net, x = leaving(policy=rg.Keep()), torch.ones(2, 4, requires_grad=True)
    net(x).sum().backward()
    with torch.no_grad():
        leaving()(x)


def test_a_larger_range_and_float64_are_remedies() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    leaving(join=rg.ExactAdd(range=2e6))(x).sum().backward()
    leaving().double()(x.double()).sum().backward()


# ---- what is refused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_mode", [False, True])
def test_streams_of_other_dtypes_are_refused_with_a_remedy(dtype: torch.dtype, grad_mode: bool) -> None:
    net = single(1).to(dtype)
    with pytest.raises(TypeError, match=rf"float32 or float64 streams, not {dtype}; use .float\(\)"):
        with torch.set_grad_enabled(grad_mode):
            net(x32().to(dtype))


@pytest.mark.parametrize("other", [rg.Add(), rg.ExactAdd(2.0**-10), rg.Scale(0.5)])
@pytest.mark.parametrize("exact_first", [False, True])
def test_other_joins_on_an_exact_stream_are_refused(other: rg.Join, exact_first: bool) -> None:
    joins = [EXACT, other] if exact_first else [other, EXACT]
    updates = [rg.Update("a", torch.sin, "b", join=join) for join in joins]
    with pytest.raises(ValueError, match=r"update \d \(target 'a', fn sin\): .* meets .* on stream 'a'.*on one grid"):
        rg.run(updates, {"a": torch.ones(1), "b": torch.ones(1)})


def test_other_streams_may_have_other_joins_and_grids() -> None:
    updates = [
        rg.Update("a", torch.sin, "c", join=EXACT),
        rg.Update("b", torch.sin, "c", join=rg.ExactAdd(2.0**-10)),
        rg.Update("c", torch.add, ("a", "b")),
    ]
    streams = {name: torch.ones(1) for name in "abc"}
    back = rg.invert(updates, rg.run(updates, streams))
    assert torch.equal(back["a"], streams["a"])


# ---- memory


def _live_after_forward(depth: int, **options: Any) -> int:
    net, x = single(depth, **options), x32()
    with LiveBytes() as memory:
        y = net(x)
        live = memory.live
    assert y.requires_grad
    return live


@pytest.mark.parametrize("policy", [rg.Reverse(), rg.Reverse(watch=1e-3)])
def test_memory_grows_by_one_byte_per_update(policy: rg.Policy) -> None:
    shallow, deep = (_live_after_forward(depth, policy=policy) for depth in (4, 68))
    assert deep - shallow == 2 * 64
    added = _live_after_forward(4, policy=policy) - _live_after_forward(4, policy=policy, join=rg.Add())
    assert added == 2 * 4 + 1


def test_the_peak_does_not_grow_with_depth() -> None:
    def peak(depth: int) -> int:
        net, x = single(depth), x32()
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with LiveBytes() as memory:
            loss_of(net(x)).backward()
        return memory.peak

    assert peak(68) - peak(4) == 2 * 64


# ---- gradients


def test_gradients_are_those_of_add_up_to_rounding() -> None:
    """Straight through: the steps of the grid are not differentiated."""
    net, x = sequence(6, join=rg.ExactAdd(2.0**-40)), tokens()
    plain = copy.deepcopy(net)
    plain.join = rg.Add()
    for mine, expected in zip(
        gradients(net, [x, *net.parameters()], x), gradients(plain, [x, *plain.parameters()], x), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


def test_gradients_of_midpoint_carry_the_gain() -> None:
    exact = rg.Midpoint([feed_forward(WIDTH) for _ in range(5)], join=rg.ExactAdd(2.0**-40)).double()
    plain = rg.Midpoint(exact.blocks).double()
    x = tokens()
    for mine, expected in zip(
        gradients(exact, [x, *exact.parameters()], x), gradients(plain, [x, *plain.parameters()], x), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


# ---- transforms


def _pure(net: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda weights, x: loss_of(functional_call(net, weights, (x,)))


def test_torch_func_grad() -> None:
    net, x = single(3), x32().detach()
    weights = {name: parameter.detach() for name, parameter in net.named_parameters()}
    found = grad(_pure(net))(weights, x)
    expected = torch.autograd.grad(loss_of(net(x)), list(net.parameters()))
    for mine, kept in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(mine, kept)


def test_torch_func_vmap_over_grad() -> None:
    net, xs = single(2), torch.randn(3, 2, 5, WIDTH)
    weights = {name: parameter.detach() for name, parameter in net.named_parameters()}
    found = vmap(grad(_pure(net)), in_dims=(None, 0))(weights, xs)
    for i, x in enumerate(xs):
        expected = torch.autograd.grad(loss_of(net(x)), list(net.parameters()))
        for mine, kept in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(mine[i], kept, rtol=1e-4, atol=1e-5)


def test_torch_func_jvp() -> None:
    """Forward mode passes straight through as well: the same directional derivative as the backward gives."""
    net, x, direction = sequence(3, join=EXACT), tokens().detach(), torch.randn(2, 5, WIDTH, dtype=torch.double)
    # Fused attention has no forward-mode derivative; its plain form has.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, found = jvp(lambda x: loss_of(net(x)), (x,), (direction,))
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(net(x)), x)
    torch.testing.assert_close(found, (gradient * direction).sum())


@pytest.mark.parametrize("policy", [rg.Keep(), rg.Reverse(), rg.Reverse(anchor_every=1)], ids=str)
def test_what_gets_no_gradient_gets_none(policy: rg.Policy) -> None:
    """Zeros would let the weight decay of an optimizer move it."""
    f, g = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    x = torch.randn(2, 3)
    updates = [rg.Update("a", f, "b", join=rg.ExactAdd()), rg.Update("b", g, "a", join=rg.ExactAdd())]
    rg.run(updates, {"a": x, "b": x}, policy=policy)["a"].sum().backward()
    assert f.weight.grad is not None
    assert g.weight.grad is None
